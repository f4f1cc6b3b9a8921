"""What a kind of layer says of itself: the row that its module adds to the table of kinds.

A decoder layer has two sublayers, a token mixer and a channel mixer, joined by a residual scheme.
The module of each states, as one :class:`TokenMixer`, :class:`ChannelMixer` or
:class:`ResidualScheme`, all that the rest of the library asks about it, so that nothing above
``layers`` tests for a class. :mod:`k31fn.layers.kinds` is the table; a module outside of the
library joins it by ``register``.

A sublayer is called as ``apply(params, x, cfg, *, segments, sh)``, a channel mixer with experts
also with ``bias=``, and returns an :class:`Output`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "Aux",
    "ChannelMixer",
    "Experts",
    "Flops",
    "Halo",
    "Kind",
    "Output",
    "ResidualScheme",
    "Sublayer",
    "TokenMixer",
    "mean_keys",
]


def __dir__() -> list[str]:
    return __all__


class Aux(NamedTuple):
    """What a layer reports besides its output, of this rank's tokens; ``()`` where it has no such
    part.

    Attributes:
        kl: the indexer's KL summed over valid queries.
        load: real tokens per expert ``[E]``.
        histogram: of the router's required biases ``[E, bins]``.
        logits: the largest attention logit of each local head ``[H]``, without gradient.
        placement: of MoonEP's plan for this rank, how far it is from its laws, and the replicas of
            experts that the rank holds ``[2]``.
    """

    kl: Any = ()
    load: Any = ()
    histogram: Any = ()
    logits: Any = ()
    placement: Any = ()


class Output(NamedTuple):
    """The result of a sublayer: ``y [B T D]``, and what it reports."""

    y: Tensor
    aux: Aux = Aux()


class Flops(NamedTuple):
    """Forward operations of a token besides its products with weights, averaged over a row.

    Attributes:
        mixing: with other tokens.
        indexer: of an indexer's scores, which are trained when nothing else is.
    """

    mixing: float = 0.0
    indexer: float = 0.0


def mean_keys(length: int, most: int) -> float:
    """The mean over queries t = 1 .. length of min(t, most): the keys that they attend to."""
    most = min(most, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length


class Experts(NamedTuple):
    """A channel mixer's experts: how many, how many a token goes to, the width that tensor
    parallelism splits where ranks hold the same ones, where they are computed, how many a rank can
    hold besides its own, 0 for as many as its own (:mod:`k31fn.layers.routed`), and the step of
    their biases, 0 for quantiles (:mod:`k31fn.balance`).
    """

    num_experts: int
    top_k: int
    expert_size: int
    placement: str = "plain"
    slots: int = 0
    bias_step: float = 0.0


class Halo(NamedTuple):
    """Tokens before its slice of the context that a rank reads of one neighbour.

    Attributes:
        tokens: how many.
        reader: what reads them, such as "a convolution".
        field: the field of the config that says how many.
    """

    tokens: int
    reader: str
    field: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table.

    Attributes:
        name: in ``config.json`` and on the command line; an identifier.
        config: class of its configs, a frozen dataclass.
        specs: declares the parameters.
        label: in tables and plots; if empty, the name.
        parts: what its parameters are counted as, by patterns of their paths, the first that fits;
            where none does, its title.
    """

    name: str
    config: type
    specs: Callable[..., Any]
    label: str = ""
    parts: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """What tables and plots call it."""
        return self.label or self.name


@dataclass(frozen=True, kw_only=True)
class Sublayer(Kind):
    """A kind that a residual scheme joins to the stream; its configs have a ``hidden_size``.

    Attributes:
        apply: the sublayer after its norm.
        tensor_parallel: sizes that tensor parallelism divides, by field of the config.
        splits: views of the mesh, of ``tp`` and ``cp``, over which ``apply`` knows how to work on
            its part of the tokens; a recipe with another one is refused.
    """

    apply: Callable[..., Output]
    tensor_parallel: Callable[[Any], dict[str, int]] = lambda cfg: {}
    splits: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TokenMixer(Sublayer):
    """A kind of sublayer in which tokens of a document see one another.

    Attributes:
        flops: ``(cfg, length)``: operations besides the products with weights, in a row of so many
            tokens.
        halo: what a rank reads of the slice of the context before its own; None: nothing, or
            all of it.
        reports: the fields of :class:`Aux` that a config fills.
        init_state: ``(cfg, batch, dtype=, device=)``, the decoding state before the first token;
            None: it does not decode.
        extend: ``(params, x, cfg, state) -> (y, state)``.
        with_logits: the config that reports its logits; None: it has none.
        logit_scales: ``(cfg, factor [H])``: what the columns of its weights, by path, are
            multiplied with so that every logit of a head is scaled by its factor.
        with_stage: ``(cfg, stage)``: the config in a stage of its indexer's training; None: it has
            no indexer.
    """

    flops: Callable[[Any, int], Flops]
    halo: Callable[[Any], Halo] | None = None
    reports: Callable[[Any], frozenset[str]] = lambda cfg: frozenset()
    init_state: Callable[..., Any] | None = None
    extend: Callable[..., tuple[Tensor, Any]] | None = None
    with_logits: Callable[[Any], Any] | None = None
    logit_scales: Callable[[Any, Tensor], dict[str, Tensor]] | None = None
    with_stage: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ChannelMixer(Sublayer):
    """A kind of sublayer that works on each token by itself.

    Attributes:
        experts: of a config whose router has a balance bias, which ``apply`` takes as ``bias=``;
            it reports ``load`` and ``histogram``. None: no experts.
    """

    experts: Callable[[Any], Experts] | None = None


@dataclass(frozen=True, kw_only=True)
class ResidualScheme(Kind):
    """A kind of state that sublayers read and update (:mod:`k31fn.layers.attn_res` says how).

    Attributes:
        specs_out: declares the parameters of the last read.
        start: the state before the first sublayer.
        connect: one sublayer on the state.
        finish: what the final norm reads.
        opens_block: ``(cfg, layer)``: whether a block of earlier sums ends before this layer; each
            one is kept to the end.
    """

    specs_out: Callable[..., Any]
    start: Callable[..., Any]
    connect: Callable[..., tuple[Any, Any]]
    finish: Callable[..., Tensor]
    opens_block: Callable[[Any, int], bool] = lambda cfg, layer: False
