"""The text model: embedding, decoder layers, final mix and norm, head.

K3 (Gated MLA) and K3.1 (Gated DSA) are configs of the same code; so are models with plain residuals
and models with layers of their own.
"""

from k31fn.model.config import (
    Config,
    experts,
    kl_layers,
    layer_configs,
    moe_layers,
    mtp_config,
)
from k31fn.model.decoding import State, extend, init_state
from k31fn.model.forward import Final, Output, apply, finish, logits, run_layers, start
from k31fn.model.layers import Remat, Reports
from k31fn.model.loss import Batch, Losses, lm_loss, loss, make_batch, weigh
from k31fn.model.params import Params, init_balance, specs
from k31fn.model.sublayers import Sublayers

__all__ = [
    "Batch",
    "Config",
    "Final",
    "Losses",
    "Output",
    "Params",
    "Remat",
    "Reports",
    "State",
    "Sublayers",
    "apply",
    "experts",
    "extend",
    "finish",
    "init_balance",
    "init_state",
    "kl_layers",
    "layer_configs",
    "lm_loss",
    "logits",
    "loss",
    "make_batch",
    "moe_layers",
    "mtp_config",
    "run_layers",
    "specs",
    "start",
    "weigh",
]


def __dir__() -> list[str]:
    return __all__
