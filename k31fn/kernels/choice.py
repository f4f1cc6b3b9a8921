"""Names of implementations on a command line: ``reference``, ``triton``,
``attn_res:triton,mhc_pre:reference``.

Python chooses with :func:`k31fn.kernels.registry.use_impl`; command lines read the same choice with
:func:`parse`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from k31fn.kernels.registry import OPS, load_all

__all__ = ["check", "parse"]


def parse(text: str, field: str = "kernels") -> dict[str, str]:
    """Implementation by op, as :func:`~k31fn.kernels.registry.use_impl` takes it.

    Args:
        text: names separated by commas, later ones over earlier ones. ``OP:IMPLEMENTATION`` chooses
            for one op, an implementation's name alone for every op that has one of this name (all
            have ``reference``). Empty: nothing is chosen, every call takes the device's own.
        field: how messages call it.

    Raises:
        ValueError: an unknown op or implementation; names what there is.
    """
    load_all()  # or an op whose package nobody has imported would be unknown
    chosen: dict[str, str] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        op, colon, name = word.partition(":")
        # in order: "reference,attn_res:triton" is the references with one exception
        if colon:
            chosen[op] = _of_op(op, name, f"{field}={text!r}")
        else:
            chosen |= dict.fromkeys(_with(word, f"{field}={text!r}"), word)
    return chosen


def check(chosen: Mapping[str, str], device: str, field: str = "kernels") -> None:
    """Refuses implementations that never run on that type of device, before any work is done.

    Raises:
        ValueError: names the first of them, where it runs, and what the op has there.
    """
    for op, name in chosen.items():
        if name == "reference":
            continue
        impl = OPS[op].implementations[name]
        places = impl.devices + impl.on_request
        if device not in places:
            here = ["reference"]
            for other in OPS[op].implementations.values():
                if device in other.devices + other.on_request:
                    here.append(other.name)
            raise ValueError(
                f"{field}: {op}:{name} runs on {', '.join(places) or 'no device of this process'}, "
                f"the run is on {device}; for it {op} has {', '.join(here)}"
            )


def _of_op(op: str, name: str, at: str) -> str:
    # refused now, with what there is: an unknown name would be an error in the first step
    if op not in OPS:
        near = difflib.get_close_matches(op, OPS, n=1)
        raise ValueError(
            f"{at}: no op {op!r}{f'; nearest: {near[0]!r}' if near else ''}; ops: "
            f"{', '.join(sorted(OPS))}"
        )
    known = ["reference", *OPS[op].implementations]
    if name not in known:
        raise ValueError(
            f"{at}: op {op!r} has no implementation {name!r}; it has {', '.join(known)}"
        )
    return name


def _with(name: str, at: str) -> list[str]:
    """The ops that have an implementation of this name."""
    ops = [op for op in OPS if name == "reference" or name in OPS[op].implementations]
    if not ops:
        known = {"reference"}
        for op in OPS.values():
            known.update(op.implementations)
        raise ValueError(
            f"{at}: no op has an implementation {name!r}; there are {', '.join(sorted(known))} (or "
            "OP:NAME)"
        )
    return ops
