# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
"""The second of the two phases: the running sum joins a summary of the blocks.

Where a program can hold a token, one kernel each way reads everything once (:mod:`~.merge_whole`).
A wider one is read in pieces, in the forward twice (the second time from the cache), and two
kernels are the backward.

With the weight ``w`` of the running sum ``p``, the blocks' mix ``b`` and the result ``o = b + w (p
- b)``, the gradient of the score is ``w (1 - w) <ct, p - b> = w <ct, p - o>``: the backward keeps
the result and three numbers per token, and not the summary. The result is the rounded one, so with
``|e_d| <= u`` (2^-9 for bfloat16) that is off by at most ``w u sum_d |ct_d o_d|``: what rounding
the running sum does to ``<ct, p>`` too. First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff import custom_vjp
from k31fn.kernels.attn_res.reference import Summary
from k31fn.kernels.attn_res.triton.merge_whole import (
    attn_res_merge_backward_whole,
    attn_res_merge_forward_whole,
)
from k31fn.kernels.attn_res.triton.shared import build, named, power, staged
from k31fn.kernels.attn_res.triton.weights import attn_res_d_weights, build_of_weights, of_weights
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["attn_res_merge", "attn_res_merge_accepts", "builds"]

_WIDEST = 8192  # features that a program holds, where it does

# per device kind: forward, gradient of the scores, of the sources, `columns` features at a time;
# and, where a program can hold a token, forward and backward that do
_TILES = {
    "cuda": (
        Tile(warps=4, per_core=8, columns=2048),
        Tile(warps=4, per_core=8, columns=2048),
        Tile(warps=4, per_core=8, columns=1024),
        Tile(warps=4, per_core=1, stages=3),
        Tile(warps=8, per_core=1, stages=4),
    ),
    "npu": (Tile(per_core=2, columns=4096),) * 3,
    "cpu": (*(Tile(columns=16),) * 3, Tile(), Tile()),
}


@triton.jit
def attn_res_merge_forward(
    max_ptr,
    sum_ptr,
    mix_ptr,
    prefix_ptr,
    key_ptr,
    out_ptr,
    weight_ptr,
    score_ptr,
    rrms_ptr,
    tokens,
    width,
    per_group,
    max_group,
    sum_group,
    mix_group,
    prefix_group,
    key_group,
    eps,
    BLOCK: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        prefix = prefix_ptr + (group * prefix_group + token * width)
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        products = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(prefix + columns, mask=inside, other=0.0).to(tl.float32)
            squares += value * value
            products += value * tl.load(
                key_ptr + group * key_group + columns, mask=inside, other=0.0
            )
        rrms = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
        score = tl.sum(products, axis=0) * rrms
        before = tl.load(max_ptr + (group * max_group + token))
        largest = tl.maximum(before, score)
        now = tl.exp(score - largest)
        weight = now / (
            tl.exp(before - largest) * tl.load(sum_ptr + (group * sum_group + token)) + now
        )
        written = group * tokens + token
        tl.store(score_ptr + written, score)
        tl.store(rrms_ptr + written, rrms)
        tl.store(weight_ptr + written, weight)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(prefix + columns, mask=inside, other=0.0).to(tl.float32)
            mix = tl.load(
                mix_ptr + (group * mix_group + token * width) + columns, mask=inside, other=0.0
            )
            out = (mix + weight * (value - mix)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + written * width + columns, out, mask=inside)


@triton.jit
def attn_res_merge_d_scores(
    sum_ptr,
    prefix_ptr,
    out_ptr,
    weight_ptr,
    score_ptr,
    rrms_ptr,
    ct_ptr,
    d_max_ptr,
    d_sum_ptr,
    along_ptr,
    shrink_ptr,
    tokens,
    width,
    per_group,
    sum_group,
    prefix_group,
    out_group,
    ct_group,
    BLOCK: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        products = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(
                prefix_ptr + (group * prefix_group + token * width) + columns,
                mask=inside,
                other=0.0,
            )
            out = tl.load(
                out_ptr + (group * out_group + token * width) + columns, mask=inside, other=0.0
            )
            ct = tl.load(
                ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
            )
            products += ct.to(tl.float32) * (value.to(tl.float32) - out.to(tl.float32))
        # of the forward: per group, as out
        stats = tl.where(out_group > 0, group * tokens, 0) + token
        d_score = tl.sum(products, axis=0) * tl.load(weight_ptr + stats)
        rrms = tl.load(rrms_ptr + stats)
        total = tl.load(sum_ptr + (group * sum_group + token))
        written = group * tokens + token
        tl.store(d_max_ptr + written, -d_score)
        tl.store(
            d_sum_ptr + written,
            tl.where(total > 0.0, -d_score / tl.where(total > 0.0, total, 1.0), 0.0),
        )
        tl.store(along_ptr + written, d_score * rrms)
        tl.store(shrink_ptr + written, d_score * tl.load(score_ptr + stats) * rrms * rrms / width)


@triton.jit
def attn_res_merge_d_sources(
    prefix_ptr,
    key_ptr,
    weight_ptr,
    along_ptr,
    shrink_ptr,
    ct_ptr,
    d_mix_ptr,
    d_prefix_ptr,
    d_key_ptr,
    tokens,
    width,
    splits,
    pieces,
    prefix_group,
    key_group,
    ct_group,
    BLOCK: tl.constexpr,
):
    group = (tl.program_id(0) // (splits * pieces)).to(tl.int64)
    split = (tl.program_id(0) // pieces) % splits
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load(key_ptr + group * key_group + columns, mask=inside, other=0.0)
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(split, tokens, splits):
        token = group * 0 + t  # 64 bits
        written = group * tokens + token
        weight = tl.load(weight_ptr + written)
        along = tl.load(along_ptr + written)
        shrink = tl.load(shrink_ptr + written)
        value = tl.load(
            prefix_ptr + (group * prefix_group + token * width) + columns, mask=inside, other=0.0
        )
        value = value.to(tl.float32)
        ct = tl.load(
            ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0
        ).to(tl.float32)
        d_key += along * value
        of_prefix = weight * ct + along * key - shrink * value
        tl.store(
            d_prefix_ptr + written * width + columns,
            of_prefix.to(d_prefix_ptr.dtype.element_ty),
            mask=inside,
        )
        tl.store(d_mix_ptr + written * width + columns, ct - weight * ct, mask=inside)
    tl.store(d_key_ptr + (group * splits + split) * width + columns, d_key, mask=inside)


def attn_res_merge_accepts(
    summary: Summary, prefix: Tensor, query: Tensor, norm_weight: Tensor, eps: float
) -> str:
    """Why :func:`attn_res_merge` cannot run, or nothing."""
    del eps
    if prefix.dtype not in (torch.bfloat16, torch.float32):
        return f"the running sum is bfloat16 or float32, got {prefix.dtype}"
    shape = prefix.shape
    if len(shape) != 3 or not shape[-1] or not query.shape == norm_weight.shape == shape[-1:]:
        found = ", ".join(str(list(x.shape)) for x in (query, norm_weight, prefix))
        return f"the running sum is [B, T, D], query and norm_weight [D], got {found}"
    return ""


def attn_res_merge(
    summary: Summary, prefix: Tensor, query: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """The op; score, softmax and sums in float32."""
    rows = prefix.shape[:2]
    largest, total = (part.expand(rows).flatten()[None] for part in (summary.max, summary.sum))
    mix = summary.out.expand(prefix.shape).flatten(0, 1)[None]
    return _merge(
        largest, total, mix, prefix.flatten(0, 1)[None], query[None], norm_weight[None], eps
    ).view(prefix.shape)


def _merge_fwd(
    largest: Tensor,
    total: Tensor,
    mix: Tensor,
    prefix: Tensor,
    query: Tensor,
    norm: Tensor,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, *stats = grouped(
        functools.partial(_launch_forward, eps), largest, total, mix, prefix, query, norm
    )
    return out, (total, prefix, query, norm, out, *stats)


def _merge_bwd(eps: float, residuals: tuple[Tensor, ...], ct: Tensor) -> tuple[Tensor, ...]:
    del eps  # it is in rrms
    total, prefix, query, norm, out, weight, score, rrms = residuals
    if _holds(prefix):
        return grouped(_launch_backward, *residuals, ct)
    d_max, d_sum, *along = grouped(_launch_d_scores, total, prefix, out, weight, score, rrms, ct)
    return d_max, d_sum, *grouped(_launch_d_sources, prefix, query, norm, weight, *along, ct)


_merge = custom_vjp(
    _merge_fwd, nondiff_argnums=(6,), opaque=True, name="attn_res_merge (triton)"
).defvjp(_merge_fwd, _merge_bwd)


def _holds(prefix: Tensor) -> bool:
    """Whether a program holds a token."""
    return prefix.shape[-1] <= _WIDEST and len(_TILES[prefix.device.type]) > 3


def _launch_forward(eps: float, *operands: Tensor) -> tuple[Tensor, ...]:
    largest, total, mix, prefix, query, norm = (x.contiguous() for x in operands)
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), prefix.shape
    out = prefix.new_empty((groups, tokens, width))
    weight, score, rrms = (total.new_empty((groups, tokens)) for _ in range(3))
    if _holds(prefix):
        kernel, weights = attn_res_merge_forward_whole, (query, norm)
        per_core, cut = _held(_TILES[prefix.device.type][3], width, prefix.itemsize + mix.itemsize)
    else:
        kernel, weights = (
            attn_res_merge_forward,
            (query.to(torch.float32) * norm.to(torch.float32),),
        )
        tile = _TILES[prefix.device.type][0]
        per_core, cut = tile.per_core, _cut(tile, width)
    per_group = programs(prefix.device, groups, tokens, per_core)
    kernel[(groups * per_group,)](
        largest,
        total,
        mix,
        prefix,
        *weights,
        out,
        weight,
        score,
        rrms,
        tokens,
        width,
        per_group,
        *map(step, (largest, total, mix, prefix, *weights)),
        eps,
        **named(kernel, cut),
    )
    return out, weight, score, rrms


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    total, prefix, query, norm, out, weight, score, rrms, ct = (x.contiguous() for x in operands)
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), prefix.shape
    d_max, d_sum = (total.new_empty((groups, tokens)) for _ in range(2))
    d_mix, d_prefix = (
        total.new_empty((groups, tokens, width)),
        prefix.new_empty((groups, tokens, width)),
    )
    per_core, cut = _held(_TILES[prefix.device.type][4], width, 3 * prefix.itemsize)
    per_group = programs(prefix.device, groups, tokens, per_core)
    d_key = total.new_empty((groups, per_group, width))
    attn_res_merge_backward_whole[(groups * per_group,)](
        total,
        prefix,
        query,
        norm,
        out,
        weight,
        score,
        rrms,
        ct,
        d_max,
        d_sum,
        d_mix,
        d_prefix,
        d_key,
        tokens,
        width,
        per_group,
        *map(step, (total, prefix, query, norm, out, score, ct)),
        **named(attn_res_merge_backward_whole, cut),
    )
    return (
        d_max,
        d_sum,
        d_mix,
        d_prefix,
        *of_weights(query.device.type, attn_res_d_weights, d_key, query, norm),
    )


def _launch_d_scores(*operands: Tensor) -> tuple[Tensor, ...]:
    total, prefix, out, weight, score, rrms, ct = (x.contiguous() for x in operands)
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), prefix.shape
    tile = _TILES[ct.device.type][1]
    d_max, d_sum, along, shrink = (total.new_empty((groups, tokens)) for _ in range(4))
    per_group = programs(ct.device, groups, tokens, tile.per_core)
    attn_res_merge_d_scores[(groups * per_group,)](
        total,
        prefix,
        out,
        weight,
        score,
        rrms,
        ct,
        d_max,
        d_sum,
        along,
        shrink,
        tokens,
        width,
        per_group,
        *map(step, (total, prefix, out, ct)),
        **named(attn_res_merge_d_scores, _cut(tile, width)),
    )
    return d_max, d_sum, along, shrink


def _launch_d_sources(*operands: Tensor) -> tuple[Tensor, ...]:
    prefix, query, norm, weight, along, shrink, ct = (x.contiguous() for x in operands)
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), prefix.shape
    weight, along, shrink = (x.expand(groups, -1).contiguous() for x in (weight, along, shrink))
    key = query.to(torch.float32) * norm.to(torch.float32)
    tile = _TILES[ct.device.type][2]
    cut = _cut(tile, width)
    pieces = triton.cdiv(width, cut["BLOCK"])
    splits = programs(ct.device, groups * pieces, tokens, tile.per_core)
    d_mix, d_prefix = (
        key.new_empty((groups, tokens, width)),
        prefix.new_empty((groups, tokens, width)),
    )
    d_key = key.new_empty((groups, splits, width))
    attn_res_merge_d_sources[(groups * splits * pieces,)](
        prefix,
        key,
        weight,
        along,
        shrink,
        ct,
        d_mix,
        d_prefix,
        d_key,
        tokens,
        width,
        splits,
        pieces,
        *map(step, (prefix, key, ct)),
        **named(attn_res_merge_d_sources, cut),
    )
    return d_mix, d_prefix, *of_weights(query.device.type, attn_res_d_weights, d_key, query, norm)


def _held(tile: Tile, width: int, size: int) -> tuple[int, dict[str, Any]]:
    """Programs per core, and what the kernels that hold a token are compiled with.

    The tile is that of the widest token; ``size``: bytes that are loaded for a feature.
    """
    block = power(width)
    share = max(1, _WIDEST // block)
    per_core = tile.per_core * min(8, share)
    stages = staged(tile.stages, per_core, size * block)
    return per_core, {"BLOCK": block, "STAGES": stages, "num_warps": max(1, tile.warps // share)}


def _cut(tile: Tile, width: int) -> dict[str, Any]:
    """What the kernels are compiled with; a narrow token is one piece."""
    return {"BLOCK": min(tile.columns, power(width)), "num_warps": tile.warps}


def builds(kind: str) -> list[Build]:
    """What is compiled for the hidden size of K3.1 on a kind of device."""
    pieces = attn_res_merge_forward, attn_res_merge_d_scores, attn_res_merge_d_sources
    held = attn_res_merge_forward_whole, attn_res_merge_backward_whole
    found = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        at = f"{dtype} D7168"
        for kernel, tile in zip(pieces, _TILES[kind], strict=False):
            direction = "forward" if kernel is attn_res_merge_forward else "backward"
            found.append(build(kernel, at, _cut(tile, 7168), direction, tile))
        for kernel, tile in zip(held, _TILES[kind][3:], strict=False):
            direction = "forward" if kernel is attn_res_merge_forward_whole else "backward"
            cut = {"width": 7168, **_held(tile, 7168, 3 * itemsize)[1]}
            found.append(build(kernel, at, cut, direction, tile))
    return [*found, build_of_weights(kind, "fp32 merge D7168", 132)]
