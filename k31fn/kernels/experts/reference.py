"""Plain torch form of the expert operators, without shapes that depend on data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.precision import island, upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["ExpertOrder", "combine", "dispatch", "grouped_matmul", "permute", "sort_by_expert"]


class ExpertOrder(NamedTuple):
    """Copies of tokens, one for each choice of each token, sorted by the expert they go to.

    Attributes:
        order: the copy ``n * G + g`` that lies in each row.
        inverse: the row of each copy; -1: it is absent.
        sizes: rows per expert.
    """

    order: Int[Tensor, "R"]
    inverse: Int[Tensor, "N G"]
    sizes: Int[Tensor, "E"]


def sort_by_expert(topk_idx: Int[Tensor, "N G"], num_experts: int) -> ExpertOrder:
    """Sorts the copies by expert, tokens in order within one. Integers only; runs under
    ``vmap``.
    """
    expert = topk_idx.flatten()
    # Stable: a weight's gradient sums an expert's rows in token order, the same on every device.
    order = torch.argsort(expert, stable=True)
    rows = torch.arange(expert.shape[0], device=expert.device)
    inverse = torch.zeros_like(order).scatter(0, order, rows)
    sizes = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    # `bincount` does not run on meta tensors. Integers have the same sum in any order, so that a
    # scatter may count.
    sizes = sizes.scatter_add(0, expert, torch.ones_like(expert))
    return ExpertOrder(order, inverse.view(topk_idx.shape), sizes)


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, and zeros where the index is -1."""
    if index.shape[0] == x.shape[0]:
        return x.index_select(0, index)  # a permutation: no copy is absent
    rows = x.index_select(0, index.clamp(min=0))
    return torch.where((index >= 0).view(-1, *[1] * (x.ndim - 1)), rows, 0)


def _permute_fwd(x: Tensor, index: Tensor, inverse: Tensor) -> tuple[Tensor, Any]:
    return _rows_at(x, index), (index, inverse)


def _permute_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    index, inverse = residuals
    # Through the rule again and not `index_select`, whose own gradient is a scatter of atomics.
    return _permute(ct, inverse, index), None, None


def permute(
    rows: Float[Tensor, "R *D"], index: Int[Tensor, "R"], inverse: Int[Tensor, "R"]
) -> Float[Tensor, "R *D"]:
    """``rows[index]`` for a permutation; the gradient is ``ct[inverse]``."""
    return _permute(rows, index, inverse)


_permute = custom_vjp(_permute_fwd, _permute_bwd, name="permute")


def _dispatch_fwd(x: Tensor, order: Tensor, inverse: Tensor) -> tuple[Tensor, Any]:
    return x.index_select(0, order // inverse.shape[1]), (order, inverse)


def _dispatch_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    order, inverse = residuals
    copies = _permute(ct, inverse.flatten(), order)
    # A token's copies are added in the order of its choices, wherever their rows lie.
    copies = rearrange(copies, "(token choice) d -> token choice d", choice=inverse.shape[1])
    return copies.sum(1), None, None


def dispatch(
    x: Float[Tensor, "N D"], order: Int[Tensor, "R"], inverse: Int[Tensor, "N G"]
) -> Float[Tensor, "R D"]:
    """``rows[r] = x[order[r] // G]``; the gradient is the sum over a token's copies."""
    return _dispatch(x, order, inverse)


_dispatch = custom_vjp(_dispatch_fwd, _dispatch_bwd, name="dispatch")


def _combine_fwd(
    rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Any]:
    copies = _rows_at(rows, inverse.flatten())
    copies = rearrange(copies, "(token choice) d -> token choice d", choice=inverse.shape[1])
    wide = weights.to(island(rows.dtype)).unsqueeze(-1)
    out = upcast(copies[:, 0]) * wide[:, 0]
    # One choice after another: several times faster on a CPU than a batched product of such thin
    # matrices, and the sum has one order on every device.
    for g in range(1, inverse.shape[1]):
        out = torch.addcmul(out, upcast(copies[:, g]), wide[:, g])
    return out.to(rows.dtype), (rows, weights, order, inverse)


def _combine_bwd(residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    rows, weights, order, inverse = residuals
    # All in the order of rows, so that `rows` is read as it lies.
    token_ct = upcast(_dispatch(ct, order, inverse))
    weight_of_row = _permute(weights.flatten(), order, inverse.flatten())
    d_rows = (token_ct * weight_of_row.unsqueeze(1)).to(rows.dtype)
    d_weights = _permute((token_ct * upcast(rows)).sum(-1), inverse.flatten(), order)
    return d_rows, d_weights.to(weights.dtype).view(inverse.shape), None, None


def combine(
    rows: Float[Tensor, "R D"],
    weights: Float[Tensor, "N G"],
    order: Int[Tensor, "R"],
    inverse: Int[Tensor, "N G"],
) -> Float[Tensor, "N D"]:
    """``y[n] = sum_g weights[n, g] rows[inverse[n, g]]`` in float32, rounded once; keeps only its
    inputs.
    """
    return _combine(rows, weights, order, inverse)


_combine = custom_vjp(_combine_fwd, _combine_bwd, name="combine")


def grouped_matmul(
    rows: Float[Tensor, "R I"], w: Float[Tensor, "E I O"], sizes: Int[Tensor, "E"]
) -> Float[Tensor, "R O"]:
    """Cuts each expert's rows into tiles of ``R / E``; every tile has one expert, and at most ``2
    E`` tiles exist.
    """
    num_rows, num_experts = rows.shape[0], w.shape[0]
    if num_rows == 0:
        # no tile has a row to read, and the weights still get a gradient, of zeros
        return rows @ w.sum(0)
    tile = max(-(-num_rows // num_experts), 1)
    # Full tiles, and one that is not full for each expert: enough for any sizes, so that no shape
    # depends on data.
    num_tiles = num_experts + num_rows // tile
    row_end = sizes.cumsum(0)
    tile_end = ((sizes + tile - 1) // tile).cumsum(0)
    row_start = row_end - sizes
    tile_start = torch.cat([torch.zeros_like(tile_end[:1]), tile_end[:-1]])

    # Which rows lie in each tile; a tile's missing rows are zero. The ends that a tile has passed
    # count to its expert; one behind all rows takes the last expert, and nobody reads its product.
    tiles = torch.arange(num_tiles, device=rows.device)
    expert = (tiles[:, None] >= tile_end).sum(1).clamp(max=num_experts - 1)
    local = ((tiles - tile_start[expert]) * tile)[:, None] + torch.arange(tile, device=rows.device)
    source = (row_start[expert][:, None] + local).clamp(max=num_rows - 1)
    present = local < sizes[expert][:, None]
    gathered = rows.index_select(0, source.flatten())
    gathered = rearrange(gathered, "(tile row) i -> tile row i", row=tile)
    padded = torch.where(present[:, :, None], gathered, 0)

    product = torch.matmul(padded, w.index_select(0, expert))
    product = rearrange(product, "tile row o -> (tile row) o")

    # Back from the tiles: where each row lies.
    row = torch.arange(num_rows, device=rows.device)
    of_row = (row[:, None] >= row_end).sum(1).clamp(max=num_experts - 1)
    return product.index_select(0, tile_start[of_row] * tile + row - row_start[of_row])
