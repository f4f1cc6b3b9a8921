"""One decoder layer: a token mixer and a channel mixer, each joined to the residual state by a
scheme.

For the state ``c`` and the scheme's ``connect``::

    c = connect(c, x -> Mixer(RMSNorm(x)))
    c = connect(c, x -> FFN(RMSNorm(x)))

A remat may keep both sublayers after their norm (:data:`BRANCHES`): it then makes only the residual
state and the norms again.

What mixes the tokens, what mixes the channels and what joins them are the kinds of the sub-configs
(:mod:`k31fn.layers.kinds`): K3, K3.1 and models with layers of their own are the same code.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from k31fn import scopes, tree
from k31fn.autodiff.keep import keep
from k31fn.layers import kinds, norm
from k31fn.layers.kind import Aux, Kind, Output
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import ParamSpec
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Leaf

__all__ = [
    "BRANCHES",
    "Config",
    "Params",
    "apply",
    "extend",
    "init",
    "init_state",
    "specs",
    "title",
    "without_branches",
]


def __dir__() -> list[str]:
    return __all__


BRANCHES = ("attention", "ffn")
"""The names that ``remat(..., keep=)`` knows the sublayers by (:func:`k31fn.autodiff.keep`)."""


@dataclass(frozen=True)
class Config:
    """A decoder layer.

    Attributes:
        mixer: config of the token mixer.
        ffn: config of the channel mixer.
        residual: config of the residual scheme.
        opens_block: whether an AttnRes block starts here.
        norm_eps: of the norms before both sublayers.

    Each config is of a registered kind (:mod:`k31fn.layers.kinds`).
    """

    mixer: Any
    ffn: Any
    residual: Any
    opens_block: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        # An unknown kind, or one in another's place, is refused here and not in the middle of a
        # step.
        kinds.token_mixer_of(self.mixer)
        kinds.channel_mixer_of(self.ffn)
        kinds.residual_of(self.residual)

    @property
    def hidden_size(self) -> int:
        """Width of the residual state."""
        return self.mixer.hidden_size


@tree.dataclass
class Params(Generic[Leaf]):
    """Parameters of a decoder layer; the parts are those of the configured kinds."""

    attn_norm: norm.Params[Leaf]
    attn: Any
    attn_mix: Any
    ffn_norm: norm.Params[Leaf]
    ffn: Any
    ffn_mix: Any


def title(cfg: Config) -> str:
    """The kinds of a layer's sublayers: ``KDA, MoE``."""
    return f"{kinds.kind_of(cfg.mixer).title}, {kinds.kind_of(cfg.ffn).title}"


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    pre_norm = norm.specs(_norm(cfg))
    mix = kinds.residual_of(cfg.residual).specs(cfg.residual, cfg.hidden_size)
    return Params(
        attn_norm=pre_norm,
        attn=kinds.kind_of(cfg.mixer).specs(cfg.mixer),
        attn_mix=mix,
        ffn_norm=pre_norm,
        ffn=kinds.kind_of(cfg.ffn).specs(cfg.ffn),
        ffn_mix=mix,
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


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
        bias: the router's balance bias ``[E]`` of a layer with experts, else ``()``.
        sh: sharding.

    Returns:
        The new residual state, and what the layer reports.
    """
    scheme = kinds.residual_of(cfg.residual)
    # Absent is () here: None is no leaf of a tree, and keep takes trees alone.
    packing: Any = () if segments is None else segments

    def mixer(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.attn_norm, h, _norm(cfg), sh=sh)
        return keep("attention", functools.partial(_mixer, cfg, sh))(params.attn, x, packing)

    def ffn(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.ffn_norm, h, _norm(cfg), sh=sh)
        # The counts of a router are told, and read by nothing that is differentiated.
        kept = keep("ffn", functools.partial(_ffn, cfg, sh), reports=lambda out: out.aux)
        return kept(params.ffn, x, packing, bias)

    carry, of_mixer = scheme.connect(
        params.attn_mix, carry, cfg.residual, mixer, opens_block=cfg.opens_block, sh=sh
    )
    carry, of_ffn = scheme.connect(
        params.ffn_mix, carry, cfg.residual, ffn, opens_block=False, sh=sh
    )
    return carry, _either(of_mixer, of_ffn)


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> Any:
    """The token mixer's decoding state before the first token.

    Raises:
        ValueError: its kind does not decode.
    """
    kind = kinds.token_mixer_of(cfg.mixer)
    if kind.init_state is None or kind.extend is None:
        raise ValueError(
            f"{kind.name} does not decode: its kind has no init_state and extend; a model with "
            "such layers trains and is scored, and writes no text"
        )
    return kind.init_state(cfg.mixer, batch, dtype=dtype, device=device)


def extend(
    params: Params[Tensor], carry: Any, cfg: Config, state: Any, *, bias: Any = ()
) -> tuple[Any, Any]:
    """:func:`apply` on the next tokens of one document per row: the new residual state and decoding
    state.
    """
    scheme = kinds.residual_of(cfg.residual)
    kind = kinds.token_mixer_of(cfg.mixer)
    assert kind.extend is not None, "init_state refuses a kind that does not decode"
    advance = kind.extend

    def mixer(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        return advance(params.attn, norm.apply(params.attn_norm, h, _norm(cfg)), cfg.mixer, state)

    def ffn(h: Float[Tensor, "B T D"]) -> tuple[Tensor, Any]:
        x = norm.apply(params.ffn_norm, h, _norm(cfg))
        return _ffn(cfg, UNSHARDED, params.ffn, x, (), bias)

    carry, state = scheme.connect(
        params.attn_mix, carry, cfg.residual, mixer, opens_block=cfg.opens_block
    )
    carry, _ = scheme.connect(params.ffn_mix, carry, cfg.residual, ffn, opens_block=False)
    return carry, state


def without_branches(params: Params[Any]) -> Params[Any]:
    """A tree like the parameters with those that the sublayers read after their norm replaced by
    ``()``.
    """
    return dataclasses.replace(params, attn=(), ffn=())


def _mixer(cfg: Config, sh: Sharding, weights: Any, x: Tensor, packing: Any) -> Output:
    """The token mixer after its norm; ``packing``: segments or ``()``."""
    kind = kinds.token_mixer_of(cfg.mixer)
    segments = None if isinstance(packing, tuple) else packing

    def run(weights: Any, x: Tensor) -> tuple[Tensor, Any]:
        return _checked(kind, x, kind.apply(weights, x, cfg.mixer, segments=segments, sh=sh))

    return Output(*scopes.of_layer(kind.title, run)(weights, x))


def _ffn(cfg: Config, sh: Sharding, weights: Any, x: Tensor, packing: Any, bias: Any) -> Output:
    """The channel mixer after its norm."""
    kind = kinds.channel_mixer_of(cfg.ffn)
    segments = None if isinstance(packing, tuple) else packing
    # Only a router takes the balance bias: a kind without experts need not know of it.
    balance = {} if kind.experts is None else {"bias": bias}

    def run(weights: Any, x: Tensor) -> tuple[Tensor, Any]:
        return _checked(
            kind, x, kind.apply(weights, x, cfg.ffn, segments=segments, sh=sh, **balance)
        )

    return Output(*scopes.of_layer(kind.title, run)(weights, x))


def _checked(kind: Kind, x: Tensor, out: Any) -> Output:
    """What a sublayer returned, if the residual scheme and the reports can take it.

    Raises:
        ValueError: it is no :class:`Output`, or ``y`` has another shape than ``x``.
    """
    # Here the kind is still known. A plain tensor would be unpacked along its batch further on.
    if not isinstance(out, Output):
        raise ValueError(
            f"kind {kind.name!r}: apply returned a {type(out).__name__}, which must be an Output; "
            "return Output(y, aux) of k31fn.layers.kind"
        )
    if not isinstance(out.aux, Aux):
        raise ValueError(
            f"kind {kind.name!r}: apply returned Output.aux={out.aux!r}, which must be an Aux; "
            "leave it out where nothing is reported"
        )
    if not isinstance(out.y, Tensor):
        raise ValueError(
            f"kind {kind.name!r}: apply returned Output.y of type {type(out.y).__name__}, which "
            f"must be a tensor; return one of the shape {list(x.shape)} of x"
        )
    if out.y.shape != x.shape:
        raise ValueError(
            f"kind {kind.name!r}: apply returned Output.y of shape {list(out.y.shape)}, which must "
            f"be the shape {list(x.shape)} of x [B T D]; project and scatter it back"
        )
    return out


def _either(a: Aux, b: Aux) -> Aux:
    """What one of the two sublayers reports; no part is reported by both."""
    parts = []
    for of_a, of_b in zip(a, b, strict=True):
        parts.append(of_b if isinstance(of_a, tuple) else of_a)
    return Aux(*parts)


def _norm(cfg: Config) -> norm.Config:
    return norm.Config(cfg.hidden_size, cfg.norm_eps)
