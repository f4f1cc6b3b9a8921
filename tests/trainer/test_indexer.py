"""A dense warm-up of the indexer, as it is done when sparse attention is added to a trained
model.
"""

import dataclasses

import pytest
import torch

from k31fn import config, data, model, optim, trainer, tree
from k31fn.kernels.indexer import index_topk
from k31fn.kernels.sparse_attention import sparse_attention
from k31fn.kernels.tiling import visible_keys
from k31fn.layers import attn_res, dsa, indexer, kda, latent_moe, mla, mlp
from tests import small
from tests.trainer import runs

CPU = torch.device("cpu")
D = 48


def make_recipe(**changes):
    attention = mla.Config(
        D,
        2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    cfg = model.Config(
        vocab_size=257,
        hidden_size=D,
        sublayers=model.Sublayers(
            kda=kda.Config(D, 2, head_dim=16),
            full_attention=dsa.Config(
                attention, indexer.Config(D, 32, num_heads=4, head_dim=16), topk=16
            ),
            dense=mlp.Config(D, 96),
            moe=latent_moe.Config(
                D, latent_size=32, expert_size=32, shared_size=64, num_experts=4, top_k=1
            ),
        ),
        layers=small.k3_layers(2, (1,)),
        residual=attn_res.Config(block_size=2),
    )
    return config.Recipe(
        name="indexer",
        model=cfg,
        data=data.Config(path=str(runs.REPOSITORY / "k31fn"), heldout_fraction=0.2),
        optimizer=config.Optimizer(kind="muon", peak_lr=0.01, warmup_steps=10),
        batch_size=8,
        length=128,
        eval_bytes=6000,
        **changes,
    )


def train(recipe, corpus, state, num_steps):
    """The state after the steps, and the indexer's KL at each."""
    step, o, kl = trainer.make_step(trainer.lay_out(recipe)), recipe.optimizer, []
    for i in range(num_steps):
        lr = optim.warmup_cosine(
            i, peak=o.peak_lr, num_steps=num_steps, warmup_steps=o.warmup_steps
        )
        state, numbers = step(
            state, trainer.make_batches(recipe, corpus.dataset.batch_at(i), CPU), lr
        )
        kl.append(float(numbers.indexer_kl))
    return state, kl


def teacher_mass(recipe, corpus, state, monkeypatch):
    """The share of the attention's probability that lies on the indexer's top-k, and on the best k
    keys.

    Over the held-out queries that see more than twice as many keys as the top-k.
    """
    found, attend = [], dsa._attend_to_all

    def spy(heads, index, start, stop, cfg, sh):
        seen = visible_keys(start[..., None], stop[..., None], index.k.shape[1])
        everything = torch.where(seen, torch.arange(index.k.shape[1]), -1)
        teacher = sparse_attention(*heads, everything, cfg.attn.scale)[1] / cfg.attn.num_heads
        chosen = index_topk(
            index.q, index.k, index.w, start, stop, topk=cfg.topk, scale=cfg.indexer.scale
        )
        mass = torch.where(chosen >= 0, teacher.gather(-1, chosen.clamp(min=0)), 0).sum(-1)
        many = seen.sum(-1) > 2 * cfg.topk
        found.append(torch.stack([mass[many], teacher.topk(cfg.topk).values.sum(-1)[many]]))
        return attend(heads, index, start, stop, cfg, sh)

    with monkeypatch.context() as patch:
        patch.setattr(dsa, "_attend_to_all", spy)
        trainer.heldout_loss(trainer.lay_out(recipe), state, corpus.some)
    return torch.cat(found, dim=1).mean(1).tolist()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("unchecked")
def test_the_indexer_learns_what_attention_looks_at(monkeypatch):
    recipe = make_recipe()
    corpus = trainer.load_corpus(recipe)
    trunk, _ = train(recipe, corpus, trainer.init_state(trainer.lay_out(recipe), CPU), 120)
    full = dataclasses.replace(recipe.model.sublayers["full_attention"], stage="dense_warmup")
    warm = dataclasses.replace(
        recipe, model=small.replace(recipe.model, full_attention=full), trainable="indexer"
    )
    fresh = trainer.init_state(trainer.lay_out(warm), CPU)
    pairs = zip(tree.flatten_with_paths(fresh.params), tree.leaves(trunk.params), strict=True)
    leaves = [new if ".indexer." in path else trained for (path, new), trained in pairs]
    start = dataclasses.replace(
        fresh, params=tree.unflatten(tree.flatten(fresh.params)[1], leaves), balance=trunk.balance
    )
    before, best = teacher_mass(warm, corpus, start, monkeypatch)
    state, kl = train(warm, corpus, start, 300)
    after, _ = teacher_mass(warm, corpus, state, monkeypatch)
    print(
        f"KL {kl[0]:.4f} -> {sum(kl[-20:]) / 20:.4f}; mass {before:.3f} -> {after:.3f}, at most "
        f"{best:.3f}"
    )
    assert sum(kl[-20:]) / 20 < kl[0] / 2
    assert after > before + (best - before) / 2
