"""Floating-point operations that the model needs for a token, from its specs: what MFU is measured
by.

A product of ``[m, k]`` and ``[k, n]`` has 2 m k n. Counted are, forward:

* the matrices that a token meets, 2 each parameter: all but the embedding (a row is looked up), the
  routed experts that it is not sent to, and the vision tower with its projector, which see images;
* what a token mixer does with other tokens, which its kind says (:class:`k31fn.layers.kind.Flops`):
  attention ``2 H (K + V)`` for each key of a query, K with and V without the 64 extra dims; Gated
  DSA's indexer ``2 H_I K_I`` for each visible key; KDA 6 K V per head.

Rows are taken for one document each, whose queries see half of it on average. A backward has twice
the forward: one product for the input and one for the weight. What is recomputed does not count,
nor do norms, softmax and optimiser.
"""

from __future__ import annotations

from typing import Literal

from k31fn import tree
from k31fn.layers import kinds
from k31fn.layers.kind import Flops
from k31fn.model.config import Config, experts
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
    matrices = _matrices(cfg)
    mixers = _of_mixers(cfg, length)
    forward = sum(matrices.values()) + mixers.mixing + mixers.indexer
    if trained == "nothing":
        return forward
    if trained == "indexer":
        # The trunk has no backward: the indexers' inputs are detached from it.
        return forward + 2 * (matrices.get("indexer", 0.0) + mixers.indexer)
    if trained == "adapters":
        # A product of the base has a gradient for its input and none for its weight; what mixers do
        # besides products with weights has both.
        return 2 * forward + mixers.mixing + mixers.indexer
    return 3 * forward


def _matrices(cfg: Config) -> dict[str, float]:
    """Forward operations of the weights of each part."""
    part_of = find_part(cfg)
    flops: dict[str, float] = {}
    for path, spec in tree.flatten_with_paths(specs(cfg)):
        part = part_of(path)
        # The tag is the optimiser's, for weights that multiply; the head does so without it. Norms
        # and biases are left out, as the field does.
        if part in _NOT_OF_TOKENS or not ("matrix" in spec.tags or path.startswith("head")):
            continue
        flops[part] = flops.get(part, 0.0) + 2.0 * spec.numel * _share(spec, cfg)
    return flops


def _share(spec: ParamSpec, cfg: Config) -> float:
    """Of a weight, what a token meets."""
    chosen = experts(cfg)
    return chosen.top_k / chosen.num_experts if "expert" in spec.tags else 1.0


def _of_mixers(cfg: Config, length: int) -> Flops:
    """What the token mixers do besides their products with weights."""
    mixers = [mixer for mixer, _ in cfg.layers]
    if cfg.mtp:
        mixers.append(cfg.mtp[0])
    # Attention's operations are not in the specs: they depend on the length, so the kind says them.
    mixing = indexer = 0.0
    for name in mixers:
        config = cfg.sublayers[name]
        flops = kinds.token_mixer_of(config).flops(config, length)
        mixing += flops.mixing
        indexer += flops.indexer
    return Flops(mixing, indexer)
