"""A hybrid model from k31fn's layers and one layer of your own, and a few gradient steps.

Run: ``python examples/compose.py``
"""

from typing import Any

import torch
from torch import Tensor

from k31fn import autodiff, params, random, segments, tree
from k31fn.layers import dsa, embedding, indexer, kda, losses, mla, mlp
from k31fn.layers.linear import linear
from k31fn.params import Normal, ParamSpec

D, Z = 32, 64  # hidden size, vocabulary

KDA = kda.Config(D, num_heads=2, head_dim=16)
MLA = mla.Config(
    D, 2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
)
DSA = dsa.Config(MLA, indexer.Config(D, q_lora_rank=16, num_heads=2, head_dim=8), topk=8)
MLP = mlp.Config(D, intermediate_size=64)
EMBEDDING = embedding.Config(Z, D)


def shift_specs() -> dict[str, ParamSpec]:
    """Your own layer needs no class: declare its weights once, as any pytree."""
    return {
        "w_now": ParamSpec((D, D), ("hidden", ""), Normal(0.1)),
        "w_before": ParamSpec((D, D), ("hidden", ""), Normal(0.1)),
    }


def shift(p: dict[str, Tensor], x: Tensor, packing: segments.Segments) -> Tensor:
    """Mixes each token with the one before it, inside its document."""
    before = torch.where(segments.document_start(packing)[..., None], 0.0, x.roll(1, dims=1))
    return torch.tanh(linear(x, p["w_now"]) + linear(before, p["w_before"]))


SPECS = {
    "embedding": embedding.specs(EMBEDDING),
    "shift": shift_specs(),
    "kda": kda.specs(KDA),
    "dsa": dsa.specs(DSA),
    "mlp": mlp.specs(MLP),
    "head": ParamSpec((D, Z), ("hidden", "vocab"), Normal(D**-0.5)),
}


def loss(p: dict[str, Any], tokens: Tensor, packing: segments.Segments) -> Tensor:
    """Mean next-token cross-entropy, plus the indexer's KL so that it learns too."""
    x = embedding.apply(p["embedding"], tokens, EMBEDDING)
    x = x + shift(p["shift"], x, packing)
    x = x + kda.apply(p["kda"], x, KDA, segments=packing).y
    sparse = dsa.apply(p["dsa"], x, DSA, segments=packing)
    x = x + sparse.y
    x = x + mlp.apply(p["mlp"], x, MLP).y
    labels = segments.next_token_labels(tokens, packing)
    lm = losses.linear_cross_entropy(x, p["head"], labels)
    return losses.mean(lm.total, lm.num_tokens) + losses.mean(
        sparse.aux.kl, segments.valid(packing).sum()
    )


def main(steps: int = 20) -> list[float]:
    """Trains on one packed batch; returns the losses."""
    p = params.init(SPECS, random.key(0), dtype=torch.float32)
    tokens = (torch.arange(2 * 48) ** 2 % 61).reshape(2, 48)
    packing = segments.from_lengths(
        [[30, 18], [10, 33]], 48
    )  # two documents per row, the second row padded
    step = autodiff.value_and_grad(loss)
    history = []
    for _ in range(steps):
        value, grads = step(p, tokens, packing)
        p = tree.map(lambda w, g: w - 0.3 * g, p, grads)
        history.append(float(value))
    return history


if __name__ == "__main__":
    losses_seen = main()
    print(f"loss {losses_seen[0]:.3f} -> {losses_seen[-1]:.3f}")
