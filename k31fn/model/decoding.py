"""Decoding: the logits of the next tokens, and the state that carries what came before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import balance as quantile
from k31fn import tree
from k31fn.layers import block
from k31fn.layers.patches import Images
from k31fn.model.config import Config, layer_configs
from k31fn.model.forward import check_layers, finish, logits, start
from k31fn.model.layers import bias_of
from k31fn.model.params import Params
from k31fn.typing import Float, Int

__all__ = ["State", "extend", "init_state"]


@tree.dataclass
class State:
    """Decoding state: one per layer."""

    layers: tuple[Any, ...]


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before the first token of ``batch`` documents."""
    # An MTP layer has none: it predicts for training, and decoding does not run it.
    states = [
        block.init_state(layer, batch, dtype=dtype, device=device) for layer in layer_configs(cfg)
    ]
    return State(tuple(states))


def extend(
    params: Params[Tensor],
    tokens: Int[Tensor, "B T"],
    cfg: Config,
    state: State,
    *,
    balance: quantile.State,
    images: Images | tuple[()] = (),
) -> tuple[Float[Tensor, "B T Z"], State]:
    """Logits of the next ``T`` tokens of one document per row, and the new state: prefill and
    decoding alike.

    Cutting a document anywhere gives the values of the whole. One device: there is no sharding.
    ``images`` hold those whose placeholders are among the tokens, ``images.slots`` is of these
    tokens; tokens that follow need them no more.
    """
    check_layers(params, cfg)
    carry = start(params, tokens, cfg, images=images)
    states = []
    layers = zip(params.layers, layer_configs(cfg), state.layers, strict=True)
    for number, (weights, layer, before) in enumerate(layers):
        # The bias chooses experts in decoding too: without it other tokens would go elsewhere than
        # in training.
        bias = bias_of(balance, number, layer)
        carry, after = block.extend(weights, carry, layer, before, bias=bias)
        states.append(after)
    # The residual state is of these tokens alone. What later ones need is in the mixers' states.
    return logits(params, finish(params, carry, cfg).hidden), State(tuple(states))
