# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Sets of keys as bit masks, T x S / 8 bytes, by query and once more by key.

A byte for each key of a strip of queries is set and then packed, each word by one program, so that
nothing is added to a word by two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.kernels.attention.triton.masks import WORD, padded
from k31fn.kernels.launch import Build, Tile, grouped, looping_grid

__all__ = ["builds", "selection"]

_STRIP = 2**26  # bytes, one for each key of some queries
_SLOTS = 1024  # read in one step


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
def selection_pack(marks_ptr, words_ptr, words_by_ptr, blocks, first, width, seen_rows, pieces):
    """Makes words of 32 queries and 32 keys: a word of each query and a word of each key."""
    r = tl.arange(0, 32)
    c = tl.arange(0, 32)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        block = piece // width
        word = piece % width
        strip = (blocks * 0 + block).to(tl.int64) * 32
        at = marks_ptr + strip * width * 32 + word * 32 + r[:, None] * (width * 32) + c[None, :]
        marks = tl.load(at).to(tl.int32)
        by_query = words_ptr + (width * 0 + word).to(tl.int64) * seen_rows + first + strip
        tl.store(by_query + r, tl.sum(marks << c[None, :], 1))
        by_key = words_by_ptr + (first // 32 + block + strip * 0) * (width * 32) + word * 32
        tl.store(by_key + c, tl.sum(marks << r[:, None], 0))


def selection(topk_idx: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Masks of the sets ``[B T M]`` as the attention kernels take them: words of 32 keys ``[B W
    T2]``, and words of 32 queries ``[B T2/32 32W]``.
    """

    def launch(topk_idx: Tensor) -> tuple[Tensor, ...]:
        return _launch(topk_idx.contiguous(), keys)

    words, words_by = grouped(launch, topk_idx[None])
    return words.squeeze(0), words_by.squeeze(0)


def _launch(topk_idx: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    *lines, queries, slots = topk_idx.shape
    width = padded(keys) // WORD
    seen_rows = padded(queries)
    words = topk_idx.new_zeros((*lines, width, seen_rows), dtype=torch.int32)
    words_by = words.new_zeros((*lines, seen_rows // WORD, width * WORD))
    strip = max(1, min(seen_rows, _STRIP // max(1, width * WORD)) // WORD) * WORD
    marks = words.new_empty((strip, width * WORD), dtype=torch.uint8)
    for line in zip(*(x.flatten(0, 1) for x in (topk_idx, words, words_by)), strict=True):
        chosen, *packed = line
        for first in range(0, queries, strip):
            rows = min(strip, queries - first)
            blocks = triton.cdiv(rows, WORD)
            marks.zero_()
            given = (marks, rows, slots, width)
            selection_mark[looping_grid(rows)](chosen[first:], *given, SLOTS=_SLOTS, num_warps=4)
            pieces = blocks * width
            numbers = (blocks, first, width, seen_rows, pieces)
            selection_pack[looping_grid(pieces)](marks, *packed, *numbers, num_warps=1)
    return words, words_by


def builds(kind: str) -> list[Build]:
    """What is compiled on any kind of device."""
    del kind
    integers = dict.fromkeys(("rows", "slots", "width"), "i32")
    mark = {"topk_ptr": "*i32", "marks_ptr": "*u8", **integers}
    pack = {"marks_ptr": "*u8", "words_ptr": "*i32", "words_by_ptr": "*i32"}
    pack |= dict.fromkeys(("blocks", "first", "width", "seen_rows", "pieces"), "i32")
    return [
        Build("selection_mark", selection_mark, mark, {"SLOTS": _SLOTS}, "forward", Tile()),
        Build("selection_pack", selection_pack, pack, {}, "forward", Tile(warps=1)),
    ]
