"""The mHC scheme: against plain residuals where they coincide, against its parts, and on a mesh of
token shards.
"""

import dataclasses
import inspect
import math

import jaxtyping
import pytest
import torch
from torch import Tensor

from k31fn import params as P
from k31fn import random, tree
from k31fn.kernels.mhc_post import mhc_post
from k31fn.kernels.mhc_pre import mhc_head, mhc_pre
from k31fn.layers import attn_res, mhc, plain_residual

D = 6
CFG = mhc.Config()


def drawn(specs: mhc.Params[P.ParamSpec], seed: int) -> mhc.Params[Tensor]:
    """Parameters far from their initial values."""
    torch.manual_seed(seed)
    return tree.map(lambda s: torch.randn(s.shape, dtype=torch.float64), specs)


def test_two_sublayers_are_the_ops_in_a_row() -> None:
    x = torch.randn(2, 3, D, dtype=torch.float64)
    a, b = (drawn(mhc.specs(CFG, D), i) for i in range(2))
    out = drawn(mhc.specs_out(CFG, D), 2)
    carry, seen = mhc.start(x, CFG), []

    def f(h: Tensor) -> tuple[Tensor, int]:
        seen.append(h)
        return torch.tanh(h), 7

    for params in (a, b):
        carry, aux = mhc.connect(params, carry, CFG, f, opens_block=True)
        assert aux == 7
    streams = x[:, :, None].repeat(1, 1, 4, 1)
    for params, h in zip((a, b), seen, strict=True):
        pre = mhc_pre(streams, params.phi, params.scale, params.base, 1e-6, 20)
        assert torch.equal(pre.y, h)
        streams = mhc_post(streams, torch.tanh(h), pre.h_post, pre.h_res)
    assert torch.equal(carry.streams, streams)
    assert torch.equal(
        mhc.finish(out, carry, CFG), mhc_head(streams, out.phi, out.scale, out.base, 1e-6)
    )


def test_plain_residual_where_the_coefficients_are_uniform() -> None:
    """Scale 0: h_res is 1/N and h_post 1: each stream is the plain one (to Sinkhorn's eps), the
    read N/2 of it.
    """
    x = torch.randn(2, 3, D, dtype=torch.float64)
    cfg = dataclasses.replace(CFG, init_scale=0.0)
    params = P.init(mhc.specs(cfg, D), random.key(0), dtype=torch.float64)
    carry, plain = mhc.start(x, cfg), plain_residual.start(x, plain_residual.Config())
    for _ in range(3):
        carry, _ = mhc.connect(
            params, carry, cfg, lambda h: (torch.sin(h / 2), ()), opens_block=False
        )
        plain = plain_residual.Carry(plain.prefix + torch.sin(plain.prefix))
    for stream in carry.streams.unbind(-2):
        torch.testing.assert_close(stream, plain.prefix, atol=1e-4, rtol=0)
    read = mhc.finish(P.init(mhc.specs_out(cfg, D), random.key(0), dtype=torch.float64), carry, cfg)
    torch.testing.assert_close(read / 2, plain.prefix, atol=1e-4, rtol=0)


def test_initial_values_and_islands() -> None:
    """Coefficients start nearly uniform, and their parameters stay float32 in a bfloat16 model."""
    specs = mhc.specs(CFG, D)
    assert P.count(specs) == 4 * D * 24 + 3 + 24
    assert P.count(mhc.specs_out(CFG, D)) == 4 * D * 4 + 1 + 4
    params = P.init(specs, random.key(0), dtype=torch.bfloat16)
    assert {p.dtype for p in tree.leaves(params)} == {torch.float32}
    assert params.phi.std() == pytest.approx(
        0.02, rel=0.2
    )  # sd of the estimate: 3%, and the cut takes another 1%
    assert (params.scale == 0.01).all()
    assert [s.tags for s in tree.leaves(specs)] == [
        frozenset(),
        frozenset({"no_decay"}),
        frozenset({"no_decay"}),
    ]
    assert not params.base.any()
    pre = mhc_pre(torch.randn(1, 3, 4, D), params.phi, params.scale, params.base, 1e-6, 20)
    assert (pre.h_res - 0.25).abs().max() < 1e-3
    assert (pre.h_post - 1).abs().max() < 1e-2


@pytest.mark.parametrize("opens_block", [True, False])
def test_state_stays_in_the_dtype_of_the_model(opens_block: bool) -> None:
    params = P.init(mhc.specs(CFG, D), random.key(0))
    carry = mhc.start(torch.randn(1, 3, D).bfloat16(), CFG)
    for _ in range(2):
        carry, _ = mhc.connect(
            params, carry, CFG, lambda h: (h.float() / 3, ()), opens_block=opens_block
        )
        assert carry.streams.shape == (1, 3, 4, D)
        assert carry.streams.dtype == torch.bfloat16
    out = P.init(mhc.specs_out(CFG, D), random.key(1))
    assert mhc.finish(out, carry, CFG).dtype == torch.bfloat16


def test_interchangeable_with_the_other_schemes() -> None:
    for name in ("specs", "specs_out", "start", "connect", "finish"):
        ours, other = (
            list(inspect.signature(getattr(m, name)).parameters.values()) for m in (mhc, attn_res)
        )
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in other]
        assert name in mhc.__all__


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_streams", 0),
        ("num_streams", 2.5),
        ("iterations", 0),
        ("eps", 0.0),
        ("init_std", 0.0),
        ("init_std", math.inf),
        ("init_scale", math.nan),
    ],
)
def test_refused_configs(field: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", True
    )  # as for a user, who gives 2.5 for an integer
    with pytest.raises(ValueError, match=f"mhc.Config.{field}={value}"):
        dataclasses.replace(CFG, **{field: value})
