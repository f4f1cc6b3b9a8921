"""The plain residual stream as a residual scheme: ``h <- h + f(h)`` (He et al. 2015, arXiv
1512.03385).

See :mod:`k31fn.layers.attn_res`, which says what a residual scheme is. Here ``()`` does for
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from k31fn import tree
from k31fn.layers.kind import ResidualScheme
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import ParamSpec
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Carry", "Config", "Params", "connect", "finish", "specs", "specs_out", "start"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


@tree.dataclass
class Params(Generic[Leaf]):
    """No parameters."""


@tree.dataclass
class Carry:
    """What goes from sublayer to sublayer: ``prefix [B T D]``, the sum of the embedding and all
    outputs so far.
    """

    prefix: Tensor


def specs(cfg: Config, hidden_size: int) -> Params[ParamSpec]:
    """Parameters of one sublayer's connection: none."""
    del cfg, hidden_size
    return Params()


def specs_out(cfg: Config, hidden_size: int) -> Params[ParamSpec]:
    """Parameters of the last read: none."""
    return specs(cfg, hidden_size)


def start(x: Float[Tensor, "B T D"], cfg: Config) -> Carry:
    """The carry before the first sublayer."""
    del cfg
    return Carry(prefix=x)


def connect(
    params: Params[Tensor] | tuple[()],
    carry: Carry,
    cfg: Config,
    f: Callable[[Tensor], tuple[Tensor, Any]],
    *,
    opens_block: bool,
    sh: Sharding = UNSHARDED,
) -> tuple[Carry, Any]:
    """``prefix + f(prefix)``, summed in the dtype of the stream, and what else ``f`` returned."""
    del params, cfg, opens_block, sh
    y, aux = f(carry.prefix)
    # A sublayer may return a wider dtype; the stream keeps its own.
    return Carry(prefix=carry.prefix + y.to(carry.prefix.dtype)), aux


def finish(
    params_out: Params[Tensor] | tuple[()], carry: Carry, cfg: Config, *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B T D"]:
    """What the final norm reads."""
    del params_out, cfg, sh
    return carry.prefix


KIND = ResidualScheme(
    name="plain_residual",
    label="plain",
    config=Config,
    specs=specs,
    specs_out=specs_out,
    start=start,
    connect=connect,
    finish=finish,
)
