"""Counts that a function returns and never reads: right in the forward, neither kept by a remat nor
made again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import random
from k31fn.autodiff import (
    decision,
    keep,
    record_decisions,
    remat,
    replay_decisions,
    report,
    value_and_grad,
    vjp,
)
from k31fn.layers import latent_moe
from k31fn.params import init
from k31fn.testing import assert_close_trees, live_bytes

CELLS, CALLS = 100_000, [0]


def count(x: Tensor) -> tuple[Tensor, ...]:
    CALLS[0] += 1
    return (torch.zeros(CELLS, dtype=torch.int32) + (x > 0).sum().to(torch.int32),)


def inner(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    chosen = decision("chosen", lambda x: x > 0.1, x)
    return torch.tanh(torch.where(chosen, x, 0) @ w), report(count, ((CELLS,),), x)[0]


def function(save: str) -> Any:
    body = inner if save == "none" else remat(inner) if save == "layer" else _keeping
    return lambda w, x: body(w, x)


def _keeping(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return remat(
        lambda w, x: keep("inner", inner, reports=lambda out: out[1])(w, torch.sin(x)),
        keep=["inner"],
    )(w, x)


def arguments() -> tuple[Tensor, Tensor]:
    return tuple(random.normal(random.key(i), (4, 4), dtype=torch.float64) for i in range(2))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("save", ["none", "layer", "keep"])
def test_made_once_and_not_kept(save: str) -> None:
    (w, x), f = arguments(), function(save)
    CALLS[0] = 0
    with live_bytes() as live:
        out, pull, counts = vjp(lambda w, x: f(w, x), w, x, has_aux=True)
        assert (
            counts.tolist() == [int((x > 0 if save != "keep" else torch.sin(x) > 0).sum())] * CELLS
        )
        del counts
        assert live.current < CELLS
        pull(torch.ones_like(out))
    assert CALLS[0] == 1
    assert live.peak < 2.1 * 4 * CELLS


def test_a_decision_of_the_same_is_kept() -> None:
    """What a remat would hold otherwise."""
    w, x = arguments()

    def kept(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ w), decision("counts", count, x)[0]

    with live_bytes() as live:
        _, pull, counts = vjp(remat(kept), w, x, has_aux=True)
        del counts
        assert live.current >= 4 * CELLS
    assert pull


def test_nested_pinned_and_under_transforms() -> None:
    (w, x), f = arguments(), remat(remat(inner))
    expected = value_and_grad(lambda w: inner(w, x)[0].sum())(w)
    assert_close_trees(value_and_grad(lambda w: f(w, x)[0].sum())(w), expected, rtol=0, atol=0)
    assert_close_trees(
        torch.func.grad(lambda w: f(w, x)[0].sum())(w), expected[1], rtol=1e-14, atol=0
    )
    batched = torch.func.vmap(torch.func.grad(lambda w, x: f(w, x)[0].sum()), (None, 0))(
        w, torch.stack([x, -x])
    )
    assert_close_trees(batched[0], expected[1], rtol=1e-14, atol=0)
    with record_decisions() as made:
        _, first = f(w, x)
    with replay_decisions(made):
        assert torch.equal(f(w, x)[1], first), "a run that is no backward's is told"


def test_experts_keep_their_routes_and_no_histogram() -> None:
    """Of 64 experts a histogram has 256 kB, a layer's input 1 kB."""
    cfg = latent_moe.Config(8, latent_size=8, expert_size=4, shared_size=0, num_experts=64, top_k=2)
    p, x = (
        init(latent_moe.specs(cfg), random.key(0), dtype=torch.float32),
        random.normal(random.key(1), (1, 32, 8)),
    )

    def layer(p: Any, x: Tensor) -> tuple[Tensor, Any]:
        out = latent_moe.apply(p, x, cfg, bias=torch.zeros(64))
        return out.y, (out.aux.load, out.aux.histogram)

    for f in (
        remat(layer),
        remat(lambda p, x: keep("ffn", layer, reports=lambda out: out[1])(p, x * 2), keep=["ffn"]),
    ):
        with live_bytes() as live:
            y, pull, (load, histogram) = vjp(f, p, x, has_aux=True)
            assert int(load.sum()) == 64
            assert int(histogram.sum()) == 64 * 32
            del load, histogram
            kept = live.current
            assert pull(torch.ones_like(y))
        assert kept < 100e3, live.largest
