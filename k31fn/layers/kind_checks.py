"""Checks of what a kind of layer states, made when it is registered and when a config names it.

A kind is written by a user, and most of it is read in the middle of a step, in a forecast or when a
run is resumed. What can be seen to be wrong before is refused here, by the name of the field.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch

from k31fn import tree
from k31fn.layers.kind import Aux, ChannelMixer, Kind, ResidualScheme, Sublayer, TokenMixer
from k31fn.limits import check_numbers
from k31fn.params import ParamSpec

__all__ = ["check_config", "check_kind"]


def __dir__() -> list[str]:
    return __all__


_VIEWS = frozenset({"tp", "cp"})
# The fields that are read as data; all the others are called.
_DATA = ("name", "config", "label", "parts", "splits")
# What config.json gives back as it was: what k31fn.config.codec writes and reads.
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def check_kind(kind: Any) -> None:
    """Refuses a kind whose fields are not what :mod:`k31fn.layers.kind` says.

    Raises:
        ValueError: it is no token mixer, channel mixer or residual scheme, or a field is wrong;
            names the kind and the field.
    """
    if not isinstance(kind, TokenMixer | ChannelMixer | ResidualScheme):
        given = f"{kind.__name__!r}" if hasattr(kind, "__name__") else f"a {type(kind).__name__}"
        raise ValueError(
            f"kinds.register takes a TokenMixer, ChannelMixer or ResidualScheme, not {given}; pass "
            "the KIND of the layer's module"
        )
    if not isinstance(kind.name, str) or not kind.name.isidentifier():
        raise ValueError(f"kind name={kind.name!r} must be an identifier, such as sliding_window")
    at = f"kind {kind.name!r}"
    for field in dataclasses.fields(kind):
        value = getattr(kind, field.name)
        # An absent ability is None where None is the default, such as extend.
        absent = value is None and field.default is None
        if field.name not in _DATA and not absent and not callable(value):
            raise ValueError(f"{at}: {field.name}={value!r} must be a function; give the layer's")
    _check_config_class(at, kind)
    if isinstance(kind, Sublayer):
        splits: Any = kind.splits
        if not isinstance(splits, frozenset) or not splits <= _VIEWS:
            raise ValueError(
                f"{at}: splits={splits!r} must be a frozenset of 'tp' and 'cp' alone; write "
                "frozenset({'tp'}), or leave it out"
            )


def _check_config_class(at: str, kind: Kind) -> None:
    cls: Any = kind.config
    params = getattr(cls, "__dataclass_params__", None)
    if not isinstance(cls, type) or params is None or not params.frozen:
        shown = cls.__qualname__ if isinstance(cls, type) else f"{cls!r}"
        raise ValueError(
            f"{at}: config {shown} must be a frozen dataclass, the class itself; write "
            "@dataclass(frozen=True) above it"
        )
    fields = {f.name for f in dataclasses.fields(cls)}
    if "kind" in fields:
        raise ValueError(
            f"{at}: a config cannot have a field named kind, which config.json uses; rename it"
        )
    # It may be a property, of a config that consists of others.
    if (
        isinstance(kind, Sublayer)
        and "hidden_size" not in fields
        and not hasattr(cls, "hidden_size")
    ):
        raise ValueError(
            f"{at}: config {cls.__qualname__} has no hidden_size, the width of what its apply "
            "takes and returns; add the field"
        )
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ValueError(
            f"{at}: config {cls.__qualname__} has a field whose type is not found "
            f"({error}); import it at the top of the module"
        ) from error
    for field in dataclasses.fields(cls):
        # Those that __post_init__ computes are never written.
        if field.init and not _is_writable(hints[field.name]):
            raise ValueError(
                f"{at}: config field {cls.__qualname__}.{field.name} has the type {field.type}, "
                "which config.json does not give back; use bool, int, float, str, None, a dtype, "
                "a Literal, tuple[...] or a frozen dataclass of these"
            )


def _is_writable(hint: Any) -> bool:
    """Whether ``config.json`` can hold and give back a value of the declared type."""
    origin = get_origin(hint)
    if origin is Literal or hint in _PLAIN:
        return True
    if origin is Annotated:
        # A layer inside of a layer, by its role.
        role = get_args(hint)[1]
        return isinstance(role, type) and issubclass(role, Kind)
    if origin in (tuple, Union, types.UnionType):
        return all(_is_writable(member) for member in get_args(hint) if member is not Ellipsis)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return all(_is_writable(hints[f.name]) for f in dataclasses.fields(hint) if f.init)
    return False


def check_config(kind: Sublayer, config: Any) -> None:
    """Refuses a config for which its kind declares or reports what there is not.

    Raises:
        ValueError: a number that no computation could take (:mod:`k31fn.limits`), a leaf of
            ``specs(config)`` is no :class:`~k31fn.params.ParamSpec`, or ``reports(config)`` has a
            name that is no field of :class:`~k31fn.layers.kind.Aux`.
    """
    check_numbers(config)  # before anything is computed with them
    for path, leaf in tree.flatten_with_paths(kind.specs(config)):
        if not isinstance(leaf, ParamSpec):
            # A class that is no tree is a leaf as a whole.
            raise ValueError(
                f"kind {kind.name!r}: specs has {path or 'its result'} of type "
                f"{type(leaf).__name__}, which must be a ParamSpec; make classes of parameters "
                "with k31fn.tree.dataclass"
            )
    if isinstance(kind, TokenMixer):
        unknown = sorted(set(kind.reports(config)) - set(Aux._fields))
        if unknown:
            raise ValueError(
                f"kind {kind.name!r}: reports has {', '.join(map(repr, unknown))}, which must be "
                f"of the fields of Aux; use frozenset() or some of {', '.join(Aux._fields)}"
            )
