"""Comparison of trees of tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree

__all__ = ["assert_close_trees"]

_SHOWN = 8  # lines of a failure message


def assert_close_trees(
    actual: Any, expected: Any, *, rtol: float | int, atol: float | int, equal_nan: bool = False
) -> None:
    """Asserts ``|actual - expected| <= atol + rtol |expected|`` in every element of every leaf.

    Structure, shapes and dtypes must be the same; leaves that are not tensors must be equal. Values
    are compared in float64 (integers and booleans in int64), on the CPU. Infinities must be equal;
    NaN equals nothing unless ``equal_nan``.

    Raises:
        AssertionError: lists the paths that are wrong, the worst first: how many elements differ,
            and the one that is furthest outside, with its index, both values and both errors.
    """
    left, right = (dict(tree.flatten_with_paths(x, allow_none=True)) for x in (actual, expected))
    if left.keys() != right.keys():
        raise AssertionError(_difference(left, right))
    faults = [
        f for path in right if (f := _compare(path, left[path], right[path], rtol, atol, equal_nan))
    ]
    if faults:
        faults.sort(key=lambda f: -f.excess)
        lines = [f.line for f in faults[:_SHOWN]]
        more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise AssertionError(
            "\n  ".join([f"{len(faults)} of {len(right)} leaves differ:", *lines, *more])
        )
    structures = [tree.flatten(x, allow_none=True)[1] for x in (actual, expected)]
    if structures[0] != structures[1]:
        raise AssertionError(
            f"same leaves, but not the same tree: {structures[0]} against {structures[1]}"
        )


class _Fault(NamedTuple):
    excess: float  # error as a multiple of the tolerance
    line: str


def _difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    missing, extra = [p for p in right if p not in left], [p for p in left if p not in right]
    parts = [f"{len(left)} leaves against {len(right)} expected"]
    parts += [f"missing: {', '.join(missing[:_SHOWN])}"] if missing else []
    parts += [f"not expected: {', '.join(extra[:_SHOWN])}"] if extra else []
    return "trees differ in structure: " + "; ".join(parts)


def _compare(
    path: str, actual: Any, expected: Any, rtol: float | int, atol: float | int, equal_nan: bool
) -> _Fault | None:
    name = path or "(the tree itself)"
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        same = (
            not isinstance(actual, Tensor)
            and not isinstance(expected, Tensor)
            and actual == expected
        )
        return (
            None
            if same
            else _Fault(math.inf, f"{name}: got {_brief(actual)}, expected {_brief(expected)}")
        )
    for what in ("shape", "dtype"):
        got, wanted = getattr(actual, what), getattr(expected, what)
        if got != wanted:
            return _Fault(math.inf, f"{name}: {what} {_brief(got)}, expected {_brief(wanted)}")
    return _compare_values(name, actual, expected, rtol, atol, equal_nan)


def _compare_values(
    name: str,
    actual: Tensor,
    expected: Tensor,
    rtol: float | int,
    atol: float | int,
    equal_nan: bool,
) -> _Fault | None:
    exact = not (expected.is_floating_point() or expected.is_complex())
    wide = torch.int64 if exact else torch.promote_types(expected.dtype, torch.float64)
    a, e = (t.detach().cpu().to(wide).flatten() for t in (actual, expected))
    error = torch.where(
        a == e, 0.0, (a - e).abs().to(torch.float64)
    )  # equal infinities have no error
    if equal_nan:
        error = torch.where(a.isnan() & e.isnan(), 0.0, error)
    allowed = torch.where(e.isfinite(), atol + rtol * e.abs(), 0.0)
    wrong = ~(error <= allowed)
    if not bool(wrong.any()):
        return None
    excess = torch.where(wrong, torch.nan_to_num(error / allowed, nan=math.inf), 0.0)
    worst = int(excess.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape)]
    relative = float(error[worst] / e[worst].abs())
    line = (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements; worst at {index}: got "
        f"{_number(a[worst])}, expected "
        f"{_number(e[worst])} (error {float(error[worst]):.3g}, relative {relative:.3g}; "
        f"rtol={rtol:g}, atol={atol:g})"
    )
    return _Fault(float(excess[worst]), line)


def _number(x: Tensor) -> str:
    return f"{x.item():.9g}" if x.is_floating_point() or x.is_complex() else str(x.item())


def _brief(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    return str(list(x)) if isinstance(x, torch.Size) else repr(x)
