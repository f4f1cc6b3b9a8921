"""``python -m k31fn.kernels``: every op, its implementations, and which of them run on this
machine.

In the order of choice. ``default`` is what a call runs unless
:func:`~k31fn.kernels.registry.use_impl` names another; for what does not run, the reason. Where an
implementation is registered for a device and cannot run there, a call of those dtypes raises: the
reference is not taken silently. ``in no graph`` says why a step with it cannot be captured
(:func:`k31fn.jit.jit`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from k31fn import device
from k31fn.commands import outlives_output
from k31fn.kernels.registry import OPS, Implementation, Op, load_all

__all__ = ["main"]


_Row = tuple[str, str, str, str, str]


def _table(kind: str) -> list[_Row]:
    """(op, implementation, device types, whether it runs on a device of this kind or why not, why a
    graph cannot hold it), header first.
    """
    rows = [("op", "implementation", "devices", f"on {kind}", "")]
    for op in sorted(OPS.values(), key=lambda op: op.name):
        rows += _rows(op, kind)
    return rows


def _rows(op: Op, kind: str) -> list[_Row]:
    rows: list[_Row] = []
    taken: set[torch.dtype] = set()  # by implementations before this one
    takes_all = False  # whether one of them takes every dtype
    for impl in op.implementations.values():
        state = _state(impl, kind)
        if not state:
            chosen_for = impl.by_default or impl.dtypes
            second = takes_all or (impl.dtypes and taken.issuperset(chosen_for))
            state = "also" if second else "default"
            if impl.dtypes:
                state += f" for {_names(chosen_for)}"
            others = [dtype for dtype in impl.dtypes if dtype not in chosen_for]
            if others:
                state += f", on request for {_names(others)}"
            taken.update(chosen_for)
            takes_all = takes_all or not impl.dtypes
        places = ",".join((*impl.devices, *impl.on_request))
        rows.append((op.name, impl.name, places, state, impl.no_capture))
    # registered, whether it can run here or not: where it cannot, a call raises
    registered = [impl for impl in op.implementations.values() if kind in impl.devices]
    state = "default for other dtypes" if registered else "default"
    if not all(impl.dtypes for impl in registered):
        state = "on request"
    return [*rows, (op.name, "reference", "all", state, "")]


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _state(impl: Implementation, kind: str) -> str:
    """Why it is not chosen by default; ``""`` if it is."""
    reason = impl.missing()
    places = impl.devices + impl.on_request
    if kind not in places:
        # both reasons: on the right device it would not run either
        return f"no: it runs on {', '.join(places)}{f'; {reason}' if reason else ''}"
    if reason:
        return f"no: {reason}"
    return "" if kind in impl.devices else "on request"


@outlives_output()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m k31fn.kernels", description="Ops and their implementations."
    )
    load_all()
    kinds = {"cpu"}
    for op in OPS.values():
        for impl in op.implementations.values():
            kinds.update(impl.devices)
    parser.add_argument(
        "--device",
        default=device.default().type,
        choices=sorted(kinds),
        help="device type (default: the best here)",
    )
    kind = parser.parse_args().device
    if not device.num_devices(kind):
        print(
            f"no {kind} device on this machine; what would run on one, with the packages that are "
            "here:"
        )
    rows = _table(kind)
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    for *cells, state, no_capture in rows:
        if no_capture:
            state += f"; in no graph: {no_capture}"
        # the last column is a reason of any length: nothing stands behind it
        print(*map(str.ljust, cells, widths), state, sep="  ")


if __name__ == "__main__":
    main()
