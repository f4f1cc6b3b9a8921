"""The AttnRes scheme against a straight-line rewrite of the skeleton, and the plain scheme beside
it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import params as P
from k31fn import random, tree
from k31fn.autodiff import vjp
from k31fn.layers import attn_res, plain_residual
from k31fn.layers.attn_res import Config, Params

LAYERS, BLOCK, D = 7, 3, 6
CFG = Config(block_size=BLOCK)

MISTAKES = [
    "block frozen before the read",
    "sum runs on across blocks",
    "output added to the mix",
    "block opened twice",
]


def straight_line(
    x: Tensor, queries: Tensor, norms: Tensor, weights: Tensor, *, mistake: str = ""
) -> Tensor:
    """Seven layers written out from the report, sublayers tanh(w h), on a list of sources.

    Queries and norms are rows 2l (attention) and 2l + 1 (feed-forward) of layer l, and the last
    row.
    """

    def mix(sources: list[Tensor], row: int) -> Tensor:
        scores = []
        for v in sources:
            rms = torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-5)
            scores.append((v / rms * norms[row] * queries[row]).sum(-1))
        total = sum(torch.exp(s) for s in scores)
        return sum(
            (torch.exp(s) / total)[..., None] * v for s, v in zip(scores, sources, strict=True)
        )

    running, frozen = x, []
    for layer in range(LAYERS):
        opens = layer % BLOCK == 0
        if opens and mistake == "block frozen before the read":
            frozen.append(running)
            a = mix([*frozen, running], 2 * layer)
        else:
            a = running if not frozen else mix([*frozen, running], 2 * layer)
            if opens:
                frozen.append(running)
        h = torch.tanh(weights[2 * layer] * a)
        running = h if opens and mistake != "sum runs on across blocks" else running + h
        m = mix([*frozen, running], 2 * layer + 1)
        y = torch.tanh(weights[2 * layer + 1] * m)
        if opens and mistake == "block opened twice":
            frozen.append(running)
            running = y
        else:
            running = (m if mistake == "output added to the mix" else running) + y
    return mix([*frozen, running], 2 * LAYERS)


def by_scheme(x: Tensor, queries: Tensor, norms: Tensor, weights: Tensor) -> Tensor:
    carry = attn_res.start(x, CFG)
    for i in range(2 * LAYERS):
        opens = i % (2 * BLOCK) == 0
        carry, aux = attn_res.connect(
            Params(queries[i], norms[i]),
            carry,
            CFG,
            lambda h, i=i: (torch.tanh(weights[i] * h), i),
            opens_block=opens,
        )
        assert aux == i
    assert len(carry.blocks) == 3  # opened by layers 0, 3 and 6; with the running sum: four sources
    return attn_res.finish(Params(queries[-1], norms[-1]), carry, CFG)


def arguments() -> tuple[Tensor, ...]:
    rows = 2 * LAYERS + 1
    shapes = ((2, 4, D), (rows, D), (rows, D), (rows, D))
    return tuple(torch.randn(*shape, dtype=torch.float64) for shape in shapes)


def test_seven_layers_of_blocks_of_three() -> None:
    args, ct = arguments(), torch.randn(2, 4, D, dtype=torch.float64)
    (ours, pull), (expected, pull_expected) = vjp(by_scheme, *args), vjp(straight_line, *args)
    grads, grads_expected = pull(ct), pull_expected(ct)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(grads, grads_expected, atol=1e-12, rtol=1e-12)
    for row in range(
        2 * LAYERS + 1
    ):  # layer 0's attention has parameters that it does not use; all others matter
        assert bool(grads[1][row].any()) == bool(grads[2][row].any()) == (row > 0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    args = arguments()
    assert (by_scheme(*args) - straight_line(*args, mistake=mistake)).abs().max() > 1e-3


def test_zero_queries_mix_uniformly() -> None:
    """The initial value of the queries: every source counts the same, and the queries get a
    gradient.
    """
    specs = attn_res.specs(CFG, D)
    initial = P.init(specs, random.key(0), dtype=torch.float64)
    x = torch.randn(2, 4, D, dtype=torch.float64)
    carry, _ = attn_res.connect(
        initial, attn_res.start(x, CFG), CFG, lambda h: (torch.sin(h), ()), opens_block=True
    )
    torch.testing.assert_close(
        attn_res.finish(initial, carry, CFG), (x + torch.sin(x)) / 2, atol=1e-15, rtol=0
    )
    grads = torch.func.grad(lambda p: attn_res.finish(p, carry, CFG).square().sum())(initial)
    assert grads.query.any()
    assert P.count(specs) == 2 * D
    assert all(s.tags == {"no_decay"} for s in tree.leaves(specs))


def test_query_std() -> None:
    queries = P.init(
        attn_res.specs_out(Config(query_std=0.5), 10_000), random.key(1), dtype=torch.float32
    ).query
    assert abs(queries.std().item() - 0.5) < 0.02  # sd of the estimate: 0.5 / sqrt(2e4) = 0.0035


@pytest.mark.parametrize("module", [attn_res, plain_residual])
@pytest.mark.parametrize("opens_block", [True, False])
def test_state_stays_in_the_dtype_of_the_model(module: Any, opens_block: bool) -> None:
    """A sublayer that returns float32 does not widen the stream."""
    cfg = module.Config()
    params = P.init(module.specs(cfg, D), random.key(0))
    carry = module.start(torch.randn(1, 3, D).bfloat16(), cfg)
    for _ in range(2):
        carry, _ = module.connect(
            params, carry, cfg, lambda h: (h.float() / 3, ()), opens_block=opens_block
        )
    assert {t.dtype for t in tree.leaves(carry)} == {torch.bfloat16}
    assert module.finish(params, carry, cfg).dtype == torch.bfloat16


def test_plain_residual_adds() -> None:
    cfg, x = plain_residual.Config(), torch.randn(2, 3, D)
    assert (
        tree.leaves(plain_residual.specs(cfg, D))
        == tree.leaves(plain_residual.specs_out(cfg, D))
        == []
    )
    carry = plain_residual.start(x, cfg)
    for i in range(3):
        carry, aux = plain_residual.connect(
            (), carry, cfg, lambda h, i=i: (h.sin(), i), opens_block=i == 0
        )
        assert aux == i
    expected = x
    for _ in range(3):
        expected = expected + expected.sin()
    assert torch.equal(plain_residual.finish((), carry, cfg), expected)


def test_schemes_are_interchangeable() -> None:
    """What a decoder layer calls, both have, with the same parameters."""
    for name in ("specs", "specs_out", "start", "connect", "finish"):
        ours: list[Callable[..., Any]] = [getattr(m, name) for m in (attn_res, plain_residual)]
        first, second = (list(inspect.signature(f).parameters.values()) for f in ours)
        assert [(p.name, p.kind) for p in first] == [(p.name, p.kind) for p in second]
        assert all(name in m.__all__ for m in (attn_res, plain_residual))


@pytest.mark.parametrize(("field", "value"), [("block_size", 0), ("eps", 0.0), ("query_std", -0.1)])
def test_config_is_checked(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"attn_res\.Config\.{field}={value}"):
        Config(**{field: value})
