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

from k31fn.autodiff import custom_vjp
from k31fn.typing import Float, Int, Tensor

__all__ = ["Bucket", "buckets", "split"]

_MOST = 8
_LEAST_SAVING = 1 / 16


class Bucket(NamedTuple):
    """``experts`` are numbers of experts, each of at most ``batch`` rows."""

    experts: tuple[int, ...]
    batch: int


class _Layout(NamedTuple):
    """Where rows lie in the padded batches of all buckets, one after another.

    Attributes:
        source: the row in each slot, 0 in an empty one.
        present: whether a slot has a row.
        slot: of each row.
        order: the experts in the order of the buckets; () if that is their own.
        inverse: the place of each expert in it.
    """

    source: Int[Tensor, "slots"]
    present: Tensor
    slot: Int[Tensor, "R"]
    order: Tensor | tuple[()]
    inverse: Tensor | tuple[()]


def split(sizes: list[int]) -> list[Bucket]:
    """At most eight buckets with rows and one without, each split being where it saves the most
    padding.

    A split that saves less than a sixteenth of the rows is not made. If none is, the experts keep
    their order.
    """
    order = sorted(range(len(sizes)), key=lambda e: -sizes[e])
    counts = [sizes[e] for e in order]
    starts, worth = [0], max(sum(sizes) * _LEAST_SAVING, 1)
    while len(starts) < _MOST + (counts[starts[-1]] == 0):
        ends = [*starts[1:], len(counts)]
        savings = [
            ((end - i) * (counts[start] - counts[i]), i)
            for start, end in zip(starts, ends, strict=True)
            for i in range(start + 1, end)
        ]
        saving, at = max(savings, default=(0, 0))
        if saving < worth:
            break
        starts = sorted([*starts, at])
    if len(starts) == 1:
        return [Bucket(tuple(range(len(sizes))), counts[0])]
    ends = [*starts[1:], len(counts)]
    return [Bucket(tuple(order[a:b]), counts[a]) for a, b in zip(starts, ends, strict=True)]


def buckets(
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
    found = split(counts)
    return _product(found, rows, w, _layout(found, sizes.to(rows.device), rows.shape[0]))


def _layout(found: list[Bucket], sizes: Int[Tensor, "E"], num_rows: int) -> _Layout:
    order = [e for bucket in found for e in bucket.experts]
    first_slot, slots = [0] * len(order), 0
    for bucket in found:
        for e in bucket.experts:
            first_slot[e], slots = slots, slots + bucket.batch
    place = [0] * len(order)
    for i, e in enumerate(order):
        place[e] = i
    of_experts = torch.tensor([order, first_slot, place], device=sizes.device)
    first_row = sizes.cumsum(0) - sizes

    source, present = [], []
    for bucket, experts in zip(
        found, of_experts[0].split([len(b.experts) for b in found]), strict=True
    ):
        place_in_batch = torch.arange(bucket.batch, device=sizes.device)
        present.append((place_in_batch < sizes[experts][:, None]).flatten())
        source.append((first_row[experts][:, None] + place_in_batch).flatten())
    every = torch.cat(present)
    shift = (of_experts[1] - first_row).repeat_interleave(sizes, output_size=num_rows)
    slot = torch.arange(num_rows, device=sizes.device) + shift
    natural = order == sorted(order)
    return _Layout(
        torch.where(every, torch.cat(source), 0),
        every,
        slot,
        () if natural else of_experts[0],
        () if natural else of_experts[2],
    )


def _batches(found: list[Bucket], rows: Tensor, layout: _Layout) -> list[Tensor]:
    """The padded rows of each bucket: ``[experts, batch, features]``."""
    padded = torch.where(layout.present[:, None], rows.index_select(0, layout.source), 0)
    parts = padded.split([len(b.experts) * b.batch for b in found])
    return [
        x.view(len(b.experts), b.batch, rows.shape[1]) for x, b in zip(parts, found, strict=True)
    ]


def _product_fwd(
    found: list[Bucket], rows: Tensor, w: Tensor, layout: _Layout
) -> tuple[Tensor, Any]:
    used = [b for b in found if b.batch] or found
    num = [len(b.experts) for b in used]
    weights = (
        w.index_select(0, layout.order[: sum(num)])
        if isinstance(layout.order, Tensor)
        else w[: sum(num)]
    )
    pairs = zip(_batches(used, rows, layout), weights.split(num), strict=True)
    products = [(x @ m).flatten(0, 1) for x, m in pairs]
    return torch.cat(products).index_select(0, layout.slot), (rows, w, layout)


def _product_bwd(found: list[Bucket], needs: Any, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    rows, w, layout = residuals
    d_rows = _product(found, ct, w.mT, layout) if needs[0] else None
    return d_rows, _outer(found, rows, ct, layout) if needs[1] else None, None


def _outer_fwd(
    found: list[Bucket], rows: Tensor, ct: Tensor, layout: _Layout
) -> tuple[Tensor, Any]:
    pairs = zip(_batches(found, rows, layout), _batches(found, ct, layout), strict=True)
    of_experts = torch.cat([x.mT @ g for x, g in pairs])
    natural = (
        of_experts.index_select(0, layout.inverse)
        if isinstance(layout.inverse, Tensor)
        else of_experts
    )
    return natural, (rows, ct, layout)


def _outer_bwd(found: list[Bucket], residuals: Any, of_w: Tensor) -> tuple[Any, ...]:
    rows, ct, layout = residuals
    return _product(found, ct, of_w.mT, layout), _product(found, rows, of_w, layout), None


_product = custom_vjp(_product_fwd, _product_bwd, nondiff_argnums=(0,), needs=True, name="buckets")
_outer = custom_vjp(_outer_fwd, _outer_bwd, nondiff_argnums=(0,), name="gradient of buckets")
