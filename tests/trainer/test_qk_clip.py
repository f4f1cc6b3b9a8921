"""QK-Clip: logits are scaled by what is said, on every mesh, and a run stays below its bound."""

import dataclasses

import pytest
import torch

from k31fn import config, trainer, tree
from k31fn.layers import dsa, mla
from k31fn.parallel import Mesh
from k31fn.testing import assert_close_trees
from k31fn.trainer.layout import lay_out
from k31fn.trainer.qk_clip import clip_logits
from tests import small
from tests.trainer import meshes

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")
TAU = 0.005  # the largest logits at the initial values are about 0.012


@pytest.fixture(scope="module")
def recipe(text):
    """With one layer of DSA."""
    made = meshes.recipe(text, compute="float64")
    return dataclasses.replace(made, optimizer=config.Optimizer(qk_clip=TAU, warmup_steps=0))


def attention(state):
    return state.params.layers[1].attn.attn


def by_hand(p, x, cfg):
    """Largest logit of each head of one document per row, from the definition."""
    H, N, P, R = cfg.num_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.kv_lora_rank

    def norm(v, w):
        return v * (v.square().mean(-1, keepdim=True) + cfg.latent_norm_eps).rsqrt() * w

    q = (norm(x @ p.w_qa, p.q_norm) @ p.w_qb).unflatten(-1, (H, N + P))
    c, kr = (x @ p.w_kva).split([R, P], dim=-1)
    k = (norm(c, p.kv_norm) @ p.w_kvb).unflatten(-1, (H, -1))[..., :N]
    k = torch.cat([k, kr[:, :, None].expand(*k.shape[:3], P)], dim=-1)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * (N + P) ** -0.5
    T = x.shape[1]
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).amax((0, 2, 3))


def test_a_head_is_scaled_by_what_it_exceeds(recipe):
    """The logits of each head by its own factor, and those of heads below the bound not at all, bit
    for bit.
    """
    cfg = dataclasses.replace(recipe.model.sublayers["full_attention"].attn, report_logits=True)
    state = trainer.init_state(trainer.lay_out(recipe), CPU)
    x = torch.randn(2, 10, cfg.hidden_size, dtype=torch.float64)
    before = by_hand(attention(state), x, cfg)
    torch.testing.assert_close(
        mla.apply(attention(state), x, cfg).aux.logits, before, rtol=1e-10, atol=0
    )
    tau = float(before.median())  # some above, some below
    of_tau = dataclasses.replace(
        recipe, optimizer=dataclasses.replace(recipe.optimizer, qk_clip=tau)
    )
    old = tree.map(torch.clone, attention(state))
    layout = lay_out(of_tau, Mesh().axes())
    clip_logits(layout, state.params, state.opt_state, before[None], torch.tensor(False))
    after = by_hand(attention(state), x, cfg)
    torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-10, atol=0)
    assert (before > tau).any()
    heads = cfg.num_heads
    for name in ("w_qb", "w_kvb"):
        new, was = (getattr(p, name).unflatten(-1, (heads, -1)) for p in (attention(state), old))
        for head in range(heads):
            assert torch.equal(new[:, head], was[:, head]) == bool(before[head] <= tau)
    N = cfg.qk_nope_head_dim
    values = [p.w_kvb.unflatten(-1, (heads, -1))[..., N:] for p in (attention(state), old)]
    assert torch.equal(*values)
    kept = tree.map(torch.clone, state.params)
    clip_logits(layout, state.params, state.opt_state, before[None], torch.tensor(True))
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(state.params), strict=True)
    )


@pytest.mark.parametrize(
    ("mesh", "micro_batches"),
    [
        (Mesh(tp=2), 2),
        pytest.param(Mesh(), 2, marks=pytest.mark.slow),
        pytest.param(Mesh(fsdp=2), 1, marks=pytest.mark.slow),
        pytest.param(Mesh(cp=2), 2, marks=pytest.mark.slow),
        pytest.param(Mesh(pp=2, tp=2), 2, marks=pytest.mark.slow),
        pytest.param(Mesh(dp=2), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_steps_on_a_mesh(recipe, mesh, micro_batches):
    expected, state = meshes.on_one_device(recipe, 3)
    plain = dataclasses.replace(
        recipe, optimizer=dataclasses.replace(recipe.optimizer, qk_clip=0.0)
    )
    _, without = meshes.on_one_device(plain, 3)
    assert not torch.allclose(attention(state).w_qb, attention(without).w_qb)
    made = dataclasses.replace(recipe, mesh=mesh, micro_batches=micro_batches)
    metrics, _, whole = meshes.on_threads(made, 3)
    torch.testing.assert_close(metrics[0], expected, rtol=1e-9, atol=1e-11)
    assert_close_trees(whole, state, rtol=1e-9, atol=1e-11)


def largest_logits(recipe, tau, lr, batches):
    """Of each step, on the rows of these numbers."""
    made = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, qk_clip=tau))
    state, step = (
        trainer.init_state(trainer.lay_out(made), CPU),
        trainer.make_step(trainer.lay_out(made)),
    )
    dataset, found = trainer.load_corpus(made).dataset, []
    for i in batches:
        state, numbers = step(
            state, trainer.make_batches(made, trainer.rows_at(dataset, i), CPU), lr
        )
        found.append(float(numbers.max_logit))
    return found


def test_the_next_step_has_the_bound(recipe):
    """On the same rows, if the optimiser changes nothing."""
    first, second, third = largest_logits(recipe, TAU, 0.0, [0, 0, 0])
    assert first > 2 * TAU
    assert second == pytest.approx(TAU, rel=1e-9)
    assert third == pytest.approx(TAU, rel=1e-9)


def test_a_run_stays_below_the_bound(recipe):
    """Logits that would double it; what a step adds is seen, and taken away, by the next one."""
    tau, steps = 0.02, range(14)
    unbounded, bounded = (largest_logits(recipe, bound, 0.02, steps) for bound in (1e9, tau))
    assert unbounded[-1] > 2 * tau
    assert max(bounded) < 1.4 * tau
    reached = next(i for i, m in enumerate(unbounded) if m > tau)
    assert bounded[: reached + 1] == pytest.approx(
        unbounded[: reached + 1], rel=1e-12
    )  # until then it does nothing


def test_what_is_frozen_is_not_scaled(recipe):
    """While only the indexer learns."""
    full = dataclasses.replace(recipe.model.sublayers["full_attention"], stage="dense_warmup")
    frozen = dataclasses.replace(recipe, model=small.replace(recipe.model, full_attention=full))
    frozen = dataclasses.replace(frozen, trainable="indexer")
    before = tree.map(torch.clone, attention(trainer.init_state(trainer.lay_out(frozen), CPU)))
    metrics, state = meshes.on_one_device(frozen, 1)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves(before), tree.leaves(attention(state)), strict=True)
    )
    assert metrics[0, list(trainer.Metrics._fields).index("max_logit")] == 0


def test_all_visible_keys_count_where_the_attention_is_dense(recipe):
    """In the warm-up of the indexer with the trunk trained as well: the logits of a layer of
    MLA.
    """
    cfg = recipe.model.sublayers["full_attention"]
    dense = dataclasses.replace(
        cfg, attn=dataclasses.replace(cfg.attn, report_logits=True), stage="dense_warmup"
    )
    params = trainer.init_state(trainer.lay_out(recipe), CPU).params.layers[1].attn
    x = torch.randn(2, 12, cfg.hidden_size, dtype=torch.float64)
    got = dsa.apply(params, x, dense).aux.logits
    torch.testing.assert_close(got, by_hand(params.attn, x, cfg.attn), rtol=1e-10, atol=0)
