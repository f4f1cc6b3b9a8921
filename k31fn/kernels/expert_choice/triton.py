# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false
"""The router's choice in one pass: a token's scores are held in registers, and its best expert is
taken out of them once for each choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["accepts", "builds", "choose_experts"]

# Tokens that a program holds at once, per kind of device.
_TILES = {
    "cuda": Tile(warps=4, per_core=8, rows=4),
    "npu": Tile(rows=4),
    "cpu": Tile(rows=8),
}
_WIDEST = 4096


@triton.jit
def _take_best(biased, expert, PADDED: tl.constexpr):
    """The best expert of each token, the lowest among equals, and the scores without it."""
    best = tl.max(biased, 1)
    lowest = tl.min(tl.where(biased == best[:, None], expert, PADDED), 1)
    return lowest, tl.where(expert == lowest[:, None], -float("inf"), biased)


@triton.jit
def expert_choice(
    scores_ptr,
    bias_ptr,
    valid_ptr,
    chosen_ptr,
    next_ptr,
    rows,
    per_group,
    scores_group,
    bias_group,
    valid_group,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    expert = tl.arange(0, PADDED)[None, :]
    r = tl.arange(0, ROWS)
    bias = tl.load(bias_ptr + group * bias_group + expert, mask=expert < E, other=0.0)
    for tile in range(tl.program_id(0) % per_group, tl.cdiv(rows, ROWS), per_group):
        first = group * 0 + tile * ROWS  # 64 bits
        there = r < rows - tile * ROWS
        inside = there[:, None] & (expert < E)
        at = scores_ptr + group * scores_group + first * E
        biased = tl.load(at + r[:, None] * E + expert, mask=inside, other=0.0) + bias
        biased = tl.where(biased == biased, biased, 0.0)
        biased = tl.minimum(tl.maximum(biased, -LARGEST), LARGEST)
        # no expert is below every finite number
        biased = tl.where(expert < E, biased, -float("inf"))
        valid = tl.load(valid_ptr + group * valid_group + first + r, mask=there, other=0)
        for j in range(TOP):
            lowest, biased = _take_best(biased, expert, PADDED)
            turn = ((first + r) * TOP + j) % E
            out = tl.where(valid != 0, lowest.to(tl.int64), turn)
            tl.store(chosen_ptr + (group * rows + first) * TOP + r * TOP + j, out, mask=there)
        following, biased = _take_best(biased, expert, PADDED)
        tl.store(next_ptr + group * rows + first + r, following.to(tl.int64), mask=there)


def accepts(scores: Tensor, bias: Tensor, valid: Tensor, top_k: int) -> str:
    """Why :func:`choose_experts` cannot run, or nothing."""
    del top_k
    if bias.dtype != torch.float32 or valid.shape != scores.shape[:-1]:
        return (
            f"bias is float32 and valid {list(scores.shape[:-1])}, got {bias.dtype} and "
            f"{list(valid.shape)}"
        )
    if scores.shape[-1] > _WIDEST:
        return f"it holds the scores of at most {_WIDEST} experts, got {scores.shape[-1]}"
    return ""


def choose_experts(
    scores: Tensor, bias: Tensor, valid: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """The op; contract in :mod:`k31fn.kernels.expert_choice`."""

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return _launch(top_k, *operands)

    rows = scores.reshape(1, -1, scores.shape[-1])
    operands = detached((rows, bias[None], valid.reshape(1, -1)))
    chosen, following = grouped(launch, *operands)
    return chosen.view(*valid.shape, top_k), following.view(*valid.shape, 1)


def _launch(top_k: int, *operands: Tensor) -> tuple[Tensor, Tensor]:
    scores, bias, valid = (x.contiguous() for x in operands)
    groups = max(x.shape[0] for x in operands)
    _, rows, experts = scores.shape
    chosen = scores.new_empty((groups, rows, top_k), dtype=torch.int64)
    following = scores.new_empty((groups, rows, 1), dtype=torch.int64)
    tile = _TILES[scores.device.type]
    per_group = programs(scores.device, groups, triton.cdiv(rows, tile.rows), tile.per_core)
    expert_choice[(groups * per_group,)](
        scores,
        bias,
        valid.to(torch.int32),
        chosen,
        following,
        rows,
        per_group,
        *map(step, (scores, bias, valid)),
        **_constants(experts, top_k, tile),
        num_warps=tile.warps,
    )
    return chosen, following


def _constants(experts: int, top_k: int, tile: Tile) -> dict[str, float]:
    padded = triton.next_power_of_2(experts)
    largest = torch.finfo(torch.float32).max
    return {"E": experts, "PADDED": padded, "TOP": top_k, "ROWS": tile.rows, "LARGEST": largest}


def builds(kind: str) -> list[Build]:
    """What is compiled for 16 of 896 experts on a kind of device."""
    tile = _TILES[kind]
    types = {"scores_ptr": "*fp32", "bias_ptr": "*fp32", "valid_ptr": "*i32"}
    types |= {"chosen_ptr": "*i64", "next_ptr": "*i64"}
    constants = _constants(896, 16, tile)
    signature = {n: types.get(n, "i32") for n in expert_choice.arg_names if n not in constants}
    name = "expert_choice 16 of E896"
    return [Build(name, expert_choice, signature, constants, "forward", tile)]
