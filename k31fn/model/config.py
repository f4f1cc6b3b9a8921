"""What a model is: its config and those of its layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from k31fn.layers import block, embedding, kinds, mtp, norm, plain_residual, projector, vision
from k31fn.layers.kind import ChannelMixer, Experts, Kind, ResidualScheme, TokenMixer
from k31fn.limits import check_numbers
from k31fn.model.sublayers import Sublayers

__all__ = [
    "Config",
    "embedding_config",
    "experts",
    "final_norm_config",
    "kl_layers",
    "layer_configs",
    "moe_layers",
    "mtp_config",
]

_MOST_LAYERS = 10_000
# Experts of a model without any: its balance state and the routers' reports have no rows.
_NO_EXPERTS = Experts(0, 0, 0)


@dataclass(frozen=True)
class Config:
    """The model.

    Attributes:
        vocab_size: size of the embedding and of the (untied) head.
        hidden_size: width of the residual state.
        sublayers: token mixers and channel mixers by name; on the command line each is set by its
            name, ``--model.moe.num-experts 16``.
        layers: of each decoder layer the names of its token mixer and of its channel mixer.
        residual: config of the residual scheme: AttnRes, mHC, plain, or a registered one.
        mtp: the same two names of a multi-token-prediction layer; ``()``: there is none.
        norm_eps: of the norms before the sublayers and before the head.
        embedding_std: initial embeddings are N(0, embedding_std^2).
        mtp_weight: weight of the multi-token-prediction loss.
        indexer_weight: weight of the indexers' KL.
        indexer_reduction: whether the KL is summed or averaged over the layers that report it.
        vision: the tower that sees images; ``()``: a model of text alone.
        projector: from the tower to this model, if it has one.
    """

    vocab_size: int
    hidden_size: int
    sublayers: Sublayers = field(metadata={"flat": True})
    layers: tuple[tuple[str, str], ...]
    residual: Annotated[Any, ResidualScheme]
    mtp: tuple[str, ...] = ()
    norm_eps: float = 1e-5
    embedding_std: float = 1.0
    mtp_weight: float = 0.1
    indexer_weight: float = 1.0
    indexer_reduction: Literal["sum", "mean"] = "mean"
    vision: vision.Config | tuple[()] = ()
    projector: projector.Config | tuple[()] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "model")
        for name in ("vocab_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model.Config.{name}={getattr(self, name)} must be positive; set it to 1 or "
                    "more"
                )
        for name in ("embedding_std", "mtp_weight", "indexer_weight"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"model.Config.{name}={getattr(self, name)} must not be negative; 0 for none"
                )
        if self.norm_eps <= 0:
            raise ValueError(
                f"model.Config.norm_eps={self.norm_eps}: a row of zeros would give NaN; set it to "
                "1e-5"
            )
        if len(self.layers) > _MOST_LAYERS:
            raise ValueError(
                f"model.Config.layers has {len(self.layers)} layers, at most {_MOST_LAYERS}"
            )
        if not self.layers:
            raise ValueError(
                "model.Config.layers=() must name at least one layer; set it to pairs of names of "
                "sublayers"
            )
        self._check_sublayers()
        self._check_layers()
        # The table's error does not know which field it is about.
        try:
            kinds.residual_of(self.residual)
        except ValueError as error:
            raise ValueError(f"model.Config.residual: {error}") from error
        if self.indexer_reduction not in ("sum", "mean"):
            raise ValueError(
                f"model.Config.indexer_reduction={self.indexer_reduction!r} unknown; use 'sum' or "
                "'mean'"
            )
        self._check_vision()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction layers, 0 or 1."""
        return 1 if self.mtp else 0

    def with_sublayers(self, **changes: Any) -> Config:
        """The model with some of its sublayers replaced, or others added, by name."""
        return dataclasses.replace(self, sublayers=Sublayers(**{**self.sublayers, **changes}))

    def used(self) -> tuple[str, ...]:
        """Names of the sublayers that some layer has, in the order of ``sublayers``."""
        chosen = set(self.mtp)
        for pair in self.layers:
            chosen.update(pair)
        # In the order of the config and not of a set, whose order differs between processes: ranks
        # must raise the same error, and tables have the same rows.
        return tuple(name for name in self.sublayers if name in chosen)

    def _check_sublayers(self) -> None:
        taken = {f.name for f in dataclasses.fields(self)}
        routed: dict[str, Experts] = {}
        for name, config in self.sublayers.items():
            if name in taken:
                # The command line sets --model.NAME.FIELD and --model.FIELD side by side.
                raise ValueError(
                    f"model.Config.sublayers[{name!r}] has the name of a field of model.Config, "
                    "which the command line could not tell from it; give it another"
                )
            size = config.hidden_size
            if size != self.hidden_size:
                raise ValueError(
                    f"model.Config.sublayers: {name}.hidden_size={size} must equal "
                    f"hidden_size={self.hidden_size}"
                )
            kind = kinds.kind_of(config)
            if isinstance(kind, ChannelMixer) and kind.experts is not None:
                routed[name] = kind.experts(config)
        # The balance biases of all layers are rows of one tensor, stepped at once with one top_k.
        # Widths of experts may differ: no state has them.
        sizes = {(found.num_experts, found.top_k) for found in routed.values()}
        placements = {(found.placement, found.bias_step) for found in routed.values()}
        if len(placements) > 1:
            raise ValueError(
                "model.Config.sublayers have experts of several (placement, bias_step) "
                f"{sorted(placements)}; give all the same"
            )
        if len(sizes) > 1:
            counts = ", ".join(f"{n}: {e.top_k} of {e.num_experts}" for n, e in routed.items())
            raise ValueError(
                f"model.Config.sublayers have experts of several numbers ({counts}); give all the "
                "same num_experts and top_k"
            )

    def _check_layers(self) -> None:
        if len(self.mtp) not in (0, 2):
            raise ValueError(
                f"model.Config.mtp={self.mtp} must be the names of a token mixer and a channel "
                "mixer, or () for no such layer"
            )
        token_mixers = self._names_of(TokenMixer)
        channel_mixers = self._names_of(ChannelMixer)
        for number, pair in enumerate(_named_layers(self)):
            at = f"layers[{number}]" if number < self.num_layers else "mtp"
            self._check_name(at, pair, pair[0], "token mixer", token_mixers)
            self._check_name(at, pair, pair[1], "channel mixer", channel_mixers)

    def _names_of(self, role: type[Kind]) -> list[str]:
        """The sublayers of a role."""
        return [
            n for n, config in self.sublayers.items() if isinstance(kinds.kind_of(config), role)
        ]

    def _check_name(
        self, at: str, pair: tuple[str, ...], name: str, role: str, known: list[str]
    ) -> None:
        if name not in known:
            raise ValueError(
                f"model.Config.{at}={pair}: {name!r} is no {role} of sublayers; "
                f"it has {', '.join(known) or 'none'}"
            )

    def _check_vision(self) -> None:
        # Absent is () and not None, as in trees of parameters, where None is no leaf.
        tower, onto = self.vision, self.projector
        if isinstance(tower, tuple) and isinstance(onto, tuple):
            return
        if isinstance(tower, tuple) or isinstance(onto, tuple):
            given, absent = "vision", "projector"
            if isinstance(tower, tuple):
                given, absent = absent, given
            raise ValueError(
                f"model.Config.{given} without {absent}: a model that sees images has both; set "
                "both or none"
            )
        for name, size in (("input_size", tower.output_size), ("hidden_size", self.hidden_size)):
            if getattr(onto, name) != size:
                raise ValueError(
                    f"model.Config.projector.{name}={getattr(onto, name)} must be {size}: it "
                    "leads from "
                    f"vision.output_size={tower.output_size} to hidden_size={self.hidden_size}"
                )


def layer_configs(cfg: Config) -> tuple[block.Config, ...]:
    """The config of every decoder layer, by global layer number."""
    scheme = kinds.residual_of(cfg.residual)
    configs = []
    for number, (mixer, ffn) in enumerate(cfg.layers):
        # Blocks go by the global number of the layer, so a pipeline's cuts move none of them.
        layer = block.Config(
            mixer=cfg.sublayers[mixer],
            ffn=cfg.sublayers[ffn],
            residual=cfg.residual,
            opens_block=scheme.opens_block(cfg.residual, number),
            norm_eps=cfg.norm_eps,
        )
        configs.append(layer)
    return tuple(configs)


def experts(cfg: Config) -> Experts:
    """The experts of the model's layers with a router; zeros if no sublayer has any."""
    # The first will do: Config refuses others of another number.
    for config in cfg.sublayers.values():
        kind = kinds.kind_of(config)
        if isinstance(kind, ChannelMixer) and kind.experts is not None:
            return kind.experts(config)
    return _NO_EXPERTS


def moe_layers(cfg: Config) -> tuple[int, ...]:
    """Global numbers of the layers with experts: the rows of the balance bias.

    An MTP layer counts as ``num_layers``.
    """
    numbers = []
    for number, (_, ffn) in enumerate(_named_layers(cfg)):
        if kinds.channel_mixer_of(cfg.sublayers[ffn]).experts is not None:
            numbers.append(number)
    return tuple(numbers)


def kl_layers(cfg: Config) -> int:
    """How many layers of the whole model report an indexer KL; an MTP layer is one of them."""
    return len(_layers_that_report(cfg, "kl"))


def _layers_that_report(cfg: Config, part: str) -> tuple[int, ...]:
    """Global numbers of the layers whose token mixer reports this part of
    :class:`~k31fn.layers.kind.Aux`; an MTP layer counts as ``num_layers``.
    """
    numbers = []
    for number, (mixer, _) in enumerate(_named_layers(cfg)):
        config = cfg.sublayers[mixer]
        if part in kinds.token_mixer_of(config).reports(config):
            numbers.append(number)
    return tuple(numbers)


def _named_layers(cfg: Config) -> tuple[tuple[str, ...], ...]:
    """The names of each layer's sublayers, an MTP layer last."""
    # Last, so that its number, num_layers, is free: rows of the balance bias and of reports follow.
    return (*cfg.layers, cfg.mtp) if cfg.mtp else cfg.layers


def embedding_config(cfg: Config) -> embedding.Config:
    """Of the embedding."""
    return embedding.Config(cfg.vocab_size, cfg.hidden_size, cfg.embedding_std)


def final_norm_config(cfg: Config) -> norm.Config:
    """Of the norm before the head."""
    return norm.Config(cfg.hidden_size, cfg.norm_eps)


def mtp_config(cfg: Config) -> mtp.Config:
    """Of the multi-token-prediction layer, on a plain residual."""
    # It stands behind the final mix: there are no blocks or streams left for it to read.
    mixer, ffn = cfg.mtp
    layer = block.Config(
        cfg.sublayers[mixer], cfg.sublayers[ffn], plain_residual.Config(), norm_eps=cfg.norm_eps
    )
    return mtp.Config(layer)
