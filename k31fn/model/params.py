"""The model's parameters and the state that is not learnt by gradient."""

from __future__ import annotations

from typing import Any, Generic

import torch

from k31fn import balance as quantile
from k31fn import tree
from k31fn.layers import block, embedding, kinds, mtp, norm, projector, vision
from k31fn.model.config import (
    Config,
    embedding_config,
    experts,
    final_norm_config,
    layer_configs,
    moe_layers,
    mtp_config,
)
from k31fn.parallel.fsdp.placement import Placements, gather
from k31fn.params import ParamSpec, TruncatedNormal
from k31fn.typing import Leaf, Tensor

__all__ = ["Params", "init_balance", "specs", "whole"]


@tree.dataclass
class Params(Generic[Leaf]):
    """Parameters of the model, or of a pipeline stage.

    A stage has ``()`` for each part that is another's. ``layers`` always has an entry per decoder
    layer of the whole model, so that the paths of the leaves do not depend on the stage. ``mtp`` is
    ``()`` without such a layer; ``vision`` and ``projector`` are it in a model of text alone.
    """

    embedding: Any
    layers: tuple[Any, ...]
    final_mix: Any
    final_norm: Any
    head: Any
    mtp: Any
    vision: Any = ()
    projector: Any = ()


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares every parameter of the model.

    The head is truncated N(0, 1/D), as in the released training code.
    """
    # One declaration for all: initial values, placements, optimiser groups and checkpoints follow.
    scheme = kinds.residual_of(cfg.residual)
    return Params(
        embedding=embedding.specs(embedding_config(cfg)),
        layers=tuple(block.specs(layer) for layer in layer_configs(cfg)),
        final_mix=scheme.specs_out(cfg.residual, cfg.hidden_size),
        final_norm=norm.specs(final_norm_config(cfg)),
        head=ParamSpec(
            (cfg.hidden_size, cfg.vocab_size),
            ("hidden", "vocab"),
            TruncatedNormal(
                cfg.hidden_size**-0.5
            ),  # no "matrix" tag: Muon leaves the head to AdamW
        ),
        mtp=mtp.specs(mtp_config(cfg)) if cfg.num_mtp_layers else (),
        vision=() if isinstance(cfg.vision, tuple) else vision.specs(cfg.vision),
        projector=() if isinstance(cfg.projector, tuple) else projector.specs(cfg.projector),
    )


def init_balance(cfg: Config, *, device: torch.device | str | None = None) -> quantile.State:
    """The routers' biases before the first step: zero."""
    # They are no parameters: no gradient reaches them, and the optimiser must not see them.
    return quantile.init(moe_layers(cfg), experts(cfg).num_experts, device=device)


def whole(params: Params[Tensor], part: str, placements: Placements = ()) -> Any:
    """A part of the parameters as a layer uses it: gathered over the data axes, where
    ``placements`` are given.
    """
    weights = getattr(params, part)
    # Without placements there is no data axis to gather over: tests and samplers hold all of it.
    return gather(weights, getattr(placements, part)) if placements else weights
