"""One decoder layer: an attention and a feed-forward sublayer, each joined to the residual state by
a scheme.

For the state ``c`` and the scheme's ``connect``::

    c = connect(c, x -> Attention(RMSNorm(x)))
    c = connect(c, x -> FFN(RMSNorm(x)))

A remat may keep both sublayers after their norm (:data:`BRANCHES`): it then makes only the residual
state and the norms again.

The kinds of attention (KDA, Gated MLA, Gated DSA), feed-forward (dense, LatentMoE) and residual
scheme (AttnRes, mHC, plain) are those of the sub-configs: K3 and K3.1 are the same code.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import keep
from k31fn.layers import attn_res, dsa, kda, latent_moe, mhc, mla, mlp, norm, plain_residual
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import ParamSpec
from k31fn.segments import Segments
from k31fn.typing import Float, Leaf

__all__ = [
    "BRANCHES",
    "Aux",
    "Config",
    "Params",
    "apply",
    "extend",
    "init_state",
    "module_of",
    "name_of",
    "specs",
    "without_branches",
]

BRANCHES = ("attention", "ffn")
"""The names that ``remat(..., keep=)`` knows the sublayers by (:func:`k31fn.autodiff.keep`)."""

_MODULES: dict[type, ModuleType] = {
    m.Config: m for m in (attn_res, dsa, kda, latent_moe, mhc, mla, mlp, plain_residual)
}


@dataclass(frozen=True)
class Config:
    """A decoder layer.

    Attributes:
        attention: picks the attention.
        ffn: picks the feed-forward part.
        residual: picks the residual scheme.
        opens_block: whether an AttnRes block starts here.
        norm_eps: of the norms before both sublayers.
    """

    attention: kda.Config | mla.Config | dsa.Config
    ffn: mlp.Config | latent_moe.Config
    residual: attn_res.Config | mhc.Config | plain_residual.Config
    opens_block: bool = False
    norm_eps: float = 1e-5

    @property
    def hidden_size(self) -> int:
        """Width of the residual state."""
        return self.attention.hidden_size


@tree.dataclass
class Params(Generic[Leaf]):
    """Parameters of a decoder layer; the parts are those of the configured kinds."""

    attn_norm: norm.Params[Leaf]
    attn: Any
    attn_mix: Any
    ffn_norm: norm.Params[Leaf]
    ffn: Any
    ffn_mix: Any


class Aux(NamedTuple):
    """What a layer reports besides its output, of this rank's tokens; ``()`` where it has no such
    part.

    Attributes:
        kl: the indexer's KL summed over valid queries (DSA).
        load: real tokens per expert ``[E]`` (MoE).
        histogram: of the router's required biases ``[E, bins]`` (MoE).
        logits: the largest attention logit of each local head ``[H]`` (MLA and DSA that report it).
    """

    kl: Any = ()
    load: Any = ()
    histogram: Any = ()
    logits: Any = ()


def module_of(cfg: Any) -> ModuleType:
    """The layer module whose Config ``cfg`` is."""
    return _MODULES[type(cfg)]


def name_of(cfg: Config) -> str:
    """The kind of a layer: ``KDA, MoE``."""
    attention = type(cfg.attention).__module__.rpartition(".")[2].upper()
    return f"{attention}, {'dense' if isinstance(cfg.ffn, mlp.Config) else 'MoE'}"


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    pre_norm = norm.specs(norm.Config(cfg.hidden_size, cfg.norm_eps))
    mix = module_of(cfg.residual).specs(cfg.residual, cfg.hidden_size)
    return Params(
        attn_norm=pre_norm,
        attn=module_of(cfg.attention).specs(cfg.attention),
        attn_mix=mix,
        ffn_norm=pre_norm,
        ffn=module_of(cfg.ffn).specs(cfg.ffn),
        ffn_mix=mix,
    )


def apply(
    params: Params[Tensor],
    carry: Any,
    cfg: Config,
    *,
    segments: Segments | None = None,
    bias: Any = (),
    sh: Sharding = UNSHARDED,
) -> tuple[Any, Aux]:
    """Runs the layer on the residual state.

    Args:
        params: as :func:`specs` declares.
        carry: the scheme's residual state.
        cfg: the layer's config.
        segments: packed documents; None: one document per row.
        bias: the router's balance bias ``[E]`` of an MoE layer, else ``()``.
        sh: sharding.

    Returns:
        The new residual state, and what the layer reports.
    """
    scheme = module_of(cfg.residual)

    normed = norm.Config(cfg.hidden_size, cfg.norm_eps)
    packing: Any = () if segments is None else segments

    def attention(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.attn_norm, h, normed, sh=sh)
        return keep("attention", functools.partial(_attention, cfg, sh))(params.attn, x, packing)

    def ffn(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.ffn_norm, h, normed, sh=sh)
        # The counts of an MoE layer are told, and read by nothing that is differentiated.
        kept = keep("ffn", functools.partial(_ffn, cfg, sh), reports=lambda out: out[1])
        return kept(params.ffn, x, packing, bias)

    carry, seen = scheme.connect(
        params.attn_mix, carry, cfg.residual, attention, opens_block=cfg.opens_block, sh=sh
    )
    carry, routing = scheme.connect(
        params.ffn_mix, carry, cfg.residual, ffn, opens_block=False, sh=sh
    )
    (kl, logits), (load, histogram) = seen, routing or ((), ())
    return carry, Aux(kl, load, histogram, logits)


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> Any:
    """The attention's decoding state before the first token."""
    return module_of(cfg.attention).init_state(cfg.attention, batch, dtype=dtype, device=device)


def extend(
    params: Params[Tensor], carry: Any, cfg: Config, state: Any, *, bias: Any = ()
) -> tuple[Any, Any]:
    """:func:`apply` on the next tokens of one document per row: the new residual state and decoding
    state.
    """
    scheme = module_of(cfg.residual)

    def attention(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.attn_norm, h, norm.Config(cfg.hidden_size, cfg.norm_eps))
        return module_of(cfg.attention).extend(params.attn, x, cfg.attention, state)

    def ffn(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.ffn_norm, h, norm.Config(cfg.hidden_size, cfg.norm_eps))
        return _ffn(cfg, UNSHARDED, params.ffn, x, (), bias)

    carry, state = scheme.connect(
        params.attn_mix, carry, cfg.residual, attention, opens_block=cfg.opens_block
    )
    carry, _ = scheme.connect(params.ffn_mix, carry, cfg.residual, ffn, opens_block=False)
    return carry, state


def without_branches(params: Params[Any]) -> Params[Any]:
    """A tree like the parameters with those that the sublayers read after their norm replaced by
    ``()``.
    """
    return dataclasses.replace(params, attn=(), ffn=())


def _attention(
    cfg: Config, sh: Sharding, weights: Any, x: Tensor, packing: Any
) -> tuple[Tensor, Any]:
    """The attention sublayer after its norm: its output, and (KL, logits); ``packing``: segments or
    ``()``.
    """
    segments = None if isinstance(packing, tuple) else packing
    if isinstance(cfg.attention, mla.Config):
        y, logits = mla.attend(weights, x, cfg.attention, segments=segments, sh=sh)
        return y, ((), logits)
    out = module_of(cfg.attention).apply(weights, x, cfg.attention, segments=segments, sh=sh)
    return (
        (out.y, (out.kl, out.logits)) if isinstance(cfg.attention, dsa.Config) else (out, ((), ()))
    )


def _ffn(
    cfg: Config, sh: Sharding, weights: Any, x: Tensor, packing: Any, bias: Any
) -> tuple[Tensor, tuple[Any, ...]]:
    """The feed-forward sublayer after its norm: its output, and the MoE's (load, histogram)."""
    if isinstance(cfg.ffn, mlp.Config):
        return mlp.apply(weights, x, cfg.ffn, sh=sh), ()
    segments = None if isinstance(packing, tuple) else packing
    out = latent_moe.apply(weights, x, cfg.ffn, bias=bias, segments=segments, sh=sh)
    return out.y, (out.routing.load, out.routing.histogram)
