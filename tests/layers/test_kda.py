import dataclasses
import math

import pytest
import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.registry import record_impls
from k31fn.layers import kda
from k31fn.params import Constant, LowRank
from k31fn.segments import from_lengths

D, H, K = 12, 2, 8
CFG = kda.Config(D, H, K, decay_rank=3, init_std=0.3)


def weights(dtype=torch.float64, cfg: kda.Config = CFG) -> kda.Params[Tensor]:
    """Drawn, and then moved off the initial values that hide a term."""
    p = params.init(kda.specs(cfg), random.key(0), dtype=dtype)
    return tree.map(lambda w: w + 0.3 * torch.rand_like(w) if w.ndim == 1 else w, p)


def one_document(p: kda.Params[Tensor], x: Tensor) -> Tensor:
    """The layer's equations for one document ``[T D]``, token by token and head by head."""

    def convolved(w: Tensor, taps: Tensor) -> Tensor:
        inputs = torch.cat([x.new_zeros(3, H * K), x @ w])
        z = torch.stack([(inputs[t : t + 4] * taps.T).sum(0) for t in range(len(x))])
        return (z / (1 + (-z).exp())).reshape(-1, H, K)

    q, k, v = (
        convolved(w, c.weight) for w, c in ((p.w_q, p.conv_q), (p.w_k, p.conv_k), (p.w_v, p.conv_v))
    )
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = (x @ p.w_fa @ p.w_fb + p.dt_bias).reshape(-1, H, K)
    decay = torch.exp(-5 / (1 + torch.exp(-p.A_log.exp()[:, None] * z)))
    beta, gate = 1 / (1 + torch.exp(-x @ p.w_b)), 1 / (1 + torch.exp(-x @ p.w_g))
    heads = []
    for h in range(H):
        s, rows = x.new_zeros(K, K), []
        for t in range(len(x)):
            s = decay[t, h][:, None] * s
            s = s + beta[t, h] * torch.outer(k[t, h], v[t, h] - s.T @ k[t, h])
            o = s.T @ q[t, h] / K**0.5
            rows.append(p.o_norm * o / (o.pow(2).mean() + 1e-5).sqrt())
        heads.append(torch.stack(rows))
    return (gate * torch.cat(heads, dim=1)) @ p.w_o


def by_documents(p: kda.Params[Tensor], x: Tensor, lengths: list[list[int]]) -> Tensor:
    """Every document alone, by the equations; 0 for padding."""
    rows = []
    for row, documents in zip(x, lengths, strict=True):
        parts, start = [], 0
        for n in documents:
            parts.append(one_document(p, row[start : start + n]))
            start += n
        rows.append(torch.cat([*parts, torch.zeros_like(row[start:])]))
    return torch.stack(rows)


LENGTHS = [[5, 1, 20], [18, 7]]


def test_values_and_all_gradients_are_those_of_the_separate_documents():
    """Weight gradients of a packed batch are the sums over its documents."""
    p, x = weights(), torch.randn(2, 27, D, dtype=torch.float64)
    ct, segments = torch.randn_like(x), from_lengths(LENGTHS, 27)
    value, grads = value_and_grad(
        lambda p, x: (kda.apply(p, x, CFG, segments=segments).y * ct).sum(), (0, 1)
    )(p, x)
    expected, wanted = value_and_grad(
        lambda p, x: (by_documents(p, x, LENGTHS) * ct).sum(), (0, 1)
    )(p, x)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    for (path, g), w in zip(tree.flatten_with_paths(grads), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11, msg=path)
        assert g.any(), path
    y = kda.apply(p, x, CFG, segments=segments).y
    assert not y[segments.ids == 0].any()


def test_the_documents_must_be_told():
    p, x = weights(), torch.randn(2, 27, D, dtype=torch.float64)
    assert (kda.apply(p, x, CFG).y - by_documents(p, x, LENGTHS)).abs().max() > 1e-2


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_prefill_and_decoding_equal_the_whole_for_every_cut(dtype, atol):
    p, x = weights(dtype), torch.randn(2, 35, D, dtype=dtype)
    whole = kda.apply(p, x, CFG).y
    zero = kda.init_state(CFG, 2, dtype=dtype)
    ends = []
    for cut in range(1, 36):
        prefix, state = kda.extend(p, x[:, :cut], CFG, zero)
        torch.testing.assert_close(prefix, whole[:, :cut], rtol=0, atol=atol)
        rest = x[:, cut:].split(1 if cut > 30 else 9, dim=1) if cut < 35 else ()
        outputs = []
        for part in rest:
            y, state = kda.extend(p, part, CFG, state)
            outputs.append(y)
        if outputs:
            torch.testing.assert_close(torch.cat(outputs, dim=1), whole[:, cut:], rtol=0, atol=atol)
        ends.append(state)
    for state in ends:
        for a, b in zip(tree.leaves(state), tree.leaves(ends[-1]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_documents_and_later_tokens_change_no_bit():
    p, x = weights(torch.float32), torch.randn(1, 40, D)
    segments = from_lengths([[21, 15]], 40)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        ct = torch.linspace(-1, 1, 40)[None, :, None]
        grad = value_and_grad(lambda x: (kda.apply(p, x, CFG, segments=segments).y * ct).sum())(x)[
            1
        ]
        return kda.apply(p, x, CFG, segments=segments).y, grad

    y, grad = run(x)
    for changed, kept in (
        (slice(0, 21), slice(21, 40)),
        (slice(21, 36), slice(0, 21)),
        (slice(36, 40), slice(0, 36)),
    ):
        other = x.clone()
        other[:, changed] = torch.randn_like(other[:, changed])
        y_other, grad_other = run(other)
        assert torch.equal(y_other[:, kept], y[:, kept])
        assert torch.equal(grad_other[:, kept], grad[:, kept])
    later = x.clone()
    later[:, 30:] = torch.randn_like(later[:, 30:])
    assert torch.equal(run(later)[0][:, :30], y[:, :30])


# ------------------------------------------------------------------------------------- declarations


def test_parameter_count_of_k3():
    assert params.count(kda.specs(kda.Config(7168, 96, 128))) == 443_740_384


def test_islands_stay_float32_and_why():
    """D03: the decay rate exp(A_log) is off by 0.65% when log 15.3 is rounded to bf16."""
    islands = {"A_log", "dt_bias", "conv_q.weight", "conv_k.weight", "conv_v.weight", "o_norm"}
    specs = kda.specs(CFG)
    built = params.init(specs, random.key(0), dtype=torch.bfloat16)
    cast = params.cast(
        params.init(specs, random.key(0), dtype=torch.float32), specs, torch.bfloat16
    )
    for p in (built, cast):
        kept = {path for path, leaf in tree.flatten_with_paths(p) if leaf.dtype == torch.float32}
        assert kept == islands
        assert all(leaf.dtype in (torch.float32, torch.bfloat16) for leaf in tree.leaves(p))
    rate = torch.tensor(math.log(15.3)).bfloat16().float().exp()
    assert abs(float(rate) / 15.3 - 1) == pytest.approx(0.0065, abs=1e-4)


def test_a_bf16_model_uses_the_unrounded_decay():
    p, x = weights(torch.bfloat16), torch.randn(1, 20, D).bfloat16()
    y = kda.apply(p, x, CFG).y
    wide = kda.apply(tree.map(lambda w: w.double(), p), x.double(), CFG).y
    assert y.dtype == torch.bfloat16
    # bf16 products: a few units of 2^-8 of the largest output
    torch.testing.assert_close(y.double(), wide, rtol=0, atol=0.03 * float(wide.abs().max()))
    rounded = tree.map(lambda w: w.bfloat16().to(w.dtype), p)
    assert not torch.equal(kda.apply(rounded, x, CFG).y, y)


def test_tags_and_initial_values():
    specs = kda.specs(CFG)
    found = {path: spec.tags for path, spec in tree.flatten_with_paths(specs)}
    assert {path for path, tags in found.items() if "per_head" in tags} == {"w_q", "w_k", "w_v"}
    matrices = {"w_q", "w_k", "w_v", "w_g", "w_o", "w_fa", "w_fb", "w_b"}
    assert {path for path, tags in found.items() if "matrix" in tags} == matrices
    assert {path for path, tags in found.items() if "no_decay" in tags} == found.keys() - matrices
    p = params.init(specs, random.key(0), dtype=torch.float32)
    assert not p.A_log.any()
    assert torch.equal(p.o_norm, torch.ones(K))
    step = torch.nn.functional.softplus(p.dt_bias)
    assert 1e-3 <= float(step.min()) < float(step.max()) <= 0.1
    assert kda.specs(kda.Config(D, H, K, dt_bias_init=Constant(0.0))).dt_bias.init == Constant(0.0)
    assert kda.Config(D, H, K).rank == K


@pytest.mark.parametrize("name", ["w_q", "w_fa"])
def test_low_rank_weights_equal_their_dense_sum(name):
    p, x = weights(), torch.randn(1, 9, D, dtype=torch.float64)
    base = getattr(p, name)
    a, b = (
        torch.randn(D, 2, dtype=torch.float64),
        torch.randn(2, base.shape[1], dtype=torch.float64),
    )
    adapted, dense = (
        dataclasses.replace(p, **{name: w}) for w in (LowRank(base, a, b), base + a @ b)
    )
    torch.testing.assert_close(
        kda.apply(adapted, x, CFG).y, kda.apply(dense, x, CFG).y, rtol=0, atol=1e-12
    )


def test_uses_the_operators():
    with record_impls() as used:
        kda.apply(weights(), torch.randn(1, 3, D, dtype=torch.float64), CFG)
    assert used == {
        ("short_conv", "reference"): 1,
        ("kda_gated", "reference"): 1,
        ("gated_norm", "reference"): 1,
    }


BAD = {
    "hidden_size": 0,
    "num_heads": 0,
    "head_dim": -1,
    "decay_rank": 0,
    "norm_eps": 0.0,
    "l2_eps": -1e-6,
    "init_std": 0.0,
}


@pytest.mark.parametrize(("field", "value"), BAD.items())
def test_bad_configs_are_refused(field, value):
    with pytest.raises(ValueError, match=f"kda.Config.{field}={value} must be positive"):
        kda.Config(**{"hidden_size": D, "num_heads": H, "head_dim": K, field: value})


def test_a_bad_convolution_is_refused():
    with pytest.raises(ValueError, match="width=1"):
        kda.Config(D, H, K, conv_width=1)


@pytest.mark.parametrize("bound", [-5.01, 0.0, 1.0, -math.inf, math.nan])
def test_decays_that_a_tile_cannot_hold_are_refused(bound):
    """D01: e^80 is the largest factor of a tile of 16; nothing but a decay is asked for either."""
    with pytest.raises(ValueError, match=r"kda.Config.gate_lower_bound=.* must be in \[-5.0, 0\)"):
        kda.Config(D, H, K, gate_lower_bound=bound)


@pytest.mark.parametrize("value", [41.0, 88.0, 89.0, 1000.0])
def test_a_rate_that_float32_does_not_have_has_finite_gradients(value):
    """exp(89) is infinite: the sigmoid hides it from the value, and not from the gradient."""
    p = weights(torch.float32)
    x = torch.randn(1, 20, D)

    def loss(p, a_log):
        packing = from_lengths([[12, 8]], 20)
        return kda.apply(dataclasses.replace(p, A_log=a_log), x, CFG, segments=packing).y.sum()

    got, (grads, of_rate) = value_and_grad(loss, argnums=(0, 1))(p, torch.full((H,), value))
    assert got.isfinite()
    for path, grad in tree.flatten_with_paths(grads):
        assert grad.isfinite().all(), path
    assert not of_rate.any()  # it has come to its end
    assert torch.equal(got, loss(p, torch.full((H,), 40.0)))
    near = torch.full((H,), 2.0)
    assert torch.func.grad(lambda a: loss(p, a))(near).any()
