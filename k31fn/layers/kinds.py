"""The table of kinds of layers: those of the library, and those that a recipe registers.

    from k31fn.layers import kinds
    kinds.register(sliding_window.KIND)   # in a recipe; then its Config may stand in a model

``config.json`` holds the names of kinds. It runs no code, so a run with a kind from outside of the
library is resumed through the recipe that registers it (``train.py RECIPE.py --resume auto``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from k31fn.layers import attn_res, dsa, kda, latent_moe, mhc, mla, mlp, plain_residual
from k31fn.layers.kind import ChannelMixer, Kind, ResidualScheme, Sublayer, TokenMixer

__all__ = [
    "added",
    "channel_mixer_of",
    "kind_of",
    "names",
    "register",
    "residual_of",
    "sublayer_of",
    "token_mixer_of",
]

_K = TypeVar("_K", bound=Kind)

_LIBRARY: tuple[Kind, ...] = (
    kda.KIND,
    mla.KIND,
    dsa.KIND,
    mlp.KIND,
    latent_moe.KIND,
    attn_res.KIND,
    mhc.KIND,
    plain_residual.KIND,
)
_BY_NAME: dict[str, Kind] = {kind.name: kind for kind in _LIBRARY}
_BY_CONFIG: dict[type, Kind] = {kind.config: kind for kind in _LIBRARY}
_ROLES: dict[type[Kind], str] = {
    Sublayer: "sublayer",
    TokenMixer: "token mixer",
    ChannelMixer: "channel mixer",
    ResidualScheme: "residual scheme",
}


def register(kind: Kind) -> None:
    """Adds a kind to the table, for the rest of the process.

    A recipe file may be run more than once in a process, each time with new classes: the same
    class of the same module takes its own place, and configs of its earlier self keep theirs.

    Raises:
        ValueError: a name that is another kind's or no identifier, a config that is no frozen
            dataclass, or one that has a field named ``kind``.
    """
    if not kind.name.isidentifier():
        raise ValueError(f"kind name={kind.name!r} must be an identifier, such as sliding_window")
    at = f"kind {kind.name!r}"
    params = getattr(kind.config, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise ValueError(f"{at}: config {kind.config.__qualname__} must be a frozen dataclass")
    if "kind" in {f.name for f in dataclasses.fields(kind.config)}:
        raise ValueError(f"{at}: a config cannot have a field named kind; config.json uses it")
    other = _BY_NAME.get(kind.name)
    if other is not None and _origin(other) != _origin(kind):
        raise ValueError(
            f"{at} of {'.'.join(_origin(kind))} is registered by {'.'.join(_origin(other))}; give "
            "it another name"
        )
    _BY_NAME[kind.name] = kind
    _BY_CONFIG[kind.config] = kind


def _origin(kind: Kind) -> tuple[str, str]:
    return kind.config.__module__, kind.config.__qualname__


def kind_of(config: Any) -> Kind:
    """The kind of a config.

    Raises:
        ValueError: no kind of that class is registered.
    """
    kind = _BY_CONFIG.get(type(config))
    if kind is None:
        cls = type(config)
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} is the config of no registered kind of layer "
            f"({', '.join(_BY_NAME)}); call k31fn.layers.kinds.register(KIND) in the recipe"
        )
    return kind


def added(configs: Iterable[Any]) -> list[str]:
    """The names of those kinds of the configs that are not the library's."""
    return [kind.name for kind in map(kind_of, configs) if kind not in _LIBRARY]


def names(role: type[Kind]) -> dict[str, Kind]:
    """The kinds of a role by name."""
    return {name: kind for name, kind in _BY_NAME.items() if isinstance(kind, role)}


def token_mixer_of(config: Any) -> TokenMixer:
    """The kind of a config that must be a token mixer's."""
    return _of(config, TokenMixer)


def sublayer_of(config: Any) -> Sublayer:
    """The kind of a config that must be a token mixer's or a channel mixer's."""
    return _of(config, Sublayer)


def channel_mixer_of(config: Any) -> ChannelMixer:
    """The kind of a config that must be a channel mixer's."""
    return _of(config, ChannelMixer)


def residual_of(config: Any) -> ResidualScheme:
    """The kind of a config that must be a residual scheme's."""
    return _of(config, ResidualScheme)


def _of(config: Any, role: type[_K]) -> _K:
    kind = kind_of(config)
    if not isinstance(kind, role):
        known = ", ".join(names(role))
        raise ValueError(
            f"{kind.name} is a {_ROLES[type(kind)]}, not a {_ROLES[role]}; use one of {known}"
        )
    return kind
