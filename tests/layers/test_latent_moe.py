from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn import autodiff, params, random, tree
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers import latent_moe, mlp, norm, router
from k31fn.params import LowRank, Quantized
from k31fn.segments import from_lengths

CFG = latent_moe.Config(
    hidden_size=6, latent_size=4, expert_size=5, shared_size=7, num_experts=5, top_k=2
)
MODEL = Path(__file__).parents[1] / "golden" / "k3_text_tiny"


def layer(cfg=CFG, dtype=torch.float64):
    """Parameters of order one, two rows of five tokens and a bias."""
    p = params.init(latent_moe.specs(cfg), random.key(0), dtype=dtype)
    p = tree.map(lambda w: 25 * w if w.ndim > 1 else w + 0.1 * torch.randn_like(w), p)
    return (
        p,
        torch.randn(2, 5, cfg.hidden_size, dtype=dtype),
        0.1 * torch.randn(cfg.num_experts, dtype=torch.float32),
    )


def situ(g, u):
    return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)


def token_by_token(p, x, cfg, bias):
    """The layer as the report writes it, one token and one expert at a time."""
    out = []
    for row in x.flatten(0, 1):
        s = 1 / (1 + torch.exp(-(row @ p.router.weight)))
        chosen = sorted(range(cfg.num_experts), key=lambda j: -(s + bias)[j].item())[: cfg.top_k]
        total = sum(s[j] for j in chosen)
        u = row @ p.latent_down
        mixed = torch.zeros_like(u)
        for j in chosen:
            e = p.experts
            mixed = mixed + s[j] / total * (situ(u @ e.w_gate[j], u @ e.w_up[j]) @ e.w_down[j])
        latent = p.norm.weight * mixed / (mixed.square().mean() + cfg.norm_eps).sqrt()
        shared = situ(row @ p.shared.w_gate, row @ p.shared.w_up) @ p.shared.w_down
        out.append(latent @ p.latent_up + shared)
    return torch.stack(out).view(x.shape)


def test_equals_token_by_token():
    p, x, bias = layer()
    ct = torch.randn_like(x)
    y, pull = autodiff.vjp(lambda p, x: latent_moe.apply(p, x, CFG, bias=bias).y, p, x)
    expected, expected_pull = autodiff.vjp(lambda p, x: token_by_token(p, x, CFG, bias), p, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for ours, other in zip(tree.leaves(pull(ct)), tree.leaves(expected_pull(ct)), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


def test_static_and_ragged_agree_to_second_order():
    p, x, bias = layer()

    def loss(p, x):
        return latent_moe.apply(p, x, CFG, bias=bias).y.sin().sum()

    def squared_gradient(p, x):
        grads = torch.func.grad(loss, argnums=(0, 1))(p, x)
        return sum(g.square().sum() for g in tree.leaves(grads))

    results = {}
    for impl in ("reference", "ragged"):
        with use_impl(grouped_matmul=impl):
            grads = torch.func.grad(loss, argnums=(0, 1))(p, x)
            second = torch.func.grad(squared_gradient, argnums=(0, 1))(p, x)
        results[impl] = tree.leaves((grads, second))
    for static, ragged in zip(results["reference"], results["ragged"], strict=True):
        torch.testing.assert_close(static, ragged, rtol=1e-12, atol=1e-12)


def test_which_form_runs():
    p, x, bias = layer()
    with record_impls() as ran:
        latent_moe.apply(p, x, CFG, bias=bias)
        torch.vmap(lambda x: latent_moe.apply(p, x, CFG, bias=bias).y)(torch.stack([x, -x]))
    assert ran["grouped_matmul", "ragged"] == ran["grouped_matmul", "reference"] == 3


def test_shapes_on_meta():
    p = params.abstract(latent_moe.specs(CFG))
    x = torch.empty(2, 5, 6, device="meta", dtype=torch.bfloat16)
    out = latent_moe.apply(p, x, CFG, bias=torch.empty(5, device="meta"))
    assert out.y.shape == (2, 5, 6)
    assert out.y.dtype == torch.bfloat16
    routing = router.apply(p.router, x, CFG.router, bias=torch.empty(5, device="meta"))
    assert routing.weights.dtype == torch.float32


def test_per_sample_gradients_over_packings():
    p, x, bias = layer()
    packings = [from_lengths([[3, 2], [4]], 5), from_lengths([[5], [1, 1]], 5)]

    def gradient(x, segments):
        def loss(p):
            y = latent_moe.apply(p, x, CFG, bias=bias, segments=segments).y
            return torch.where(segments.ids[..., None] > 0, y, 0).sin().sum()

        return torch.func.grad(loss)(p)

    batched = torch.vmap(gradient)(
        torch.stack([x, -x]), tree.map(lambda *s: torch.stack(s), *packings)
    )
    for i, (sample, segments) in enumerate(zip((x, -x), packings, strict=True)):
        for ours, other in zip(
            tree.leaves(batched), tree.leaves(gradient(sample, segments)), strict=True
        ):
            torch.testing.assert_close(ours[i], other, rtol=1e-11, atol=1e-12)


def test_padding_is_inert():
    p, x, bias = layer()
    segments = from_lengths([[3], [4]], 5)
    real = segments.ids > 0
    other = torch.where(real[..., None], x, 7.0)

    def run(x):
        def f(p, x):
            out = latent_moe.apply(p, x, CFG, bias=bias, segments=segments)
            return torch.where(real[..., None], out.y, 0), out.aux

        y, pull, routing = autodiff.vjp(f, p, x, has_aux=True)
        return y, pull(torch.ones_like(y)), routing

    (y, grads, routing), (other_y, other_grads, other_routing) = run(x), run(other)
    assert torch.equal(y, other_y)
    assert torch.equal(routing.load, other_routing.load)
    assert torch.equal(routing.histogram, other_routing.histogram)
    assert torch.equal(grads[1][~real], torch.zeros(3, 6, dtype=torch.float64))
    for a, b in zip(tree.leaves(grads[0]), tree.leaves(other_grads[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_no_token_at_all():  # field cases D16, D22
    p, x, bias = layer()
    segments = from_lengths([[], []], 5)

    def loss(p, x):
        out = latent_moe.apply(p, x, CFG, bias=bias, segments=segments)
        return out.y.square().sum(), out

    (value, out), grads = autodiff.value_and_grad(autodiff.remat(loss), (0, 1), has_aux=True)(p, x)
    assert value.isfinite()
    assert out.aux.load.sum() == out.aux.histogram.sum() == 0
    assert torch.equal(
        out.y, mlp.apply(p.shared, x, CFG.shared).y
    )  # the routed part is exactly zero
    assert all(g.isfinite().all() for g in tree.leaves(grads))
    for g in tree.leaves((grads[0].experts, grads[0].router)):
        assert torch.equal(g, torch.zeros_like(g))


def test_an_expert_without_tokens_gets_a_zero_gradient():
    p, x, bias = layer()
    bias = bias + torch.tensor([0.0, 0, -9, 0, 0])  # nobody takes expert 2

    def loss(p):
        out = latent_moe.apply(p, x, CFG, bias=bias)
        return out.y.sin().sum(), out.aux.load

    (_, load), grads = autodiff.value_and_grad(loss, has_aux=True)(p)
    assert load[2] == 0
    for g in tree.leaves(grads.experts):
        assert torch.equal(g[2], torch.zeros_like(g[2]))
        assert g[load > 0].abs().amax((1, 2)).min() > 0


@pytest.mark.parametrize("remat", [False, True])
def test_recomputation_changes_nothing(remat):  # field cases D23, D26
    p, x, bias = layer()
    tied = latent_moe.Params(
        router.Params(0 * p.router.weight), p.latent_down, p.experts, p.norm, p.latent_up, p.shared
    )

    def loss(p, x):
        out = latent_moe.apply(p, x, CFG, bias=0 * bias)
        return out.y.sin().sum(), out.aux

    f = autodiff.remat(loss) if remat else loss
    (_, routing), grads = autodiff.value_and_grad(f, (0, 1), has_aux=True)(tied, x)
    assert routing.load.tolist() == [10, 10, 0, 0, 0]  # exact ties: the lowest experts
    assert routing.histogram.sum(1).tolist() == [10] * 5
    plain = autodiff.value_and_grad(loss, (0, 1), has_aux=True)(tied, x)[1]
    for a, b in zip(tree.leaves(grads), tree.leaves(plain), strict=True):
        assert torch.equal(a, b)


def test_low_rank_and_quantised_experts():
    p, x, bias = layer()
    randn = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    adapted = tree.map(
        lambda w: LowRank(w, randn(5, w.shape[1], 2), randn(5, 2, w.shape[2])), p.experts
    )
    codes = tree.map(
        lambda w: Quantized((4 * w).round().to(torch.int8), 0.25 + 0 * w[:, :1]), p.experts
    )
    is_leaf = lambda n: isinstance(n, LowRank | Quantized)  # noqa: E731
    merged = tree.map(lambda w: w.base + w.a @ w.b, adapted, is_leaf=is_leaf)
    wide = tree.map(lambda w: w.codes * w.scales, codes, is_leaf=is_leaf)

    def run(experts):
        with_experts = latent_moe.Params(
            p.router, p.latent_down, experts, p.norm, p.latent_up, p.shared
        )
        return latent_moe.apply(with_experts, x, CFG, bias=bias).y

    torch.testing.assert_close(run(adapted), run(merged), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run(codes), run(wide), rtol=1e-12, atol=1e-12)
    for impl in ("reference", "ragged"):
        with use_impl(grouped_matmul=impl):
            torch.testing.assert_close(run(adapted), run(merged), rtol=1e-12, atol=1e-12)


def test_experts_weigh_in_float32():
    """In bf16 the result is closer to the exact one than if the weights were rounded before the
    sum.
    """
    p, x, bias = layer(dtype=torch.bfloat16)
    wide = tree.map(lambda w: w.double(), p)
    exact = latent_moe.apply(wide, x.double(), CFG, bias=bias)
    out = latent_moe.apply(p, x, CFG, bias=bias)
    assert out.y.dtype == torch.bfloat16
    chosen = router.apply(p.router, x, CFG.router, bias=bias).topk_idx
    of_exact = router.apply(wide.router, x.double(), CFG.router, bias=bias).topk_idx
    assert torch.equal(chosen, of_exact)
    assert (
        (out.y.double() - exact.y).norm() / exact.y.norm()
    ).item() < 0.02  # five roundings to bf16 in a chain


def golden_layer(index):
    weights = load_file(MODEL / "model.safetensors")
    prefix = f"language_model.model.layers.{index}."
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def golden_mlp(w, prefix):
    return mlp.Params(*(w[f"{prefix}.{n}_proj.weight"].T for n in ("gate", "up", "down")))


def golden_moe(w):
    moe = "block_sparse_moe."
    stacks = (
        torch.stack([w[f"{moe}experts.{j}.{n}.weight"].T for j in range(8)])
        for n in ("w1", "w3", "w2")
    )
    return latent_moe.Params(
        router=router.Params(w[moe + "gate.weight"].T),
        latent_down=w[moe + "routed_expert_down_proj.weight"].T,
        experts=mlp.Params(*stacks),
        norm=norm.Params(w[moe + "routed_expert_norm.weight"]),
        latent_up=w[moe + "routed_expert_up_proj.weight"].T,
        shared=golden_mlp(w, moe + "shared_experts"),
    )


GOLDEN_CFG = latent_moe.Config(
    hidden_size=64, latent_size=32, expert_size=24, shared_size=48, num_experts=8, top_k=2
)


def golden_input(w, expected, index):
    x = expected[f"layers.{index}.mlp_res_in"]
    return norm.apply(norm.Params(w["post_attention_layernorm.weight"]), x, norm.Config(64))


@pytest.mark.parametrize("index", range(1, 8))
def test_routes_equal_the_golden_model(index):
    w, expected = golden_layer(index), load_file(MODEL / "expected.safetensors")
    out = router.apply(
        golden_moe(w).router,
        golden_input(w, expected, index),
        GOLDEN_CFG.router,
        bias=w["block_sparse_moe.gate.e_score_correction_bias"],
    )
    idx, order = out.topk_idx.flatten(0, 1).sort(-1)
    assert torch.equal(idx, expected[f"layers.{index}.router_indices"].long())
    weights = out.weights.flatten(0, 1).gather(-1, order)
    torch.testing.assert_close(
        weights, expected[f"layers.{index}.router_weights"], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("impl", ["reference", "ragged"])
def test_output_equals_the_golden_model(impl):
    # Layer 3 opens a block: its prefix is the attention output, then plus the layer's.
    w, expected = golden_layer(3), load_file(MODEL / "expected.safetensors")
    x, bias = golden_input(w, expected, 3), w["block_sparse_moe.gate.e_score_correction_bias"]
    with use_impl(grouped_matmul=impl):
        out = latent_moe.apply(golden_moe(w), x, GOLDEN_CFG, bias=bias)
    golden = expected["layers.3.prefix_out"] - expected["layers.3.attn_out"]
    torch.testing.assert_close(
        out.y, golden, rtol=0, atol=1e-5
    )  # fp32; the golden value is itself a difference
    other_eps = latent_moe.Config(**{**GOLDEN_CFG.__dict__, "norm_eps": 1e-6})
    broken = latent_moe.apply(golden_moe(w), x, other_eps, bias=bias)
    assert (broken.y - golden).abs().max() > 5e-5, (
        "five times the tolerance: the fixture tells the eps"
    )


def test_dense_layer_equals_the_golden_model():
    w, expected = golden_layer(0), load_file(MODEL / "expected.safetensors")
    y = mlp.apply(golden_mlp(w, "mlp"), golden_input(w, expected, 0), mlp.Config(64, 96)).y
    golden = expected["layers.0.prefix_out"] - expected["layers.0.attn_out"]
    torch.testing.assert_close(y, golden, rtol=0, atol=1e-5)


def test_parameter_count_of_k3():
    cfg = latent_moe.Config(7168, 3584, 3072, 6144, 896, 16)
    specs = latent_moe.specs(cfg)
    assert params.count(specs.experts) == 896 * 33_030_144
    assert (
        params.count(specs, lambda _, s: "expert" not in s.tags)
        == 7168 * (896 + 2 * 3584 + 3 * 6144) + 3584
    )
    assert all(
        s.tags == {"expert", "matrix"} and s.axes[0] == "experts"
        for s in tree.leaves(specs.experts)
    )


def test_without_shared_experts():
    cfg = latent_moe.Config(6, 4, 5, 0, 5, 2)
    p, x, bias = layer(cfg)
    assert p.shared == ()
    assert latent_moe.apply(p, x, cfg, bias=bias).y.shape == x.shape


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 0), ("latent_size", 0), ("expert_size", 0), ("shared_size", -1), ("top_k", 5)],
)
def test_config_names_the_fault(field, value):
    with pytest.raises(ValueError, match=rf"={value}"):
        latent_moe.Config(**{**CFG.__dict__, field: value})
