"""Launches of kernels: where they can run, how large their grid is, and what ``vmap`` makes of
them.

This file does not import triton; the kernels themselves, in ``<op>/triton.py``, are imported when
the first one runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from k31fn import _functorch, device

__all__ = [
    "INTERPRETED",
    "MOST_PROGRAMS",
    "ON_REQUEST",
    "Build",
    "Tile",
    "grid",
    "grouped",
    "lazily",
    "looping_grid",
    "missing_triton",
    "programs",
    "share",
    "step",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton kernels run in its interpreter, on the CPU.

Set ``TRITON_INTERPRET=1`` before the process starts.
"""

ON_REQUEST = ("cpu",) if INTERPRETED else ()
"""Devices that Triton kernels run on besides CUDA and Ascend."""

MOST_PROGRAMS = 65535
"""Ascend's limit for a grid, kept on every device."""


class Tile(NamedTuple):
    """Cut of a kernel for a kind of device.

    Attributes:
        warps: per program (CUDA).
        per_core: programs per core of the persistent grid.
        rows: tokens per step; 1 unless the kernel says otherwise.
        columns: features per step; 0: all.
        stages: of the compiler's software pipeline (CUDA).
    """

    warps: int = 4
    per_core: int = 1
    rows: int = 1
    columns: int = 0
    stages: int = 2


class Build(NamedTuple):
    """A kernel as it would be compiled for a launch; ``tools`` compile all of an op's ahead of
    time.

    Attributes:
        name: says kernel, shape and dtype.
        kernel: the ``@triton.jit`` function.
        signature: Triton type per argument that is not constant.
        constants: value per ``constexpr``.
        direction: which of the two it belongs to.
        tile: warps and stages.
        aligned: integers that are multiples of 16, as pointers are; the compiler widens loads by
            it. Names that the kernel does not have are ignored.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    direction: Literal["forward", "backward"]
    tile: Tile
    aligned: tuple[str, ...] = ()


def missing_triton() -> str:
    """``""`` if triton is installed, else how to get it."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'k31fn[cuda]', or 'k31fn[npu]' for Ascend)"
    return ""


def lazily(module: str, name: str) -> Callable[..., Any]:
    """``module.name``, imported when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def programs(where: torch.device, groups: int, work: int, per_core: int) -> int:
    """Programs per group of a persistent grid over ``groups`` times ``work`` pieces.

    Raises:
        ValueError: more groups than a grid may have programs.
    """
    grid(groups, groups)
    return share(where, groups, work, per_core)


def share(where: torch.device, units: int, work: int, per_core: int) -> int:
    """Programs that each of so many units of work may have, of what runs at once; at least one."""
    # units share the cores: with many samples under vmap each has fewer programs
    wanted = max(1, device.num_cores(where) * per_core // units)
    # one does nothing where there is no work: a grid may not be empty
    return max(1, min(work, wanted, MOST_PROGRAMS // units))


def looping_grid(pieces: int) -> tuple[int]:
    """The grid of a kernel whose programs go on to further pieces: one each, as far as allowed."""
    return (max(1, min(pieces, MOST_PROGRAMS)),)


def grid(count: int, groups: int) -> tuple[int]:
    """The grid of a launch of ``count`` programs, for so many groups.

    Raises:
        ValueError: more than a grid may have; says what there is too much of.
    """
    if count <= MOST_PROGRAMS:
        return (count,)
    why = "of a row this wide; split it over mesh.tp, or ask for the reference"
    if groups > 1:
        fitting = max(1, MOST_PROGRAMS * groups // count)
        why = f"for {groups} samples under vmap; use its chunk_size, at most {fitting}"
    raise ValueError(f"{count} programs in one launch, at most {MOST_PROGRAMS}, {why}")


def step(x: Tensor) -> int:
    # read from the shape: a tensor of one group may have any stride there
    """Elements from one group's part of a contiguous operand to the next's; 0 if they share one."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def grouped(launch: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
    """``launch(*operands)``, also under ``vmap``, where all samples go into one launch.

    Every operand has a leading dimension of ``G`` groups, or of 1 if the groups share it; every
    result has one of ``G``. Under ``vmap`` samples become groups, so what a kernel sums over tokens
    (the gradient of a weight) it sums per group, and a weight that samples share is not copied.

    Args:
        launch: of plain tensors to a tuple of new ones. Not differentiated: call it inside a
            ``custom_vjp``.
        operands: tensors.
    """
    # without a transform all this is a call, and a Function costs more than a small kernel
    if not _functorch.transforms_active():
        return _launched(launch, *operands)
    return _Grouped.apply(launch, *operands)


def _launched(launch: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
    # Triton launches on the thread's current device, not on that of the operands
    with torch.accelerator.device_index(operands[0].device.index):
        return launch(*operands)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(launch: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
        return _launched(launch, *operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], *args: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        launch, *operands = args
        samples_first = []  # [samples, groups, ...], samples 1 where the operand is not batched
        for x, dim in zip(operands, in_dims[1:], strict=True):
            samples_first.append(x[None] if dim is None else x.movedim(dim, 0))
        groups = max(x.shape[1] for x in samples_first)
        folded = []
        for x, dim in zip(samples_first, in_dims[1:], strict=True):
            if dim is None and x.shape[1] == 1:
                # shared by all groups of all samples: it stays one, and is not copied
                folded.append(x[0])
            else:
                folded.append(x.expand(info.batch_size, groups, *x.shape[2:]).flatten(0, 1))
        # once more through the Function: there may be a vmap around this one
        results = _Grouped.apply(launch, *folded)
        unfolded = tuple(x.unflatten(0, (info.batch_size, groups)) for x in results)
        return unfolded, (0,) * len(results)
