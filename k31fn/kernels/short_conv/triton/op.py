# pyright: reportMissingImports=false, reportCallIssue=false
"""Short convolutions and SiLU in one launch each way; the backward keeps the inputs only.

First order only. The gradient of the taps is a sum over tokens. Each program of
:mod:`~.kernels` sums its chunk in order, and torch adds the chunks: the bits depend on the shape
alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs
from k31fn.kernels.short_conv.triton.kernels import (
    short_conv_backward,
    short_conv_forward,
)

__all__ = ["accepts", "builds", "short_conv"]

CHUNK = 128
"""Tokens of a row that a program walks down, and that one partial sum of the taps covers.

A multiple of 4, the tokens of a round.
"""

_MOST = 3  # inputs, for which the kernels have pointers
_LAGS = 3  # inputs before a token that the kernels hold; a narrower filter has taps of zero

# Per kind of device: (forward, backward).
_TILES = {
    "cuda": (
        Tile(warps=1, per_core=512, columns=128, stages=4),
        Tile(warps=2, per_core=512, columns=256, stages=4),
    ),
    "npu": (Tile(per_core=1, columns=1024), Tile(per_core=1, columns=64)),
    "cpu": (Tile(columns=16), Tile(columns=16)),
}


def accepts(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    ids: Tensor,
    histories: tuple[Tensor, ...] = (),
) -> str:
    """Why :func:`short_conv` cannot run, or nothing."""
    if not 1 <= len(inputs) <= _MOST or len(weights) != len(inputs):
        return f"1 to {_MOST} inputs, each with its weight, got {len(inputs)} and {len(weights)}"
    if len(histories) not in (0, len(inputs)):
        return f"a history for each input or none, got {len(histories)} for {len(inputs)}"
    for some in (inputs, weights, histories):
        if len({a.dtype for a in some}) > 1:
            return (
                f"inputs, weights and histories each have one dtype, got {[a.dtype for a in some]}"
            )
    width = weights[0].shape[-1]
    if not 2 <= width <= _LAGS + 1:
        return f"a filter has 2 to {_LAGS + 1} taps, got {width}"
    for x, weight in zip(inputs, weights, strict=True):
        if x.ndim != 3 or weight.shape != (x.shape[-1], width):
            shapes = f"{[*x.shape]} and {[*weight.shape]}"
            return f"an input is [B T channels], its weight [channels W], got {shapes}"
        if ids.shape != x.shape[:2]:
            return f"ids must be {[*x.shape[:2]]} for x {[*x.shape]}, got {[*ids.shape]}"
    for x, history in zip(inputs, histories, strict=False):
        wanted = [x.shape[0], width - 1, x.shape[2]]
        if [*history.shape] != wanted:
            return f"a history must be {wanted}, got {[*history.shape]}"
    return "" if ids.shape[1] else "a row has at least one token"


def short_conv(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    ids: Tensor,
    histories: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """The op; contract in :mod:`k31fn.kernels.short_conv`."""
    by_kind = [tuple(a[None] for a in some) for some in (inputs, weights, histories)]
    outs = _short_convs(by_kind[0], by_kind[1], ids[None], by_kind[2])
    # Squeezed and not indexed: the gradient of an index is a copy into zeros.
    return tuple(y.squeeze(0) for y in outs)


def _fwd(*args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    inputs, weights, ids, histories = args
    launch = functools.partial(_launch_forward, len(inputs))
    return grouped(launch, *inputs, *weights, ids, *histories), args


def _bwd(residuals: tuple[Any, ...], cts: tuple[Tensor, ...]) -> tuple[Any, ...]:
    inputs, weights, ids, histories = residuals
    count = len(inputs)
    launch = functools.partial(_launch_backward, count)
    grads = grouped(launch, *inputs, *weights, ids, *cts, *histories)
    return grads[:count], grads[count : 2 * count], None, grads[2 * count :]


_short_convs = custom_vjp(_fwd, _bwd, opaque=True, name="short_conv (triton)")


class _Launch(NamedTuple):
    """What both kernels are told of their operands."""

    groups: int
    pointers: list[Tensor]
    channels: list[int]
    batch: int
    length: int
    apart: list[int]
    """Per kind of operand: 1 where each group has its own, 0 where all share it."""


def _launch(kinds: Sequence[Sequence[Tensor]]) -> _Launch:
    """``kinds``: inputs, weights, ids and more; without histories no pointer to one is read."""
    groups = max(a.shape[0] for some in kinds for a in some)
    pointers: list[Tensor] = []
    apart: list[int] = []
    for some in kinds:
        # All of a kind are per group if one is, so that they have one step.
        shared = all(a.shape[0] == 1 for a in some)
        alike = [a if shared else a.expand(groups, *a.shape[1:]) for a in some]
        whole = [a.contiguous() for a in alike] or pointers[:1]
        pointers += whole if some is kinds[2] else _padded(whole)
        apart.append(0 if shared else 1)
    x = kinds[0][0]
    channels = [a.shape[3] for a in kinds[0]]
    channels += [0] * (_MOST - len(channels))
    return _Launch(groups, pointers, channels, x.shape[1], x.shape[2], apart)


def _padded(some: Sequence[Tensor]) -> list[Tensor]:
    """As many as the kernels have pointers; those past the inputs are not read."""
    return [*some, *[some[0]] * (_MOST - len(some))]


def _grid(launch: _Launch, chunks: int, tile: Tile) -> int:
    """Programs of a group."""
    blocks = sum(triton.cdiv(c, tile.columns) for c in launch.channels)
    where = launch.pointers[0].device
    return programs(where, launch.groups, launch.batch * chunks * blocks, tile.per_core)


def _constants(kind: str, tile: Tile, width: int, history: bool) -> dict[str, Any]:
    constants = {"W": width, "CHUNK": CHUNK, "HISTORY": history, "BLOCK": tile.columns}
    # Ascend's compiler would plan memory for both walks.
    walks = {"SPLIT": kind != "npu", "STAGES": tile.stages}
    return {**constants, **walks, "SEVERAL": _at_once(kind) > 1}


def _at_once(kind: str) -> int:
    """Inputs that a launch takes."""
    # Ascend's compiler refuses a pointer that is known only when the kernel runs.
    return 1 if kind == "npu" else _MOST


def _launch_forward(count: int, *given: Tensor) -> tuple[Tensor, ...]:
    inputs = given[:count]
    weights = given[count : 2 * count]
    ids = given[2 * count]
    histories = given[2 * count + 1 :]
    kind = ids.device.type
    if count > _at_once(kind):
        outs = []
        for i in range(count):
            outs += _launch_forward(1, inputs[i], weights[i], ids, *histories[i : i + 1])
        return tuple(outs)
    launch = _launch([inputs, weights, [ids], histories])
    outs = [x.new_empty((launch.groups, *x.shape[1:])) for x in inputs]
    tile = _TILES[kind][0]
    per_group = _grid(launch, triton.cdiv(launch.length, CHUNK), tile)
    short_conv_forward[(launch.groups * per_group,)](
        *launch.pointers,
        *_padded(outs),
        *launch.channels,
        launch.batch,
        launch.length,
        per_group,
        *launch.apart,
        **_constants(kind, tile, weights[0].shape[2], len(histories) > 0),
        num_warps=tile.warps,
    )
    return tuple(outs)


def _launch_backward(count: int, *given: Tensor) -> tuple[Tensor, ...]:
    inputs = given[:count]
    weights = given[count : 2 * count]
    ids = given[2 * count]
    cts = given[2 * count + 1 : 3 * count + 1]
    histories = given[3 * count + 1 :]
    kind = ids.device.type
    if count > _at_once(kind):
        grads = []
        for i in range(count):
            one = (inputs[i], weights[i], ids, cts[i], *histories[i : i + 1])
            grads.append(_launch_backward(1, *one))
        # From the gradients of each input to all inputs', all weights' and all histories'.
        return tuple(itertools.chain(*zip(*grads, strict=True)))
    launch = _launch([inputs, weights, [ids], histories, cts])
    groups = launch.groups
    batch = launch.batch
    width = weights[0].shape[2]
    total = sum(launch.channels)
    d_inputs = [x.new_empty((groups, *x.shape[1:])) for x in inputs]
    d_histories = [h.new_empty((groups, *h.shape[1:])) for h in histories]
    chunks = triton.cdiv(launch.length + (width - 1 if histories else 0), CHUNK)
    parts = ids.new_empty((groups, batch * chunks, width, total), dtype=torch.float32)
    tile = _TILES[kind][1]
    per_group = _grid(launch, chunks, tile)
    short_conv_backward[(groups * per_group,)](
        *launch.pointers,
        *_padded(d_inputs),
        *_padded(d_histories or d_inputs),
        parts,
        *launch.channels,
        batch,
        launch.length,
        per_group,
        *launch.apart,
        **_constants(kind, tile, width, len(histories) > 0),
        num_warps=tile.warps,
    )
    # Written transposed by the sum itself: the kernel stores taps by channels, weights are channels
    # by taps.
    summed = parts.new_empty((groups, total, width))
    torch.sum(parts, 1, out=summed.mT)
    d_weights = summed.to(weights[0].dtype).split([w.shape[1] for w in weights], dim=1)
    return *d_inputs, *d_weights, *d_histories


def builds(kind: str) -> list[Build]:
    """What is compiled for 4 taps on a kind of device, with histories and without."""
    listed: list[Build] = []
    for low in ("bf16", "fp32"):
        # The history is loaded as the input is: one dtype of it says enough.
        for history in (False, True) if low == "bf16" else (False,):
            kernels = (short_conv_forward, short_conv_backward)
            for kernel, tile, direction in zip(
                kernels, _TILES[kind], ("forward", "backward"), strict=True
            ):
                constants = _constants(kind, tile, 4, history)
                names = [name for name in kernel.arg_names if name not in constants]
                types = {name: _type(name, low) for name in names}
                title = f"{kernel.__name__} {low} W4{' history' if history else ''}"
                aligned = tuple(name for name in names if name.startswith("channels"))
                listed.append(Build(title, kernel, types, constants, direction, tile, aligned))
    return listed


def _type(name: str, low: str) -> str:
    """Triton's type of an argument, as the layer calls the op."""
    if not name.endswith("_ptr"):
        return "i32"
    if name == "ids_ptr":
        return "*i64"
    return "*fp32" if name.startswith(("weight", "part")) else f"*{low}"
