"""``grouped_matmul`` as a few batched products.

Experts with similar numbers of rows form a bucket; inside it each is padded to the bucket's largest
number, so that a bucket is one batched product: at most eight of them where ``ragged`` has one per
expert, at the price of padding.

It pays where experts are many and have few rows each, so that starting a product takes longer than
computing it, and where no library has a grouped product (float32, or a device without one). With
many rows per expert ``ragged`` does less arithmetic. Experts that all lie in one bucket are
multiplied where their weights are; for several buckets the weights are copied once per product, in
the order of the buckets. ``benchmarks/grouped_experts.py`` measures it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.typing import Float, Int, Tensor

__all__ = ["bucketed", "split"]

_MOST = 8
# Each bucket is one more product to start; below this share of the rows padding is cheaper.
_LEAST_SAVING = 1 / 16


class _Bucket(NamedTuple):
    """``experts`` are numbers of experts, each of at most ``batch`` rows."""

    experts: tuple[int, ...]
    batch: int


class _Slots(NamedTuple):
    """Where rows lie in the padded batches of all buckets, one after another.

    Attributes:
        source: the row in each slot, 0 in an empty one.
        present: whether a slot has a row.
        slot: of each row.
        order: the experts in the order of the buckets; () if that is their own.
        inverse: the place of each expert in it; () likewise.
    """

    source: Int[Tensor, "slots"]
    present: Tensor
    slot: Int[Tensor, "R"]
    order: Tensor | tuple[()]
    inverse: Tensor | tuple[()]


def split(sizes: list[int]) -> list[_Bucket]:
    """The buckets of experts with these rows: at most eight with rows and one without, each split
    being where it saves the most padding.

    A split that saves less than a sixteenth of the rows is not made. If none is, the experts keep
    their order.
    """
    # Largest first: a bucket's first expert then has the rows that the others are padded to.
    order = sorted(range(len(sizes)), key=lambda e: -sizes[e])
    counts = [sizes[e] for e in order]
    starts = [0]
    least = max(sum(sizes) * _LEAST_SAVING, 1)
    # A bucket of experts without rows starts no product, so it comes on top of the eight.
    while len(starts) < _MOST + (counts[starts[-1]] == 0):
        saving, cut = _best_cut(counts, starts)
        if saving < least:
            break
        starts = sorted([*starts, cut])
    if len(starts) == 1:
        # In their own order the weights are multiplied where they lie, without a copy.
        return [_Bucket(tuple(range(len(sizes))), counts[0])]
    ends = [*starts[1:], len(counts)]
    return [_Bucket(tuple(order[a:b]), counts[a]) for a, b in zip(starts, ends, strict=True)]


def _best_cut(counts: list[int], starts: list[int]) -> tuple[int, int]:
    """The rows of padding that one more cut can save, and where it is; (0, 0): none saves any."""
    best = (0, 0)
    for start, end in zip(starts, [*starts[1:], len(counts)], strict=True):
        for i in range(start + 1, end):
            # From i on experts are padded to counts[i], and no longer to counts[start].
            best = max(best, ((end - i) * (counts[start] - counts[i]), i))
    return best


def bucketed(
    rows: Float[Tensor, "R I"], w: Float[Tensor, "E I O"], sizes: Int[Tensor, "E"]
) -> Float[Tensor, "R O"]:
    """One batched product per bucket; keeps only its inputs for the backward, which has two per
    bucket.

    Raises:
        ValueError: ``sizes`` does not add up to the number of rows.
    """
    counts = sizes.tolist()
    if sum(counts) != rows.shape[0]:
        raise ValueError(
            f"grouped_matmul: sizes={counts} add up to {sum(counts)}, but there are "
            f"{rows.shape[0]} rows"
        )
    buckets = split(counts)
    return _product(buckets, rows, w, _slots(buckets, sizes.to(rows.device), rows.shape[0]))


def _slots(buckets: list[_Bucket], sizes: Int[Tensor, "E"], num_rows: int) -> _Slots:
    order: list[int] = []
    first_slot = [0] * sizes.shape[0]
    num_slots = 0
    for bucket in buckets:
        order.extend(bucket.experts)
        for expert in bucket.experts:
            first_slot[expert] = num_slots
            num_slots += bucket.batch
    inverse = [0] * len(order)
    for place, expert in enumerate(order):
        inverse[expert] = place
    # One tensor, so that one copy goes to the device.
    experts, slots, places = torch.tensor([order, first_slot, inverse], device=sizes.device)
    first_row = sizes.cumsum(0) - sizes

    source: list[Tensor] = []
    present: list[Tensor] = []
    start = 0
    for bucket in buckets:
        members = experts[start : start + len(bucket.experts)]
        start += len(bucket.experts)
        place_in_batch = torch.arange(bucket.batch, device=sizes.device)
        present.append((place_in_batch < sizes[members][:, None]).flatten())
        source.append((first_row[members][:, None] + place_in_batch).flatten())
    has_row = torch.cat(present)
    # With `output_size` the host need not ask the device how many rows there are.
    shift = (slots - first_row).repeat_interleave(sizes, output_size=num_rows)
    slot = torch.arange(num_rows, device=sizes.device) + shift
    in_order = order == sorted(order)
    return _Slots(
        # An empty slot reads row 0, which exists; `present` then makes it zero.
        torch.where(has_row, torch.cat(source), 0),
        has_row,
        slot,
        () if in_order else experts,
        () if in_order else places,
    )


def _batches(buckets: list[_Bucket], rows: Tensor, slots: _Slots) -> list[Tensor]:
    """The padded rows of each bucket: ``[experts, batch, features]``."""
    padded = torch.where(slots.present[:, None], rows.index_select(0, slots.source), 0)
    parts = padded.split([len(b.experts) * b.batch for b in buckets])
    batches: list[Tensor] = []
    for part, bucket in zip(parts, buckets, strict=True):
        batches.append(part.view(len(bucket.experts), bucket.batch, rows.shape[1]))
    return batches


def _product_fwd(
    buckets: list[_Bucket], rows: Tensor, w: Tensor, slots: _Slots
) -> tuple[Tensor, Any]:
    # Experts without rows come last and have no product, unless there is no row at all.
    used = [b for b in buckets if b.batch] or buckets
    num_experts = [len(b.experts) for b in used]
    if isinstance(slots.order, Tensor):
        weights = w.index_select(0, slots.order[: sum(num_experts)])
    else:
        weights = w[: sum(num_experts)]
    products: list[Tensor] = []
    for x, m in zip(_batches(used, rows, slots), weights.split(num_experts), strict=True):
        products.append((x @ m).flatten(0, 1))
    return torch.cat(products).index_select(0, slots.slot), (rows, w, slots)


def _product_bwd(buckets: list[_Bucket], needs: Any, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    rows, w, slots = residuals
    # The same product with the weights transposed: so a second derivative is a product again.
    d_rows = _product(buckets, ct, w.mT, slots) if needs[0] else None
    d_w = _outer(buckets, rows, ct, slots) if needs[1] else None
    return d_rows, d_w, None


def _outer_fwd(
    buckets: list[_Bucket], rows: Tensor, ct: Tensor, slots: _Slots
) -> tuple[Tensor, Any]:
    pairs = zip(_batches(buckets, rows, slots), _batches(buckets, ct, slots), strict=True)
    # Padded rows are zero and add nothing; an expert without rows gets a gradient of zeros.
    d_w = torch.cat([x.mT @ g for x, g in pairs])
    if isinstance(slots.inverse, Tensor):
        d_w = d_w.index_select(0, slots.inverse)
    return d_w, (rows, ct, slots)


def _outer_bwd(buckets: list[_Bucket], residuals: Any, of_w: Tensor) -> tuple[Any, ...]:
    rows, ct, slots = residuals
    return _product(buckets, ct, of_w.mT, slots), _product(buckets, rows, of_w, slots), None


_product = custom_vjp(_product_fwd, _product_bwd, nondiff_argnums=(0,), needs=True, name="buckets")
_outer = custom_vjp(_outer_fwd, _outer_bwd, nondiff_argnums=(0,), name="gradient of buckets")
