from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn import autodiff, params, random
from k31fn.kernels.histogram import bin_range
from k31fn.layers import router
from k31fn.segments import from_lengths, whole

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "router.safetensors")
GOLDEN_CFG = router.Config(32, 16, 4)
CFG = router.Config(6, 5, 2)


def golden_routing(weight=None, x=None, bias=None):
    p = router.Params(GOLDEN["weight"].T if weight is None else weight)
    x = GOLDEN["x"] if x is None else x
    bias = GOLDEN["e_score_correction_bias"] if bias is None else bias
    return router.apply(p, x[None], GOLDEN_CFG, bias=bias)


def tokens(scale=1.0, dtype=torch.float64):
    p = params.init(router.specs(CFG), random.key(0), dtype=dtype)
    return (
        router.Params(p.weight * 50 * scale),
        torch.randn(2, 5, 6, dtype=dtype),
        torch.randn(5, dtype=dtype) * 0.1,
    )


def dense(routing, num_experts):
    """Weights as ``[tokens, experts]``, whatever the order of the choices."""
    flat = routing.topk_idx.flatten(0, 1)
    return torch.zeros(flat.shape[0], num_experts, dtype=routing.weights.dtype).scatter(
        1, flat, routing.weights[0]
    )


def golden_dense():
    return torch.zeros(64, 16).scatter(1, GOLDEN["indices"].long(), GOLDEN["weights"])


def test_sets_and_weights_equal_golden():
    routing = golden_routing()
    assert torch.equal(
        routing.topk_idx[0].sort(-1).values, GOLDEN["indices"].long().sort(-1).values
    )
    torch.testing.assert_close(dense(routing, 16), golden_dense(), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        torch.sigmoid(GOLDEN["x"] @ GOLDEN["weight"].T), GOLDEN["scores"], rtol=0, atol=1e-6
    )  # the golden scores are those before the bias


def test_gradients_equal_golden():
    upstream = torch.zeros(64, 16).scatter(1, GOLDEN["indices"].long(), GOLDEN["upstream"])

    def loss(weight, x):
        return (dense(golden_routing(weight, x), 16) * upstream).sum()

    of_weight, of_x = torch.func.grad(loss, argnums=(0, 1))(GOLDEN["weight"].T, GOLDEN["x"])
    for ours, golden in ((of_weight.T, GOLDEN["grad.weight"]), (of_x, GOLDEN["grad.x"])):
        assert ((ours - golden).norm() / golden.norm()).item() < 1e-5


def test_golden_catches_a_bias_that_leaks_into_the_weights():
    chosen = (GOLDEN["scores"] + GOLDEN["e_score_correction_bias"]).gather(
        1, GOLDEN["indices"].long()
    )
    leaked = chosen / chosen.sum(-1, keepdim=True)
    assert (leaked - GOLDEN["weights"]).abs().max() > 1e-2


def test_golden_catches_a_missing_renormalisation():
    # The latent norm hides it from the layer's output, so the weights themselves are checked.
    raw = GOLDEN["scores"].gather(1, GOLDEN["indices"].long())
    assert (raw - GOLDEN["weights"]).abs().max() > 0.1
    sums = golden_routing().weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)


def test_the_bias_chooses_and_never_weighs():
    assert (
        golden_routing(bias=torch.zeros(16)).topk_idx.sort(-1).values
        != golden_routing().topk_idx.sort(-1).values
    ).any()
    shifted = golden_routing(
        bias=GOLDEN["e_score_correction_bias"] + 5
    )  # the same for all: same choice, same weights
    torch.testing.assert_close(shifted.weights, golden_routing().weights, rtol=0, atol=0)
    p, x, bias = tokens()
    gradient = torch.func.grad(lambda b: router.apply(p, x, CFG, bias=b).weights.sin().sum())(bias)
    assert torch.equal(gradient, torch.zeros(5, dtype=torch.float64))


def test_scale_and_float32_scores():
    p, x, bias = tokens(dtype=torch.float32)
    routing = router.apply(p, x, router.Config(6, 5, 2, scale=2.5), bias=bias)
    torch.testing.assert_close(routing.weights.sum(-1), torch.full((2, 5), 2.5))
    low = router.apply(router.Params(p.weight.bfloat16()), x.bfloat16(), CFG, bias=bias)
    assert low.weights.dtype == torch.float32
    wide = router.apply(
        router.Params(p.weight.bfloat16().double()), x.bfloat16().double(), CFG, bias=bias
    )
    assert torch.equal(low.topk_idx, wide.topk_idx)
    torch.testing.assert_close(low.weights.double(), wide.weights, rtol=0, atol=1e-6)


def test_exact_ties_go_to_the_lowest_expert():
    _, x, _ = tokens()
    p = router.Params(torch.zeros(6, 5, dtype=torch.float64))
    routing = router.apply(p, x, CFG, bias=torch.tensor([0.0, 0, 1, 0, 0]))
    assert torch.equal(routing.topk_idx, torch.tensor([2, 0]).expand(2, 5, 2))
    torch.testing.assert_close(routing.weights, torch.full((2, 5, 2), 0.5, dtype=torch.float64))


def test_counts_leave_out_padding():
    p, x, bias = tokens()
    segments = from_lengths([[3, 1], [2]], 5)
    routing = router.apply(p, x, CFG, bias=bias, segments=segments)
    full = router.apply(p, x, CFG, bias=bias)
    real = segments.ids > 0
    assert (
        routing.load.tolist() == torch.bincount(full.topk_idx[real].flatten(), minlength=5).tolist()
    )
    assert routing.histogram.sum(1).tolist() == [6] * 5
    assert torch.equal(routing.topk_idx[real], full.topk_idx[real])
    assert torch.equal(routing.weights[real], full.weights[real])
    assert torch.equal(routing.weights[~real], torch.zeros_like(routing.weights[~real]))
    padding = routing.topk_idx[~real].sort(-1).values
    assert ((padding >= 0) & (padding < 5)).all()
    assert (padding[:, 1:] > padding[:, :-1]).all()  # still different experts
    assert torch.equal(full.load, router.apply(p, x, CFG, bias=bias, segments=whole(2, 5)).load)


def test_histogram_holds_the_required_biases():
    p, x, bias = tokens()
    routing = router.apply(p, x, CFG, bias=bias)
    scores = torch.sigmoid(x @ p.weight).flatten(0, 1)
    cutoff = (scores + bias).sort(1, descending=True).values[:, 2]  # the third best of a top 2
    low, width = bin_range(bias, 1000)
    expected = torch.zeros(5, 1000, dtype=torch.int32)
    for token in range(10):
        for expert in range(5):
            expected[expert, int((cutoff[token] - scores[token, expert] - low) / width)] += 1
    assert torch.equal(routing.histogram, expected)
    # A token takes an expert exactly when the required bias lies below the expert's own.
    below = (cutoff[:, None] - scores) < bias - 1e-12  # for the next best expert the two are equal
    assert below.sum(0).tolist() == routing.load.tolist()


def test_without_balancing_nothing_is_counted():
    p, x, bias = tokens()
    routing = router.apply(p, x, router.Config(6, 5, 2, balanced=False), bias=bias)
    assert routing.histogram.shape == (5, 1000)
    assert routing.histogram.sum() == 0
    assert torch.equal(routing.load, router.apply(p, x, CFG, bias=bias).load)


@pytest.mark.parametrize("remat", [False, True])
def test_counts_once_with_recomputation(remat):  # field case D23
    p, x, bias = tokens()

    def loss(p, x):
        routing = router.apply(p, x, CFG, bias=bias)
        return routing.weights.sin().sum(), (routing.load, routing.histogram)

    (_, (load, histogram)), _ = autodiff.value_and_grad(
        autodiff.remat(loss) if remat else loss, has_aux=True
    )(p, x)
    assert load.sum() == 10 * 2
    assert histogram.sum(1).tolist() == [10] * 5


def test_ties_are_decided_once_under_recomputation(monkeypatch):  # field case D26
    _, x, bias = tokens()
    p = router.Params(torch.zeros(6, 5, dtype=torch.float64))  # every score is one half
    calls = []

    def another_choice_each_time(scores, bias, valid, top_k):
        del bias, valid
        calls.append(top_k)
        ranked = (torch.arange(top_k + 1) + 2 * len(calls)) % 5
        ranked = ranked.expand(*scores.shape[:-1], -1)
        return ranked[..., :-1], ranked[..., -1:].clone()

    monkeypatch.setattr(router, "choose_experts", another_choice_each_time)
    x = x + torch.arange(5.0)[None, :, None]  # so that the gradient tells the choices apart

    def loss(p):
        routing = router.apply(p, x, CFG, bias=bias)
        return (routing.weights * torch.tensor([1.0, 3.0])).sum(), routing.topk_idx

    (_, idx), grads = autodiff.value_and_grad(autodiff.remat(loss), has_aux=True)(p)
    assert calls == [2], "the replay must not choose again"
    calls.clear()
    (_, plain_idx), plain = autodiff.value_and_grad(loss, has_aux=True)(p)
    assert torch.equal(idx, plain_idx)
    torch.testing.assert_close(grads.weight, plain.weight, rtol=0, atol=0)
    assert set(grads.weight.abs().sum(0).nonzero().flatten().tolist()) == set(idx[0, 0].tolist())


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_micro_batches_add_up(cuts):  # field case D15
    p, x, bias = tokens()
    x = torch.cat([x, 2 * x])
    segments = from_lengths([[5], [3, 1], [2], [1, 1, 1, 1, 1]], 5)

    def run(rows):
        part = type(segments)(segments.ids[rows], segments.position[rows])

        def loss(p):
            routing = router.apply(p, x[rows], CFG, bias=bias, segments=part)
            return routing.weights.sin().sum() / 15, (
                routing.load,
                routing.histogram,
            )  # 15 real tokens in all

        return autodiff.value_and_grad(loss, has_aux=True)(p)

    (value, counts), grads = run(torch.arange(4))
    parts = [run(rows) for rows in torch.arange(4).chunk(cuts)]
    torch.testing.assert_close(sum(part[0][0] for part in parts), value, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        sum(part[1].weight for part in parts), grads.weight, rtol=1e-12, atol=1e-14
    )
    for i in range(2):
        assert torch.equal(sum(part[0][1][i] for part in parts), counts[i])


def test_a_non_finite_token_stays_an_answer():
    p, x, bias = tokens()
    x = x.clone()
    x[0, 1] = float("nan")
    routing = router.apply(p, x, CFG, bias=bias)
    assert ((routing.topk_idx >= 0) & (routing.topk_idx < 5)).all()
    assert routing.weights[0, 1].isnan().all()
    assert routing.weights[0, 0].isfinite().all()


@pytest.mark.parametrize("top_k", [0, 5, 6])
def test_config_refuses_a_top_k_without_a_next_best(top_k):
    with pytest.raises(ValueError, match=rf"router\.Config\.top_k={top_k}.*num_experts=5"):
        router.Config(6, 5, top_k)


def test_weights_where_all_scores_vanish():
    """The guard of the released code is then as large as the scores: they do not sum to 1."""
    x = torch.ones(1, 1, 6, dtype=torch.float64)
    bias = torch.zeros(5, dtype=torch.float64)
    for logit, total in ((-30.0, 1.0), (-40.0, 0.9988), (-44.0, 0.9396), (-50.0, 0.0371)):
        p = router.Params(torch.full((6, 5), logit / 6, dtype=torch.float64))
        routing = router.apply(p, x, router.Config(6, 5, 2), bias=bias)
        assert float(routing.weights.sum()) == pytest.approx(total, abs=5e-5)
