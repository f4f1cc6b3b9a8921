"""Trees of tensors: their comparison, and which of their leaves are differentiated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from k31fn import tree

__all__ = ["assert_close_trees", "at", "floating_positions"]

T = TypeVar("T")

_SHOWN = 8  # lines of a failure message


def floating_positions(leaves: Sequence[Any]) -> list[int]:
    """Positions of the real floating tensors: the leaves that have a gradient."""
    positions = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            positions.append(i)
    return positions


def at(positions: Sequence[int], values: Sequence[T]) -> list[T]:
    """The values at these positions."""
    return [values[i] for i in positions]


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
    # None is a leaf here: where one side has a tensor and the other nothing, they differ
    left = dict(tree.flatten_with_paths(actual, allow_none=True))
    right = dict(tree.flatten_with_paths(expected, allow_none=True))
    if left.keys() != right.keys():
        raise AssertionError(_difference(left, right))
    faults = []
    for path in right:
        fault = _compare(path, left[path], right[path], rtol, atol, equal_nan)
        if fault:
            faults.append(fault)
    if faults:
        faults.sort(key=lambda fault: -fault.excess)
        lines = [f"{len(faults)} of {len(right)} leaves differ:"]
        lines += [fault.line for fault in faults[:_SHOWN]]
        if len(faults) > _SHOWN:
            lines.append(f"... and {len(faults) - _SHOWN} more")
        raise AssertionError("\n  ".join(lines))
    # last, since a path tells more: a list and a tuple of equal leaves have the same paths
    structure = tree.flatten(actual, allow_none=True)[1]
    wanted = tree.flatten(expected, allow_none=True)[1]
    if structure != wanted:
        raise AssertionError(f"same leaves, but not the same tree: {structure} against {wanted}")


class _Fault(NamedTuple):
    excess: float  # error as a multiple of the tolerance
    line: str


def _difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    missing = [path for path in right if path not in left]
    extra = [path for path in left if path not in right]
    parts = [f"{len(left)} leaves against {len(right)} expected"]
    if missing:
        parts.append(f"missing: {', '.join(missing[:_SHOWN])}")
    if extra:
        parts.append(f"not expected: {', '.join(extra[:_SHOWN])}")
    return "trees differ in structure: " + "; ".join(parts)


def _compare(
    path: str, actual: Any, expected: Any, rtol: float | int, atol: float | int, equal_nan: bool
) -> _Fault | None:
    name = path or "(the tree itself)"
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        # == between a tensor and a number would be a tensor
        one_is_tensor = isinstance(actual, Tensor) or isinstance(expected, Tensor)
        if not one_is_tensor and actual == expected:
            return None
        return _Fault(math.inf, f"{name}: got {_brief(actual)}, expected {_brief(expected)}")
    for what in ("shape", "dtype"):
        got = getattr(actual, what)
        wanted = getattr(expected, what)
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
    # integers in int64: float64 cannot tell all of them apart
    exact = not (expected.is_floating_point() or expected.is_complex())
    wide = torch.int64 if exact else torch.promote_types(expected.dtype, torch.float64)
    a = actual.detach().cpu().to(wide).flatten()
    e = expected.detach().cpu().to(wide).flatten()
    # equal infinities have no error, though their difference is NaN
    error = torch.where(a == e, 0.0, (a - e).abs().to(torch.float64))
    if equal_nan:
        error = torch.where(a.isnan() & e.isnan(), 0.0, error)
    # an expected infinity or NaN would allow an infinite error
    allowed = torch.where(e.isfinite(), atol + rtol * e.abs(), 0.0)
    wrong = ~(error <= allowed)  # and not error > allowed, which a NaN would pass
    if not bool(wrong.any()):
        return None
    excess = torch.where(wrong, torch.nan_to_num(error / allowed, nan=math.inf), 0.0)
    worst = int(excess.argmax())
    index = list(map(int, torch.unravel_index(torch.tensor(worst), actual.shape)))
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
