# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""Stochastic rounding of a part of a weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.launch import Build, grouped
from k31fn.kernels.philox.reference import Draws
from k31fn.kernels.philox.triton.blocks import (
    TILES,
    Blocks,
    cut,
    grid,
    places,
    rounded,
    words_of,
)
from k31fn.kernels.philox.triton.blocks import accepts as accepts_part

__all__ = ["accepts", "builds", "stochastic_round"]


@triton.jit
def stochastic_round_blocks(
    x_ptr,
    key_ptr,
    out_ptr,
    total,
    per_row,
    width,
    lead,
    first_block,
    first_row,
    inner,
    inner_whole,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    CUT: tl.constexpr,
):
    for t in range(tl.program_id(0), tl.cdiv(total, BLOCKS), tl.num_programs(0)):
        base, at, inside, row, block = places(t, total, per_row, width, lead, BLOCKS, WHOLE)
        words = words_of(row, block, key_ptr, first_block, first_row, inner, inner_whole, CUT)
        x = tl.load(x_ptr + base + at, mask=inside, other=0.0)
        tl.store(out_ptr + base + at, rounded(x, words), mask=inside)


def accepts(x: Tensor, draws: Draws) -> str:
    """Why :func:`stochastic_round` cannot run, or nothing."""
    return accepts_part(tuple(x.shape), draws)


def stochastic_round(x: Tensor, draws: Draws) -> Tensor:
    """The op."""
    blocks = Blocks.of(tuple(x.shape), draws)

    def launch(x: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(x, dtype=torch.bfloat16)
        stochastic_round_blocks[grid(x, blocks)](x, key, out, *blocks, **cut(x, blocks))
        return (out,)

    return grouped(launch, x.detach().contiguous(), draws.key)[0]


def builds(kind: str) -> list[Build]:
    """What is compiled for whole weights and for parts on a kind of device."""
    tile = TILES[kind]
    signature = {
        "x_ptr": "*fp32",
        "key_ptr": "*i64",
        "out_ptr": "*bf16",
        **dict.fromkeys(Blocks._fields, "i32"),
    }
    listed = []
    for whole in (True, False):
        constants = {"BLOCKS": tile.rows, "WHOLE": whole, "CUT": not whole}
        name = f"stochastic_round {'whole' if whole else 'part'}"
        listed.append(
            Build(name, stochastic_round_blocks, signature, constants, "forward", tile, ("width",))
        )
    return listed
