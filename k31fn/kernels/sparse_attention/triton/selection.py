# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Sets of keys as bit masks, T x S / 8 bytes: a byte for each key of a strip of queries is set and
then packed, each row by one program, so that nothing is added to a word by two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.attention.triton.masks import WORD, padded
from k31fn.kernels.launch import Build, Tile, grouped, looping_grid

__all__ = ["builds", "selection"]

_STRIP = 2**25  # bytes, one for each key of some queries
_SLOTS = 1024  # read in one step
_WORDS = 64  # packed in one step


@triton.jit
def selection_mark(topk_ptr, marks_ptr, rows, slots, width, SLOTS: tl.constexpr):
    """Sets the bytes of the keys that each row chose."""
    m = tl.arange(0, SLOTS)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = (rows * 0 + row).to(tl.int64)  # a tensor in the interpreter too
        for i in range(0, slots, SLOTS):
            key = tl.load(topk_ptr + wide * slots + i + m, mask=m < slots - i, other=-1)
            chosen = key.to(tl.int32)
            # the same byte twice is the same byte: a repeated position counts once
            ones = tl.full((SLOTS,), 1, tl.uint8)
            tl.store(marks_ptr + wide * width * 32 + chosen, ones, mask=chosen >= 0)


@triton.jit
def selection_pack(marks_ptr, words_ptr, rows, width, WORDS: tl.constexpr):
    """Makes a word of each 32 bytes."""
    w = tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = (rows * 0 + row).to(tl.int64) * width
        for i in range(0, width, WORDS):
            here = w < width - i
            at = marks_ptr + (wide + i) * 32 + w[:, None] * 32 + bit[None, :]
            marks = tl.load(at, mask=here[:, None], other=0).to(tl.int32)
            words = tl.sum(marks << bit[None, :], 1)
            tl.store(words_ptr + wide + i + w, words, mask=here)


def selection(topk_idx: Tensor, keys: int) -> Tensor:
    """Masks ``[B T2 W]`` of the sets ``[B T M]``, as the attention kernels take them."""

    def launch(topk_idx: Tensor) -> tuple[Tensor, ...]:
        return (_launch(topk_idx.contiguous(), keys),)

    return grouped(launch, topk_idx[None])[0].squeeze(0)


def _launch(topk_idx: Tensor, keys: int) -> Tensor:
    *lines, queries, slots = topk_idx.shape
    width = padded(keys) // WORD
    words = topk_idx.new_zeros((*lines, padded(queries), width), dtype=torch.int32)
    strip = max(1, min(queries, _STRIP // max(1, width * WORD)))
    marks = words.new_empty((strip, width * WORD), dtype=torch.uint8)
    for line, chosen in zip(words.flatten(0, 1), topk_idx.flatten(0, 1), strict=True):
        for first in range(0, queries, strip):
            rows = min(strip, queries - first)
            grid = looping_grid(rows)
            marks.zero_()
            given = (marks, rows, slots, width)
            selection_mark[grid](chosen[first:], *given, SLOTS=_SLOTS, num_warps=4)
            selection_pack[grid](marks, line[first:], rows, width, WORDS=_WORDS, num_warps=4)
    return words


def builds(kind: str) -> list[Build]:
    """What is compiled on any kind of device."""
    del kind
    integers = dict.fromkeys(("rows", "slots", "width"), "i32")
    mark = {"topk_ptr": "*i32", "marks_ptr": "*u8", **integers}
    pack = {"marks_ptr": "*u8", "words_ptr": "*i32", "rows": "i32", "width": "i32"}
    return [
        Build("selection_mark", selection_mark, mark, {"SLOTS": _SLOTS}, "forward", Tile()),
        Build("selection_pack", selection_pack, pack, {"WORDS": _WORDS}, "forward", Tile()),
    ]
