# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The required-bias histogram without atomic additions: counts are products.

A bin is ``32 high + low``. The counts of an expert are the matrix ``count[high, low] = sum_t
[high_t = high] [low_t = low]``: a product of two matrices of zeros and ones over tokens, exact in
bfloat16 operands with float32 sums up to 2^24 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.histogram.reference import bin_range
from k31fn.kernels.launch import INTERPRETED, Build, Tile, grouped, programs, step

__all__ = ["accepts", "builds", "required_bias_histogram"]

# Tokens that are counted in one product, per kind of device.
_TILES = {
    "cuda": Tile(warps=4, per_core=8, rows=128),
    "npu": Tile(rows=16),  # zeros and ones of 32 x 32 bins beside each token fill its memory
    "cpu": Tile(rows=256),
}
_LOW = 32
_MOST_BINS = 4096
_MOST_TOKENS = 2**24  # more are not all counted exactly in float32


@triton.jit
def bias_histogram(
    scores_ptr,
    cutoff_ptr,
    valid_ptr,
    low_ptr,
    width_ptr,
    counts_ptr,
    rows,
    experts,
    per_group,
    scores_group,
    cutoff_group,
    valid_group,
    range_group,
    BINS: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    bottom = tl.load(low_ptr + group * range_group)
    width = tl.load(width_ptr + group * range_group)
    r = tl.arange(0, ROWS)
    h = tl.arange(0, HIGH)
    l = tl.arange(0, LOW)
    bins = h[:, None] * LOW + l[None, :]
    for expert in range(tl.program_id(0) % per_group, experts, per_group):
        counts = tl.zeros((HIGH, LOW), tl.float32)
        for first in range(0, rows, ROWS):
            there = r < rows - first
            token = group * 0 + first + r  # 64 bits
            at = scores_ptr + group * scores_group + token * experts + expert
            score = tl.load(at, mask=there, other=0.0)
            cutoff = tl.load(cutoff_ptr + group * cutoff_group + token, mask=there, other=0.0)
            valid = tl.load(valid_ptr + group * valid_group + token, mask=there, other=0)
            # rounded as the reference's: another last bit would be another bin at an edge
            place = tl.div_rn(cutoff - score - bottom, width)
            # within the bins before it is an integer, which no large number or NaN fits
            place = tl.minimum(tl.maximum(place, 0.0), BINS - 1.0).to(tl.int32)
            high = tl.where((valid != 0) & there, place // LOW, HIGH)
            left = tl.where(high[None, :] == h[:, None], 1.0, 0.0)
            right = tl.where((place % LOW)[:, None] == l[None, :], 1.0, 0.0)
            if not WIDE:
                left = left.to(tl.bfloat16)
                right = right.to(tl.bfloat16)
            counts = tl.dot(left, right, counts, input_precision="ieee")
        out = counts_ptr + (group * experts + expert) * BINS
        tl.store(out + bins, counts.to(tl.int32), mask=bins < BINS)


def accepts(scores: Tensor, cutoff: Tensor, valid: Tensor, bias: Tensor, num_bins: int) -> str:
    """Why :func:`required_bias_histogram` cannot run, or nothing."""
    del valid
    if cutoff.dtype != torch.float32 or bias.dtype != torch.float32:
        return f"cutoff and bias are float32, got {cutoff.dtype} and {bias.dtype}"
    if not 1 <= num_bins <= _MOST_BINS:
        return f"it counts 1 to {_MOST_BINS} bins, got {num_bins}"
    if scores.shape[0] >= _MOST_TOKENS:
        return f"it counts fewer than {_MOST_TOKENS} tokens, got {scores.shape[0]}"
    return ""


def required_bias_histogram(
    scores: Tensor, cutoff: Tensor, valid: Tensor, bias: Tensor, num_bins: int
) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.histogram`."""

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return (_launch(num_bins, *operands),)

    operands = (scores, cutoff, valid, *bin_range(bias, num_bins))
    return grouped(launch, *(x[None] for x in detached(operands)))[0].squeeze(0)


def _launch(num_bins: int, *operands: Tensor) -> Tensor:
    scores, cutoff, valid, low, width = (x.contiguous() for x in operands)
    groups = max(x.shape[0] for x in operands)
    _, rows, experts = scores.shape
    counts = scores.new_empty((groups, experts, num_bins), dtype=torch.int32)
    tile = _TILES[scores.device.type]
    per_group = programs(scores.device, groups, experts, tile.per_core)
    bias_histogram[(groups * per_group,)](
        scores,
        cutoff,
        valid.to(torch.int32),
        low,
        width,
        counts,
        rows,
        experts,
        per_group,
        *map(step, (scores, cutoff, valid, low)),
        **_constants(num_bins, tile, INTERPRETED),
        num_warps=tile.warps,
    )
    return counts


def _constants(num_bins: int, tile: Tile, wide: bool) -> dict[str, int]:
    high = max(16, triton.next_power_of_2(triton.cdiv(num_bins, _LOW)))
    return {"BINS": num_bins, "HIGH": high, "LOW": _LOW, "ROWS": tile.rows, "WIDE": wide}


def builds(kind: str) -> list[Build]:
    """What is compiled for the router's bins on a kind of device."""
    tile = _TILES[kind]
    constants = _constants(1000, tile, wide=False)
    types = dict.fromkeys(("scores_ptr", "cutoff_ptr", "low_ptr", "width_ptr"), "*fp32")
    types |= {"valid_ptr": "*i32", "counts_ptr": "*i32"}
    signature = {n: types.get(n, "i32") for n in bias_histogram.arg_names if n not in constants}
    return [
        Build("bias_histogram 1000 bins", bias_histogram, signature, constants, "forward", tile)
    ]
