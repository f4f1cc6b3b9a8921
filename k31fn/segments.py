"""Packed documents: which document each token belongs to, as tensors.

A row of a batch holds documents one after the other, then padding. Tensors rather than offsets go
through the model, so packings can differ between samples under ``vmap`` and be cut along the
sequence for context parallelism; offsets (:func:`cu_seqlens`) are derived by the implementations
that want them. A packing is checked once, where it is made; the model trusts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from k31fn import tree
from k31fn.typing import Bool, Int, Tensor

__all__ = [
    "Segments",
    "check_shape",
    "cu_seqlens",
    "document_start",
    "from_cu_seqlens",
    "from_ids",
    "from_lengths",
    "next_token_labels",
    "num_documents",
    "same_document",
    "valid",
    "visible",
    "whole",
    "window",
]


def __dir__() -> list[str]:
    return __all__


@tree.dataclass
class Segments:
    """The packing of a batch. Build it with a function of this module: the constructor checks
    nothing.

    Attributes:
        ids: number of the token's document in its row, 1, 2, ... in ascending order; 0 is padding,
            at the end only.
        position: index of the token inside its document; 0 for padding.

    A :func:`window` keeps the numbers of the whole row, so there ids may start above 1 and
    positions above 0.
    """

    ids: Int[Tensor, "B T"]
    position: Int[Tensor, "B T"]


def whole(batch: int, length: int, *, device: torch.device | str | None = None) -> Segments:
    """One document per row, no padding. Raises ValueError if a size is less than 1."""
    return from_lengths([[length]] * batch, length, device=device)


def from_lengths(
    rows: Sequence[Sequence[int]], length: int, *, device: torch.device | str | None = None
) -> Segments:
    """Rows of ``length`` tokens from the lengths of their documents; the rest of a row is padding.

    Raises:
        ValueError: no row, an empty document (named by row and number), or documents longer than
            the row.
    """
    if not rows or length < 1:
        raise ValueError(
            f"rows={list(rows)}, length={length}: at least one row of at least one token is needed"
        )
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, lengths in enumerate(rows):
        for index, n in enumerate(lengths):
            if n < 1:
                raise ValueError(
                    f"rows[{row}][{index}]={n}: document {index + 1} of row {row} is empty; leave "
                    "it out"
                )
        total = sum(lengths)
        if total > length:
            raise ValueError(
                f"rows[{row}] has {total} tokens, more than length={length}; split or drop a "
                "document"
            )
        numbers = torch.arange(1, len(lengths) + 1)  # 0 is padding
        counts = torch.tensor(lengths, dtype=torch.int64)
        ids[row, :total] = torch.repeat_interleave(numbers, counts)
    ids = ids.to(device)
    return Segments(ids, _position(ids))


def from_cu_seqlens(
    offsets: Sequence[int] | Int[Tensor, "N"],
    *,
    batch: int = 1,
    length: int,
    device: torch.device | str | None = None,
) -> Segments:
    """The packing of the field's cumulative offsets over the flattened batch: document i is tokens
    offsets[i]:offsets[i + 1].

    What remains of the last row is padding. No document may cross a row, so every row start is an
    offset.

    Raises:
        ValueError: offsets that do not start at 0, fall, repeat (an empty document, named by its
            number), miss a row start or do not end in the last row.
    """
    # on the host: what is checked here is checked once, and the model trusts it
    offsets = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
    if batch < 1 or length < 1 or len(offsets) < 2 or offsets[0] != 0:
        raise ValueError(
            f"offsets={_short(offsets)}, batch={batch}, length={length}: offsets run from 0 over "
            "batch * length"
        )
    for index, (start, stop) in enumerate(itertools.pairwise(offsets)):
        if start == stop:
            raise ValueError(
                f"offsets[{index}]=offsets[{index + 1}]={stop}: document {index + 1} is empty; "
                "drop the repeated offset"
            )
        if start > stop:
            raise ValueError(
                f"offsets[{index + 1}]={stop} is less than offsets[{index}]={start}; offsets must "
                "ascend"
            )
    if not (batch - 1) * length < offsets[-1] <= batch * length:
        raise ValueError(
            f"offsets[-1]={offsets[-1]} is not in the last row of batch={batch}, length={length}: "
            f"offsets run over the flattened batch and end in {(batch - 1) * length + 1}.."
            f"{batch * length}"
        )
    rows: list[list[int]] = [[] for _ in range(batch)]
    for start, stop in itertools.pairwise(offsets):
        row = start // length  # where it begins decides; the next lines refuse one that goes on
        if stop > (row + 1) * length:
            raise ValueError(
                f"offsets={_short(offsets)} miss {(row + 1) * length}, where row {row + 1} starts "
                f"(batch={batch}, length={length}): add it to cut the document there, or use "
                f"batch=1, length={batch * length}"
            )
        rows[row].append(stop - start)
    return from_lengths(rows, length, device=device)


def from_ids(ids: Int[Tensor, "B T"]) -> Segments:
    """The packing of document numbers, checked on the host; the dtype (int64 or int32) is kept.

    Raises:
        ValueError: naming row and position of the first id that is negative, follows padding, is
            lower than the one before it or skips a number (that document would be empty).
    """
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"segments.ids has shape {list(ids.shape)} and {ids.dtype}; expected [B, T], int64 or "
            "int32"
        )
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], dim=1)
    first = torch.arange(ids.shape[1], device=ids.device) == 0
    # in this order: each message supposes that the faults before it are not there
    _refuse(
        ids < 0,
        ids,
        lambda _: "must not be negative; number documents 1, 2, ... and use 0 for padding",
    )
    _refuse(
        (ids > 0) & (before == 0) & ~first,
        ids,
        lambda _: "follows padding; move the padding to the end of the row",
    )
    _refuse(
        (ids > 0) & (ids < before),
        ids,
        lambda b: f"is less than {b} before it; number documents in ascending order",
    )
    _refuse(
        ids > before + 1,
        ids,
        lambda b: f"skips a number: document {b + 1} is empty; number without gaps",
    )
    return Segments(ids, _position(ids))


def check_shape(segments: Segments, tokens: Int[Tensor, "B T"]) -> None:
    """Refuses a packing of another batch: fewer rows would broadcast, and the counts of tokens be
    wrong.

    Raises:
        ValueError: the segments are not ``[B, T]`` of ``tokens``.
    """
    if segments.ids.shape != tokens.shape:
        raise ValueError(
            f"segments have shape {list(segments.ids.shape)}, the tokens [B, T]="
            f"{list(tokens.shape)}; every row needs its own packing of the same length"
        )


def window(segments: Segments, start: int, stop: int) -> Segments:
    """Tokens start:stop of every row, numbered as in the whole row: a tile of queries, a
    context-parallel shard.
    """
    return Segments(segments.ids[:, start:stop], segments.position[:, start:stop])


def valid(segments: Segments) -> Bool[Tensor, "B T"]:
    """True for tokens, False for padding."""
    return segments.ids > 0


def document_start(segments: Segments) -> Bool[Tensor, "B T"]:
    """True for the first token of each document; in a window, not for a document that began before
    it.
    """
    return (segments.ids > 0) & (segments.position == 0)


def num_documents(segments: Segments) -> Int[Tensor, "B"]:
    """Documents that start in each row; windows that tile a row add up to the whole."""
    # starts and not the largest id: a window's ids go on from the rows before it
    return document_start(segments).sum(dim=1)


def same_document(q_ids: Int[Tensor, "B T"], k_ids: Int[Tensor, "B S"]) -> Bool[Tensor, "B T S"]:
    """Whether query and key belong to one document. Padding belongs to none: False, even with
    itself.
    """
    # two paddings have equal ids, 0, hence the second condition
    return (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids[:, :, None] > 0)


def visible(queries: Segments, keys: Segments) -> Bool[Tensor, "B T S"]:
    """Which keys a query may attend to: same document, not later. Both may be any windows of the
    same rows.

    Positions inside the document order the tokens, so no global offset is passed: a tile of queries
    against all keys is ``visible(window(s, q0, q1), s)``. A padding query sees nothing.
    """
    # positions in the document, which a window keeps: places in a window would need its offset
    earlier = keys.position[:, None, :] <= queries.position[:, :, None]
    return same_document(queries.ids, keys.ids) & earlier


def next_token_labels(
    tokens: Int[Tensor, "B T"], segments: Segments, *, ignore: int = -100
) -> Int[Tensor, "B T"]:
    """``tokens[t + 1]`` where that is in the same document, else ``ignore``.

    The last token of a document predicts nothing: to train an end of document, let it end in an end
    token. Shift whole rows, before any cut along T: the last token of a window would lose its
    label.
    """
    # the row's last token is followed by padding, so what roll brings round is never a label
    following = torch.cat([segments.ids[:, 1:], torch.zeros_like(segments.ids[:, :1])], dim=1)
    unlabelled = (segments.ids != following) | (segments.ids == 0)
    return tokens.roll(-1, dims=1).masked_fill(unlabelled, ignore)


def cu_seqlens(segments: Segments) -> Int[Tensor, "N"]:
    """int32 offsets over the flattened batch, 0 to B * T, for implementations that want them.

    Every document is one piece, and so is the padding of each row; rows never share a piece. The
    number of pieces depends on the values: this waits for the device and does not work under vmap.
    """
    ids = segments.ids
    starts = torch.ones_like(ids, dtype=torch.bool)  # a row's first token is one in any case
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    offsets = starts.flatten().nonzero().flatten()
    return torch.cat([offsets, offsets.new_full((1,), ids.numel())]).to(torch.int32)


def _position(ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Index inside the document: distance to the last place where the id changed."""
    # a running maximum of the places of change is the last of them, without a loop over tokens
    index = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device).expand_as(ids)
    changed = torch.cat(
        [torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1
    )
    start = index.masked_fill(~changed, 0).cummax(dim=1).values
    return (index - start).masked_fill(ids == 0, 0)


def _refuse(
    bad: Bool[Tensor, "B T"], ids: Int[Tensor, "B T"], reason: Callable[[int], str]
) -> None:
    """Raises about the first bad id; ``reason`` is given the id before it in the row."""
    if not bool(bad.any()):  # the one wait for the device, and only where a packing is made
        return
    row, t = bad.nonzero()[0].tolist()
    before = int(ids[row, t - 1]) if t else 0
    raise ValueError(f"segments.ids[{row}, {t}]={int(ids[row, t])} {reason(before)}")


def _short(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"
