"""The table of kinds of layers: those of the library, and those that a recipe registers.

    from k31fn.layers import kinds
    kinds.register(sliding_window.KIND)   # in a recipe; then its Config may stand in a model

``config.json`` holds the names of kinds. It runs no code, so a run with a kind from outside of the
library is resumed beside the recipe that registers it (``train.py RUN/config.json --recipe
RECIPE.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from k31fn.layers import attn_res, dsa, gdn, kda, latent_moe, mhc, mla, mlp, plain_residual
from k31fn.layers.kind import ChannelMixer, Kind, ResidualScheme, Sublayer, TokenMixer
from k31fn.layers.kind_checks import check_kind

__all__ = [
    "added",
    "channel_mixer_of",
    "kind_of",
    "names",
    "register",
    "residual_of",
    "sublayer_of",
    "token_mixer_of",
    "wrong_role",
]


def __dir__() -> list[str]:
    return __all__


_K = TypeVar("_K", bound=Kind)

_LIBRARY: tuple[Kind, ...] = (
    kda.KIND,
    gdn.KIND,
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
    TokenMixer: "token mixer",
    ChannelMixer: "channel mixer",
    Sublayer: "sublayer",
    ResidualScheme: "residual scheme",
}


def register(kind: Kind) -> None:
    """Adds a kind to the table, for the rest of the process.

    A recipe file may be run more than once in a process, each time with new classes: the same
    class of the same module takes its own place, and configs of its earlier self keep theirs.

    Raises:
        ValueError: a name, config class or label that is another kind's, a kind of the library, or
            what :func:`~k31fn.layers.kind_checks.check_kind` refuses.
    """
    check_kind(kind)
    at = f"kind {kind.name!r}"
    other = _BY_NAME.get(kind.name)
    if other is not None and _origin(other) != _origin(kind):
        raise ValueError(
            f"{at} of {'.'.join(_origin(kind))} is registered by {'.'.join(_origin(other))}; give "
            "it another name"
        )
    if other in _LIBRARY:
        raise ValueError(
            f"{at} is the library's, which no recipe may change; give yours another name and a "
            "Config of its own"
        )
    of_config = _BY_CONFIG.get(kind.config)
    if of_config is not None and of_config.name != kind.name:
        raise ValueError(
            f"{at}: config {'.'.join(_origin(kind))} is that of kind {of_config.name!r}, and one "
            "class has one kind; write a Config of its own"
        )
    for known in _BY_NAME.values():
        if known.name != kind.name and _metric_name(known) == _metric_name(kind):
            raise ValueError(
                f"{at}: label={kind.title!r} is that of kind {known.name!r} in tables and metrics; "
                "give it another label"
            )
    _BY_NAME[kind.name] = kind
    _BY_CONFIG[kind.config] = kind


def _metric_name(kind: Kind) -> str:
    # Titles that differ in case or a space alone would be one curve.
    return kind.title.lower().replace(" ", "_")


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
        raise ValueError(f"{kind.name} {wrong_role(kind, role)}")
    return kind


def wrong_role(kind: Kind, *roles: type[Kind]) -> str:
    """What to say of a kind that stands where one of the roles is needed."""
    # By isinstance: a kind may be of a subclass, and the first role that fits is the narrowest.
    stated = next(text for role, text in _ROLES.items() if isinstance(kind, role))
    wanted = " or a ".join(_ROLES[role] for role in roles)
    known = ", ".join(name for name, other in _BY_NAME.items() if isinstance(other, roles))
    return f"is a {stated}, not a {wanted}; use one of {known}"
