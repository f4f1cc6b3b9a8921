"""Configs as plain data and back, strictly and without running any code.

In the data a tuple is a list, a dtype its name (``"bfloat16"``), and a config whose field allows
several classes carries which one it is as ``"kind"``: of a layer, the name of its registered kind
(:mod:`k31fn.layers.kinds`); else the module for a class named Config, or the class name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import torch

from k31fn.layers import kinds
from k31fn.layers.kind import ChannelMixer, Kind, TokenMixer
from k31fn.model.sublayers import Sublayers

__all__ = ["classes", "from_dict", "name_of", "to_dict"]

_T = TypeVar("_T")
_KIND = "kind"
_PLAIN = (bool, int, float, str, type(None))


def to_dict(config: Any) -> dict[str, Any]:
    """The fields of a config dataclass as JSON-ready data; :func:`from_dict` gives the config
    back.

    Raises:
        ValueError: a layer of no registered kind, or a config of another class than its field
            declares, which would be read back as what it is not.
    """
    return {
        name: _encode(kind, getattr(config, name), f"{name_of(type(config))}.{name}")
        for name, kind in _fields(type(config)).items()
    }


def from_dict(cls: type[_T], data: Any) -> _T:
    """A config of class ``cls`` from data such as :func:`to_dict` returns. Fields left out take
    their defaults.

    Raises:
        ValueError: an unknown or missing field, a value of the wrong type, or one that the class
            refuses. The message has the field's path, such as ``moe.num_experts``.
    """
    return _decode_dataclass(cls, data, "")


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    """Types of the fields that ``__init__`` takes."""
    hints = typing.get_type_hints(cls, include_extras=True)  # a layer's role is an annotation
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def name_of(cls: type) -> str:
    """``mla.Config`` of ``k31fn.layers.mla.Config``, ``model.Config`` of
    ``k31fn.model.config.Config``.
    """
    return f"{_module(cls)}.{cls.__qualname__}"


def _module(cls: type) -> str:
    return cls.__module__.removesuffix(".config").rpartition(".")[2]


def _kind(cls: type) -> str:
    return _module(cls) if cls.__qualname__ == "Config" else cls.__qualname__


def classes(kind: Any) -> dict[str, type]:
    """Config classes of a union, or of a role of layers, by kind; empty where the field's class
    needs no tag.
    """
    if (role := _role(kind)) is not None:
        return {name: known.config for name, known in kinds.names(role).items()}
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    found = [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]
    return {_kind(c): c for c in found} if len(found) > 1 else {}


def _role(kind: Any) -> type[Kind] | None:
    """The role of the layers that a field takes; None: it takes no layers."""
    return get_args(kind)[1] if get_origin(kind) is Annotated else None


def _encode(kind: Any, value: Any, at: str) -> Any:
    if isinstance(value, Sublayers):
        return {name: _encode_layer(config) for name, config in value.items()}
    if _role(kind) is not None:
        return _encode_layer(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls, tagged = type(value), classes(kind)
        if cls not in (tagged.values() or (kind, *get_args(kind))):
            raise ValueError(
                f"{at} is a {name_of(cls)}, which is not among the classes of that field: it would "
                "be read back as another; register a kind of layer of its own "
                "(k31fn.layers.kinds)"
            )
        assert not tagged or _KIND not in _fields(cls), f"{name_of(cls)}.{_KIND} is the tag's name"
        return {_KIND: _kind(cls), **to_dict(value)} if tagged else to_dict(value)
    if isinstance(value, tuple):
        elements = _element_kinds(_tuple_of(kind), len(value))
        return [_encode(k, v, at) for k, v in zip(elements, value, strict=True)]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    assert isinstance(value, _PLAIN), f"a config field cannot be a {type(value).__name__}"
    return value


def _encode_layer(config: Any) -> dict[str, Any]:
    return {_KIND: kinds.kind_of(config).name, **to_dict(config)}


def _decode(kind: Any, value: Any, at: str) -> Any:
    origin = get_origin(kind)
    if kind is Sublayers:
        return _decode_sublayers(value, at)
    if (role := _role(kind)) is not None:
        return _decode_layer(value, at, role)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, value, at)
    if origin is Literal:
        if not any(type(value) is type(a) and value == a for a in get_args(kind)):
            raise ValueError(f"{at}={value!r} must be one of {list(get_args(kind))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(at, value, "a list")
        elements = _element_kinds(kind, len(value))
        if len(elements) != len(value):
            raise ValueError(
                f"{at}={value!r} must have {len(elements)} elements, it has {len(value)}"
            )
        decoded = []
        for number, (element, data) in enumerate(zip(elements, value, strict=True)):
            decoded.append(_decode(element, data, f"{at}[{number}]"))
        return tuple(decoded)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, at)
    if kind is torch.dtype:
        return _decode_dtype(value, at)
    if kind is float and type(value) is int:
        return float(value)
    assert kind in _PLAIN, f"{at}: a config field cannot be of type {kind}"
    if type(value) is not kind:
        raise _wrong(at, value, "null" if kind is type(None) else kind.__name__)
    return value


def _decode_dataclass(cls: type[_T], data: Any, at: str) -> _T:
    if not isinstance(data, dict):
        raise _wrong(at or name_of(cls), data, f"the fields of {name_of(cls)}")
    known = _fields(cls)
    if unknown := [name for name in data if name not in known]:
        raise ValueError("; ".join(_unknown(_join(at, name), name, cls, known) for name in unknown))
    required = {
        f.name
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := [name for name in known if name in required and name not in data]:
        raise ValueError(
            f"{name_of(cls)} lacks {', '.join(_join(at, name) for name in missing)}; no default: "
            "set it"
        )
    return cls(
        **{name: _decode(known[name], value, _join(at, name)) for name, value in data.items()}
    )


def _decode_sublayers(value: Any, at: str) -> Sublayers:
    if not isinstance(value, dict):
        raise _wrong(at, value, "configs of layers by name")
    configs = {}
    for name, data in value.items():
        configs[name] = _decode_layer(data, _join(at, name), TokenMixer, ChannelMixer)
    return Sublayers(**configs)


def _decode_layer(value: Any, at: str, *roles: type[Kind]) -> Any:
    """A layer's config by the registered name of its kind."""
    if not isinstance(value, dict):
        raise _wrong(at, value, "the fields of a layer's config with its kind")
    name = value.get(_KIND)
    kind = kinds.named(name)
    if not isinstance(kind, roles):
        known = ", ".join(n for role in roles for n in kinds.names(role))
        raise ValueError(
            f"{_join(at, _KIND)}={name!r} is no registered kind; registered here are {known}. A "
            "config.json runs no code: go on from the recipe that registers the kind, with "
            "train.py RECIPE.py --resume auto, or sample with --recipe RECIPE.py"
        )
    return _decode_dataclass(kind.config, {n: v for n, v in value.items() if n != _KIND}, at)


def _decode_union(kind: Any, value: Any, at: str) -> Any:
    """By the tag where several classes are possible, else the member that fits the value's type."""
    tagged, members = classes(kind), get_args(kind)
    if tagged and isinstance(value, dict):
        if value.get(_KIND) not in tagged:
            raise ValueError(
                f"{_join(at, _KIND)}={value.get(_KIND)!r} must be one of {sorted(tagged)}"
            )
        return _decode_dataclass(
            tagged[value[_KIND]], {n: v for n, v in value.items() if n != _KIND}, at
        )
    for member in members:
        if member is type(value) or (dataclasses.is_dataclass(member) and isinstance(value, dict)):
            return _decode(member, value, at)
    rest = [m for m in members if not dataclasses.is_dataclass(m)]
    for member in rest:
        try:
            return _decode(member, value, at)
        except ValueError:
            continue
    raise _wrong(at, value, " or ".join(_spell(m) for m in members))


def _decode_dtype(value: Any, at: str) -> torch.dtype:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise _wrong(at, value, "the name of a torch dtype, such as 'bfloat16'")
    return dtype


def _tuple_of(kind: Any) -> Any:
    """The tuple among the members of ``kind``."""
    return next((k for k in (kind, *get_args(kind)) if get_origin(k) is tuple), tuple[Any, ...])


def _element_kinds(kind: Any, length: int) -> tuple[Any, ...]:
    args = get_args(kind)
    return (args[0],) * length if len(args) == 2 and args[1] is Ellipsis else args


def _unknown(path: str, name: str, cls: type, known: dict[str, Any]) -> str:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return (
        f"{path} is not a field of {name_of(cls)}; nearest: "
        f"{', '.join(nearest) or ', '.join(known)}"
    )


def _wrong(at: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{at}={value!r} ({type(value).__name__}) must be {expected}")


def _spell(kind: Any) -> str:
    if kind is type(None):
        return "null"
    return (
        name_of(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type)
        else getattr(kind, "__name__", str(kind))
    )


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
