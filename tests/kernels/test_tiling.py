from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from k31fn.autodiff import remat, value_and_grad
from k31fn.kernels import tiling


def causal_sum(q: torch.Tensor, k: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A stand-in for attention: each query sums exp(q k) over the keys up to its own index."""
    parts = tiling.map_query_tiles(_tile, (q, index), (k,), width=1)
    return torch.cat(parts)


def _tile(q: torch.Tensor, index: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(k.shape[0]) <= index, torch.exp(q @ k.T), 0.0).sum(-1)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (33, 33), (5, 9)])
@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize("kept", [0, 2**20], ids=["remat", "kept"])
def test_tiles_do_not_change_value_or_gradient(
    monkeypatch: pytest.MonkeyPatch, T: int, S: int, tile: int, kept: int
):
    monkeypatch.setattr(tiling, "TILE_QUERIES", tile)
    monkeypatch.setattr(tiling, "KEPT_ELEMENTS", kept)
    q, k = torch.randn(T, 3, dtype=torch.float64), torch.randn(S, 3, dtype=torch.float64)
    index = torch.arange(S - T, S)[:, None]
    weight = torch.randn(T, dtype=torch.float64)
    tiled = value_and_grad(lambda q, k: (weight * causal_sum(q, k, index)).sum(), (0, 1))(q, k)
    whole = value_and_grad(lambda q, k: (weight * _tile(q, index, k)).sum(), (0, 1))(q, k)
    torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "transform", [value_and_grad, torch.func.grad_and_value], ids=["tape", "func"]
)
def test_tiles_inside_a_remat_of_everything(
    monkeypatch: pytest.MonkeyPatch, transform: Callable[..., Any]
):
    """Gradients are off in the first run of a remat and on in its replay: both must make the same
    tiles.
    """
    monkeypatch.setattr(tiling, "TILE_QUERIES", 4)
    monkeypatch.setattr(tiling, "KEPT_ELEMENTS", 0)
    q, k = torch.randn(2, 9, 3, dtype=torch.float64)
    index = torch.arange(9)[:, None]

    def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return causal_sum(q, k, index).square().sum()

    expected = transform(loss)(q, k)
    torch.testing.assert_close(transform(remat(loss))(q, k), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        transform(remat(remat(loss)))(q, k), expected, rtol=1e-13, atol=1e-13
    )


def test_queries_that_are_the_keys_get_prefixes_only():
    lengths: list[int] = []

    def record(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        lengths.append(k.shape[0])
        return q

    q = torch.zeros(2048, 1)
    parts = tiling.map_query_tiles(record, (q,), (q,), width=1)
    assert torch.cat(parts).shape == q.shape
    assert all(n >= (i + 1) * tiling.TILE_QUERIES for i, n in enumerate(lengths))
    assert sum(lengths) / len(lengths) < 0.6 * 2048
    assert len(set(lengths)) <= 8
    lengths.clear()
    tiling.map_query_tiles(record, (q[:100],), (q,), width=1)
    assert set(lengths) == {2048}


def test_a_huge_number_of_heads_still_makes_tiles():
    x = torch.zeros(4, 1)
    assert [
        len(part) for part in tiling.map_query_tiles(lambda q, k: q, (x,), (x,), width=2**40)
    ] == [1, 1, 1, 1]
