import pytest
import torch

from k31fn import autodiff, balance, params, random, tree
from k31fn.kernels.histogram import bin_range, required_bias_histogram
from k31fn.layers import latent_moe, mlp, router
from k31fn.segments import from_lengths

EXPERTS, TOP_K = 16, 4


def required_biases(scores, bias):
    cutoff = (scores + bias).sort(1, descending=True).values[:, TOP_K]
    return cutoff, cutoff[:, None] - scores


def histogram(scores, bias, num_bins=1000):
    cutoff, _ = required_biases(scores, bias)
    return required_bias_histogram(
        scores, cutoff, torch.ones(len(scores), dtype=torch.bool), bias, num_bins
    )


def skewed_scores(tokens):
    preference = torch.linspace(-1.5, 1.5, EXPERTS, dtype=torch.float64)
    return torch.sigmoid(preference + torch.randn(tokens, EXPERTS, dtype=torch.float64))


def loads(scores, bias):
    return torch.bincount((scores + bias).topk(TOP_K).indices.flatten(), minlength=EXPERTS).double()


@pytest.mark.parametrize("num_bins", [20, 1000])
@pytest.mark.parametrize("tokens", [37, 1000, 4096])
def test_quantile_is_exact_to_a_bin(tokens, num_bins):
    scores, bias = skewed_scores(tokens), torch.randn(EXPERTS, dtype=torch.float64) * 0.2
    low, width = bin_range(bias[None], num_bins)
    ours = balance._quantile(histogram(scores, bias, num_bins)[None], low, width, top_k=TOP_K)[0]
    # The ceil(q)-th smallest of the required biases of each expert, q = tokens * top_k / experts.
    rank = -(-tokens * TOP_K // EXPERTS)
    exact = required_biases(scores, bias)[1].kthvalue(rank, dim=0).values
    assert (ours - exact).abs().max() <= width.item() * (1 + 1e-12)


def test_quantile_interpolates_inside_the_bin():
    # Expert 0 of 2, top 1, 8 tokens: q = 4; 3 counts lie before the bin with 5, so a fifth of it is
    # needed.
    counts = torch.tensor([[[0, 3, 5, 0], [4, 0, 0, 4]]], dtype=torch.int32)
    ours = balance._quantile(counts, torch.tensor([[-1.0]]), torch.tensor([[0.5]]), top_k=1)
    torch.testing.assert_close(ours, torch.tensor([[-1 + (2 + 1 / 5) * 0.5, -1 + (0 + 1) * 0.5]]))


def test_quantile_counts_beyond_float32():
    counts = torch.zeros(1, 2, 4, dtype=torch.int32)
    counts[..., 0], counts[..., 1] = (
        2**29 + 1,
        2**29 - 1,
    )  # q = 2^29: one count less than the first bin holds
    ours = balance._quantile(counts, torch.zeros(1, 1), torch.ones(1, 1), top_k=1)
    torch.testing.assert_close(ours, torch.ones(1, 2), rtol=0, atol=1e-6)


def test_iterating_balances_a_skewed_router():
    state = balance.init([1], EXPERTS)
    scores = skewed_scores(20_000)
    assert loads(scores, 0).max() / loads(scores, 0).mean() > 2
    for _ in range(8):
        scores = skewed_scores(20_000)  # new tokens in every step
        state = balance.update(state, histogram(scores, state.bias[0].double())[None], top_k=TOP_K)
    load = loads(skewed_scores(20_000), state.bias[0])
    assert load.max() / load.mean() < 1.1
    assert load.min() / load.mean() > 0.9
    torch.testing.assert_close(state.bias.mean(1), torch.zeros(1), rtol=0, atol=1e-6)


def test_a_wrong_statistic_does_not_balance():
    """Biased scores in place of raw ones in the required bias never settle: the loop above
    tells.
    """
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    for _ in range(8):
        scores = skewed_scores(20_000)
        cutoff = (scores + bias).sort(1, descending=True).values[:, TOP_K]
        valid = torch.ones(len(scores), dtype=torch.bool)
        counts = required_bias_histogram(scores + bias, cutoff, valid, bias, 1000)
        bias = balance.update(balance.State(bias[None], (0,)), counts[None], top_k=TOP_K).bias[0]
    load = loads(skewed_scores(20_000), bias)
    assert load.max() / load.mean() > 1.5


def test_micro_batches_are_one_batch():
    state = balance.State(torch.randn(1, EXPERTS) * 0.1, (3,))
    scores = skewed_scores(512)
    bias = state.bias[0].double()
    whole = balance.update(state, histogram(scores, bias)[None], top_k=TOP_K)
    parts = sum(histogram(part, bias) for part in scores.chunk(4))
    assert torch.equal(balance.update(state, parts[None], top_k=TOP_K).bias, whole.bias)


CFG = latent_moe.Config(
    hidden_size=6, latent_size=4, expert_size=5, shared_size=7, num_experts=5, top_k=2
)


def three_layers():
    """A dense layer, an MoE layer without balancing, one with: global layers 0, 1, 2."""
    still = latent_moe.Config(**{**CFG.__dict__, "balanced": False})
    dense = mlp.Config(6, 10)
    specs = (mlp.specs(dense), latent_moe.specs(still), latent_moe.specs(CFG))
    weights = tree.map(lambda w: 25 * w, params.init(specs, random.key(0), dtype=torch.float64))

    def step(weights, x, state, segments=None):
        """One step: value, gradients and the next balance state."""

        def loss(weights):
            h = x + mlp.apply(weights[0], x, dense).y
            counts = []
            for layer, cfg in ((1, still), (2, CFG)):
                out = latent_moe.apply(
                    weights[layer], h, cfg, bias=balance.bias_of(state, layer), segments=segments
                )
                h = h + out.y
                counts.append(out.aux.histogram)
            return h.sin().sum(), torch.stack(counts)

        (value, counts), grads = autodiff.value_and_grad(autodiff.remat(loss), has_aux=True)(
            weights
        )
        return value, grads, balance.update(state, counts, top_k=2)

    return weights, torch.randn(2, 5, 6, dtype=torch.float64), step


def test_the_new_state_is_an_output():  # field cases D24, D25
    weights, x, step = three_layers()
    state = first = balance.init([1, 2], 5)
    for _ in range(3):
        _, _, state = step(weights, x, state)
    assert torch.equal(first.bias, torch.zeros(2, 5)), "the step must not write into its input"
    assert torch.equal(balance.bias_of(state, 1), torch.zeros(5)), (
        "a layer without balancing keeps its bias"
    )
    assert balance.bias_of(state, 2).abs().max() > 1e-3
    assert tree.paths(state) == ["bias"]


def test_a_step_without_tokens_keeps_the_bias():  # field case D16
    weights, x, step = three_layers()
    _, _, state = step(weights, x, balance.init([1, 2], 5))
    value, grads, after = step(weights, x, state, from_lengths([[], []], 5))
    assert torch.equal(after.bias, state.bias)
    assert value.isfinite()
    assert all(g.isfinite().all() for g in tree.leaves(grads))


def test_a_stage_without_moe_layers():  # field case D25
    state = balance.init([], 5)
    after = balance.update(state, torch.zeros(0, 5, 1000, dtype=torch.int32), top_k=2)
    assert after.bias.shape == (0, 5)
    with pytest.raises(ValueError, match=r"layer 3 has no bias; the state holds layers \[\]"):
        balance.bias_of(state, 3)


def test_the_state_survives_a_round_trip_bit_for_bit():
    weights, x, step = three_layers()
    state = balance.init([1, 2], 5)
    for _ in range(2):
        _, _, state = step(weights, x, state)
    rebuilt = tree.unflatten(tree.flatten(state)[1], [leaf.clone() for leaf in tree.leaves(state)])
    assert rebuilt.layers == (1, 2)
    assert torch.equal(step(weights, x, rebuilt)[2].bias, step(weights, x, state)[2].bias)


def test_update_works_under_vmap():
    counts = torch.randint(0, 9, (3, 2, EXPERTS, 50), dtype=torch.int32)
    biases = torch.randn(3, 2, EXPERTS)
    batched = torch.vmap(
        lambda b, h: balance.update(balance.State(b, (0, 1)), h, top_k=TOP_K).bias
    )(biases, counts)
    for i in range(3):
        alone = balance.update(balance.State(biases[i], (0, 1)), counts[i], top_k=TOP_K)
        torch.testing.assert_close(batched[i], alone.bias, rtol=0, atol=1e-6)


def test_wrong_arguments_are_named():
    state = balance.init([0], 5)
    with pytest.raises(ValueError, match="names a layer twice"):
        balance.init([1, 1], 5)
    with pytest.raises(ValueError, match=r"histogram \[2, 5, 10\] for biases \[1, 5\]"):
        balance.update(state, torch.zeros(2, 5, 10, dtype=torch.int32), top_k=2)
    with pytest.raises(ValueError, match=r"top_k=5 must be in 1\.\.4"):
        balance.update(state, torch.zeros(1, 5, 10, dtype=torch.int32), top_k=5)


def test_the_router_feeds_the_update():
    cfg = router.Config(8, EXPERTS, TOP_K)
    p = router.Params(torch.randn(8, EXPERTS))
    x = torch.randn(2, 2048, 8) + 1.0  # an offset makes some experts favourites
    state = balance.init([0], EXPERTS)
    loads = []
    for _ in range(6):
        routing = router.apply(p, x, cfg, bias=balance.bias_of(state, 0))
        loads.append(routing.load)
        state = balance.update(state, routing.histogram[None], top_k=TOP_K)
    assert loads[0].max() / loads[0].double().mean() > 2
    assert loads[-1].max() / loads[-1].double().mean() < 1.1


def test_update_by_sign_equals_a_loop():
    state = balance.State(torch.tensor([[0.5, -0.25, -0.25, 0.0], [1.0, 0.0, -1.0, 0.0]]), (1, 3))
    load = torch.tensor([[9, 3, 2, 2], [0, 0, 0, 0]])  # the mean of the first is 4
    new = balance.update_by_sign(state, load, step=0.25)
    moved = torch.tensor([0.5 - 0.25, -0.25 + 0.25, -0.25 + 0.25, 0.0 + 0.25])
    torch.testing.assert_close(new.bias[0], moved - moved.mean(), rtol=0, atol=1e-7)
    assert torch.equal(new.bias[1], state.bias[1])
    assert new.layers == (1, 3)
    with pytest.raises(ValueError, match=r"load \[1, 4\] for biases \[2, 4\]"):
        balance.update_by_sign(state, load[:1], step=0.25)


def test_update_by_sign_balances_a_skewed_router():
    """To within what a step of the biases moves; with the sign turned round it gets worse."""
    torch.manual_seed(0)
    scores = skewed_scores(4000)
    mean = len(scores) * TOP_K / EXPERTS
    worst = []
    for sign in (1, -1):
        state = balance.init([0], EXPERTS)
        for _ in range(100):
            load = loads(scores, state.bias[0]).long()[None]
            state = balance.update_by_sign(state, sign * load, step=0.01)
        worst.append(float(loads(scores, state.bias[0]).max() / mean))
    before = float(loads(scores, torch.zeros(EXPERTS)).max() / mean)
    assert worst[0] < 1.2 < before < worst[1]
