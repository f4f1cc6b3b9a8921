# pyright: reportMissingImports=false, reportMissingParameterType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
"""Parts of kernels over several sources: pointers, what they refuse, and how they are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.launch import Build, Tile

__all__ = [
    "MOST_SOURCES",
    "add_pairs",
    "alike",
    "at",
    "build",
    "named",
    "odd_shapes",
    "padded",
    "pick",
    "staged",
]

# a kernel has so many pointers; K3.1 mixes at most 9 sources (93 layers in blocks of 12, and one)
MOST_SOURCES = 12
_SHARED = 200 * 2**10  # bytes of a core for what is on its way
_ALIGNED = ("width", "source_group", "key_group", "out_group", "ct_group")
_OF_MODEL = ("out_ptr", "ct_ptr")


@triton.jit
def add_pairs(a, b, c, d):
    """Reduction of two sums at once: half the passes between threads."""
    return a + c, b + d


@triton.jit
def at(I: tl.constexpr, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11):
    """The pointer of number I, known when compiled: no branch is left."""
    if I == 0:
        p = p0
    if I == 1:
        p = p1
    if I == 2:
        p = p2
    if I == 3:
        p = p3
    if I == 4:
        p = p4
    if I == 5:
        p = p5
    if I == 6:
        p = p6
    if I == 7:
        p = p7
    if I == 8:
        p = p8
    if I == 9:
        p = p9
    if I == 10:
        p = p10
    if I == 11:
        p = p11
    return p


@triton.jit
def pick(i, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, N: tl.constexpr):
    """The pointer of number i; 0 to N - 1 are told apart."""
    # where the number is known only when it runs; a chain of selects, since pointers in an array
    # would be loaded from memory first
    p = p0
    if N > 1:
        p = tl.where(i == 1, p1, p)
    if N > 2:
        p = tl.where(i == 2, p2, p)
    if N > 3:
        p = tl.where(i == 3, p3, p)
    if N > 4:
        p = tl.where(i == 4, p4, p)
    if N > 5:
        p = tl.where(i == 5, p5, p)
    if N > 6:
        p = tl.where(i == 6, p6, p)
    if N > 7:
        p = tl.where(i == 7, p7, p)
    if N > 8:
        p = tl.where(i == 8, p8, p)
    if N > 9:
        p = tl.where(i == 9, p9, p)
    if N > 10:
        p = tl.where(i == 10, p10, p)
    if N > 11:
        p = tl.where(i == 11, p11, p)
    return p


def padded(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, as many as the kernels have pointers; those past the sources are not read."""
    # a kernel's arguments are fixed in number; one kernel for each count would compile twelve
    return tensors + [tensors[0]] * (MOST_SOURCES - len(tensors))


def alike(sources: list[Tensor]) -> list[Tensor]:
    """The sources, contiguous, and all per group if one is."""
    # the kernels know one step from group to group for all sources, to have one number, not twelve
    groups = max(s.shape[0] for s in sources)
    same = all(s.shape[0] == groups and s.is_contiguous() for s in sources)
    return sources if same else [s.expand(groups, -1, -1).contiguous() for s in sources]


def named(kernel: Any, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The constants that the kernel has, and options of the launch, whose names are in small
    letters.
    """
    # Triton's interpreter wraps a kernel in something that does not tell its names
    names = getattr(kernel, "arg_names", constants)
    return {k: v for k, v in constants.items() if k in names or k.islower()}


def staged(stages: int, per_core: int, size: int, *, beside: int = 1) -> int:
    """Stages of the compiler's pipeline, as many as a core's shared memory has room for.

    Args:
        stages: at most.
        per_core: programs that share it.
        size: bytes that a stage of one loads.
        beside: stages that need no shared memory.
    """
    return max(1, min(stages, beside + _SHARED // (per_core * size)))


def odd_shapes(sources: Sequence[Tensor], weights: Sequence[Tensor]) -> str:
    """Why sources ``[B, T, D]`` and weights ``[D]`` do not go together, or nothing."""
    if not 1 <= len(sources) <= MOST_SOURCES:
        return f"it mixes 1 to {MOST_SOURCES} sources, got {len(sources)}"
    dtypes = {str(s.dtype) for s in sources}
    if len(dtypes) > 1:
        return f"the sources have one dtype, got {sorted(dtypes)}"
    shape = sources[0].shape
    shapes = [x.shape for x in (*weights, *sources)]
    wanted = [shape[-1:]] * len(weights) + [shape] * len(sources)
    if len(shape) != 3 or not shape[-1] or shapes != wanted:
        given = ", ".join(map(str, map(list, shapes)))
        return f"the sources have one shape [B, T, D], query and norm_weight [D], got {given}"
    return ""


def build(
    kernel: Any,
    shapes: str,
    constants: Mapping[str, Any],
    direction: Literal["forward", "backward"],
    tile: Tile,
) -> Build:
    """The kernel for ``shapes``, such as ``bf16 N9 D7168``, whose first word is the sources' dtype.

    Arguments are known by their names; of the constants those that the kernel has are taken.
    """
    known = {k: v for k, v in constants.items() if k in kernel.arg_names}
    dtype = shapes.split()[0]
    signature = {}
    for name in kernel.arg_names:
        if name not in known:
            signature[name] = _type(name, dtype)
    return Build(f"{kernel.__name__} {shapes}", kernel, signature, known, direction, tile, _ALIGNED)


def _type(name: str, dtype: str) -> str:
    """Sources, results and what goes with them are in the model's dtype; all else is float32, or an
    integer.
    """
    if name in _OF_MODEL or (name[0] in "sd" and name[1:].isdigit()):
        return f"*{dtype}"
    return "*fp32" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
