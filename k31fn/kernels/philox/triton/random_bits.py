# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""Random words of a part of a weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.launch import Build, grouped
from k31fn.kernels.philox.reference import Draws
from k31fn.kernels.philox.triton.blocks import TILES, Blocks, cut, grid, places, words_of
from k31fn.kernels.philox.triton.blocks import accepts as accepts_part

__all__ = ["accepts", "builds", "random_bits"]


@triton.jit
def random_bits_blocks(
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
        tl.store(out_ptr + base + at, words.to(tl.int32, bitcast=True), mask=inside)


def accepts(draws: Draws, size: tuple[int, ...]) -> str:
    """Why :func:`random_bits` cannot run, or nothing."""
    return accepts_part(size, draws)


def random_bits(draws: Draws, size: tuple[int, ...]) -> Tensor:
    """The op."""
    # 32 bits a word, as the device computes: Ascend's compiler takes minutes for wider stores
    out = torch.empty(size, dtype=torch.int32, device=draws.key.device)
    blocks = Blocks.of(size, draws)

    def launch(key: Tensor) -> tuple[Tensor, ...]:
        random_bits_blocks[grid(key, blocks)](key, out, *blocks, **cut(key, blocks))
        return (out,)

    return grouped(launch, draws.key)[0].to(torch.int64) & 0xFFFFFFFF


def builds(kind: str) -> list[Build]:
    """What is compiled for whole weights and for parts on a kind of device."""
    tile = TILES[kind]
    signature = {"key_ptr": "*i64", "out_ptr": "*i32", **dict.fromkeys(Blocks._fields, "i32")}
    listed = []
    for whole in (True, False):
        constants = {"BLOCKS": tile.rows, "WHOLE": whole, "CUT": not whole}
        name = f"random_bits {'whole' if whole else 'part'}"
        listed.append(
            Build(name, random_bits_blocks, signature, constants, "forward", tile, ("width",))
        )
    return listed
