"""Block attention residuals as a residual scheme: a learned mix of earlier sums feeds every
sublayer.

Kimi K3 report, arXiv 2607.24653, equation 10. The state is a running sum ``p`` (the embedding at
first) and a list of frozen blocks ``B`` (empty at first). A sublayer ``f`` reads and updates it so,
with ``Mix`` of :mod:`k31fn.kernels.attn_res` and the sublayer's own query and norm weight:

    h = p if B is empty else Mix(B ++ [p])
    y = f(h)
    B, p = (B ++ [p], y) if the sublayer opens a block else (B, p + y)

``h`` is an input only: outputs are added to ``p``, never to ``h``. The attention sublayers of
layers 0, b, 2b, ... open a block. The final norm reads ``Mix(B ++ [p])``. Sources are stored and
summed in the model dtype.

This module is also the definition of a residual scheme: another scheme is a module with the same
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from k31fn import tree
from k31fn.kernels.attn_res import attn_res
from k31fn.layers.kind import ResidualScheme
from k31fn.parallel.collectives import pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Carry", "Config", "Params", "connect", "finish", "specs", "specs_out", "start"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """Layers per block, eps of the keys' norm, and standard deviation of the first queries (0:
    uniform mixes).
    """

    block_size: int = 12
    eps: float = 1e-5
    query_std: float = 0.0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(
                f"attn_res.Config.block_size={self.block_size}: a block has layers; set "
                "block_size >= 1"
            )
        # `not >` and not `<=`, here and below: it refuses NaN too.
        if not self.eps > 0:
            raise ValueError(
                f"attn_res.Config.eps={self.eps}: a row of zeros would give NaN; set eps > 0, "
                "such as 1e-5"
            )
        if not self.query_std >= 0:
            raise ValueError(
                f"attn_res.Config.query_std={self.query_std}: a standard deviation; set query_std "
                ">= 0"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """``query [D]`` and ``norm [D]`` of one mix."""

    query: Leaf
    norm: Leaf


@tree.dataclass
class Carry:
    """What goes from sublayer to sublayer: the running sum ``prefix [B T D]`` and the frozen
    ``blocks [B T D]``.
    """

    prefix: Tensor
    blocks: tuple[Tensor, ...]


def specs(cfg: Config, hidden_size: int) -> Params[ParamSpec]:
    """Parameters of one sublayer's mix. Layer 0's attention has them too, unused: its gradient is
    zero.
    """
    # A vector of scores is no matrix for Muon, and decay would pull every mix towards the uniform.
    no_decay = frozenset({"no_decay"})
    query = Normal(cfg.query_std) if cfg.query_std > 0 else Constant(0.0)
    return Params(
        query=ParamSpec((hidden_size,), ("hidden",), query, tags=no_decay),
        norm=ParamSpec((hidden_size,), ("hidden",), Constant(1.0), tags=no_decay),
    )


def specs_out(cfg: Config, hidden_size: int) -> Params[ParamSpec]:
    """Parameters of the last mix, which the final norm reads."""
    return specs(cfg, hidden_size)


def start(x: Float[Tensor, "B T D"], cfg: Config) -> Carry:
    """The carry before the first sublayer; ``x`` is the embedding."""
    del cfg
    return Carry(prefix=x, blocks=())


def connect(
    params: Params[Tensor],
    carry: Carry,
    cfg: Config,
    f: Callable[[Tensor], tuple[Tensor, Any]],
    *,
    opens_block: bool,
    sh: Sharding = UNSHARDED,
) -> tuple[Carry, Any]:
    """One sublayer.

    Args:
        params: of this sublayer's mix.
        carry: from the sublayer before, or :func:`start`.
        cfg: of the scheme.
        f: the sublayer with its norm, ``h [B T D] -> (y [B T D], aux)``.
        opens_block: true only for the attention of layers 0, b, 2b, ... (b the block size).
        sh: sharding; the carry holds this rank's tokens.

    Returns:
        The next carry, and ``aux``.
    """
    y, aux = f(_read(params, carry, cfg, sh))
    y = y.to(carry.prefix.dtype)
    if opens_block:
        # The old sum is frozen and a new one begins with this output: it is not in both.
        return Carry(prefix=y, blocks=(*carry.blocks, carry.prefix)), aux
    return Carry(prefix=carry.prefix + y, blocks=carry.blocks), aux


def finish(
    params_out: Params[Tensor], carry: Carry, cfg: Config, *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B T D"]:
    """What the final norm reads: the mix of all blocks and the running sum."""
    return _read(params_out, carry, cfg, sh)


def _read(params: Params[Tensor], carry: Carry, cfg: Config, sh: Sharding) -> Tensor:
    if not carry.blocks:
        # A mix of one source is that source; the op would only round it.
        return carry.prefix
    # Whole on every rank, for this rank's tokens: pvary sums their gradients over the ranks.
    query = pvary(params.query, sh.sequence)
    weight = pvary(params.norm, sh.sequence)
    return attn_res((*carry.blocks, carry.prefix), query, weight, cfg.eps)


KIND = ResidualScheme(
    name="attn_res",
    label="AttnRes",
    config=Config,
    specs=specs,
    specs_out=specs_out,
    start=start,
    connect=connect,
    finish=finish,
    opens_block=lambda cfg, layer: layer % cfg.block_size == 0,
)
