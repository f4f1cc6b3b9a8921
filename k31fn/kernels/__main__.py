"""``python -m k31fn.kernels``: every op, its implementations, and which of them run on this
machine.

In the order of choice. ``default`` is what a call runs unless
:func:`~k31fn.kernels.registry.use_impl` names another; for what does not run, the reason. Where an
implementation is registered for a device and cannot run there, a call of those dtypes raises: the
reference is not taken silently.
"""

from __future__ import annotations

import argparse

from k31fn import device
from k31fn.kernels.registry import OPS, Implementation, Op, load_all

__all__ = ["main", "table"]


def table(kind: str) -> list[tuple[str, str, str, str]]:
    """(op, implementation, device types, whether it runs on a device of this kind or why not),
    header first.
    """
    rows = [("op", "implementation", "devices", f"on {kind}")]
    for op in sorted(OPS.values(), key=lambda op: op.name):
        rows += _rows(op, kind)
    return rows


def _rows(op: Op, kind: str) -> list[tuple[str, str, str, str]]:
    rows, taken, every = [], set(), False
    for impl in op.implementations.values():
        state = _state(impl, kind)
        if not state:
            state = (
                "also" if every or (impl.dtypes and taken.issuperset(impl.dtypes)) else "default"
            )
            taken, every = taken.union(impl.dtypes), every or not impl.dtypes
            state += (
                f" for {', '.join(str(d).removeprefix('torch.') for d in impl.dtypes)}"
                if impl.dtypes
                else ""
            )
        rows.append((op.name, impl.name, ",".join((*impl.devices, *impl.on_request)), state))
    registered = [impl for impl in op.implementations.values() if kind in impl.devices]
    rest = "default for other dtypes" if registered else "default"
    return [
        *rows,
        (
            op.name,
            "reference",
            "all",
            rest if all(impl.dtypes for impl in registered) else "on request",
        ),
    ]


def _state(impl: Implementation, kind: str) -> str:
    """Why it is not chosen by default; ``""`` if it is."""
    reason = impl.missing()
    if kind not in impl.devices + impl.on_request:
        return f"no: it runs on {', '.join(impl.devices + impl.on_request)}" + (
            f"; {reason}" if reason else ""
        )
    if reason:
        return f"no: {reason}"
    return "" if kind in impl.devices else "on request"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m k31fn.kernels", description="Ops and their implementations."
    )
    load_all()
    kinds = {
        kind for op in OPS.values() for impl in op.implementations.values() for kind in impl.devices
    } | {"cpu"}
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
    rows = table(kind)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for *cells, last in rows:
        print(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)),
            last,
            sep="  ",
        )


if __name__ == "__main__":
    main()
