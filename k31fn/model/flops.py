"""Floating-point operations that the model needs for a token, from its specs: what MFU is measured
by.

A product of ``[m, k]`` and ``[k, n]`` has 2 m k n. Counted are, forward:

* the matrices that a token meets, 2 each parameter: all but the embedding (a row is looked up), the
  routed experts that it is not sent to, and the vision tower with its projector, which see images;
* full attention, of a query: ``2 H (K + V)`` for each key that it attends to, K with and V without
  the 64 extra dims;
* Gated DSA's indexer: ``2 H_I K_I`` for each key that is visible;
* KDA: 6 K V per head: what the recurrence needs to take a token out of the state, to add it and to
  read.

Rows are taken for one document each, whose queries see half of it on average. A backward has twice
the forward: one product for the input and one for the weight. What is recomputed does not count,
nor do norms, softmax and optimiser.
"""

from __future__ import annotations

from typing import Literal

from k31fn import tree
from k31fn.layers import dsa, kda, mla
from k31fn.model.config import Config, layer_configs
from k31fn.model.params import specs
from k31fn.model.parts import find_part
from k31fn.params import ParamSpec

__all__ = ["flops_per_token"]

_NOT_OF_TOKENS = ("embedding", "vision tower", "projector")


def flops_per_token(
    cfg: Config, length: int, trained: Literal["nothing", "indexer", "adapters", "all"]
) -> float:
    """Of a training step on rows of ``length`` tokens, averaged over a row.

    Args:
        cfg: the model.
        length: tokens of a row.
        trained: ``nothing``: the forward alone; ``indexer``: its backward alone follows;
            ``adapters``: a backward without the weights' products (adapters themselves are not
            counted); ``all``.
    """
    matrices, attention, index = _matrices(cfg), _attention(cfg, length), _index(cfg, length)
    forward = sum(matrices.values()) + attention + index
    if trained == "nothing":
        return forward
    if trained == "indexer":
        return forward + 2 * (matrices.get("indexer", 0.0) + index)
    return 2 * forward + attention + index if trained == "adapters" else 3 * forward


def _matrices(cfg: Config) -> dict[str, float]:
    """Forward operations of the weights of each part."""
    part, found = find_part(cfg), dict[str, float]()
    for path, spec in tree.flatten_with_paths(specs(cfg)):
        if "matrix" in spec.tags or path.startswith("head"):
            found[part(path)] = found.get(part(path), 0.0) + 2.0 * spec.numel * _share(spec, cfg)
    return {name: count for name, count in found.items() if name not in _NOT_OF_TOKENS}


def _share(spec: ParamSpec, cfg: Config) -> float:
    """Of a weight, what a token meets."""
    return cfg.moe.top_k / cfg.moe.num_experts if "expert" in spec.tags else 1.0


def _attention(cfg: Config, length: int) -> float:
    total = 0.0
    kinds = [layer.attention for layer in layer_configs(cfg)]
    for layer in [*kinds, *([cfg.full_attention] if cfg.num_mtp_layers else [])]:
        if isinstance(layer, kda.Config):
            total += 6.0 * layer.num_heads * layer.head_dim**2
            continue
        sparse = isinstance(layer, dsa.Config) and layer.stage == "sparse"
        heads: mla.Config = layer.attn if isinstance(layer, dsa.Config) else layer
        width = heads.qk_nope_head_dim + heads.qk_rope_head_dim + heads.v_head_dim
        total += 2.0 * heads.num_heads * width * _keys(length, layer.topk if sparse else length)
    return total


def _index(cfg: Config, length: int) -> float:
    full = cfg.full_attention
    if not isinstance(full, dsa.Config):
        return 0.0
    layers = len(cfg.full_attention_layers) + cfg.num_mtp_layers
    return layers * 2.0 * full.indexer.num_heads * full.indexer.head_dim * _keys(length, length)


def _keys(length: int, most: int) -> float:
    """The mean over queries t = 1 .. length of min(t, most)."""
    most = min(most, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length
