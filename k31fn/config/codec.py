"""Configs as plain data and back, strictly and without running any code.

In the data a tuple is a list, a dtype its name (``"bfloat16"``), and a config whose field allows
several classes carries which one it is as ``"kind"``: of a layer, the name of its registered kind
(:mod:`k31fn.layers.kinds`); else the module for a class named Config, or the class name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import torch

from k31fn.layers import kinds
from k31fn.layers.kind import ChannelMixer, Kind, TokenMixer
from k31fn.model.sublayers import Sublayers

__all__ = ["classes", "from_dict", "to_dict"]

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
    data = {}
    for name, kind in _fields(type(config)).items():
        # all fields, also those with their default: a default may change, a run must not
        data[name] = _encode(kind, getattr(config, name), f"{_name_of(type(config))}.{name}")
    return data


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
    # of the others, computed in __post_init__, nothing is written or read
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _name_of(cls: type) -> str:
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
    role = _role(kind)
    if role is not None:
        # also those that a user's recipe has registered by now
        return {name: known.config for name, known in kinds.names(role).items()}
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    configs = [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]
    # one class beside () or None needs no tag: an object can only be of it
    return {_kind(cls): cls for cls in configs} if len(configs) > 1 else {}


def _role(kind: Any) -> type[Kind] | None:
    """The role of the layers that a field takes; None: it takes no layers."""
    return get_args(kind)[1] if get_origin(kind) is Annotated else None


def _encode(kind: Any, value: Any, at: str) -> Any:
    if isinstance(value, Sublayers):
        return {name: _encode_layer(config) for name, config in value.items()}
    if _role(kind) is not None:
        return _encode_layer(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        tagged = classes(kind)
        if cls not in (tagged.values() or (kind, *get_args(kind))):
            raise ValueError(
                f"{at} is a {_name_of(cls)}, which is not among the classes of that field: it "
                "would be read back as another; register a kind of layer of its own "
                "(k31fn.layers.kinds)"
            )
        assert not tagged or _KIND not in _fields(cls), f"{_name_of(cls)}.{_KIND} is the tag's name"
        return {_KIND: _kind(cls), **to_dict(value)} if tagged else to_dict(value)
    if isinstance(value, tuple):
        elements = _element_kinds(_tuple_of(kind), len(value))
        return [_encode(k, v, at) for k, v in zip(elements, value, strict=True)]
    if isinstance(value, torch.dtype):
        # by name, which a reader knows and no version of torch changes
        return str(value).removeprefix("torch.")
    if not isinstance(value, _PLAIN):
        raise ValueError(
            f"{at}={value!r} cannot be a {type(value).__name__}, which config.json does not give "
            "back; use a number, a string, a bool, a dtype, a tuple or a frozen dataclass"
        )
    return value


def _encode_layer(config: Any) -> dict[str, Any]:
    return {_KIND: kinds.kind_of(config).name, **to_dict(config)}


def _decode(kind: Any, value: Any, at: str) -> Any:
    origin = get_origin(kind)
    if kind is Sublayers:
        return _decode_sublayers(value, at)
    role = _role(kind)
    if role is not None:
        return _decode_layer(value, at, role)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, value, at)
    if origin is Literal:
        # the types too: True == 1
        allowed = get_args(kind)
        if value not in allowed or type(value) is not type(allowed[allowed.index(value)]):
            raise ValueError(f"{at}={value!r} must be one of {list(allowed)}")
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
        # JSON writes 1.0 as either; the other way round would lose digits
        with contextlib.suppress(OverflowError):
            return float(value)
        raise _wrong(at, value, "of a float's size")
    assert kind in _PLAIN, f"{at}: a config field cannot be of type {kind}"
    if type(value) is not kind:
        raise _wrong(at, value, "null" if kind is type(None) else kind.__name__)
    return value


def _decode_dataclass(cls: type[_T], data: Any, at: str) -> _T:
    if not isinstance(data, dict):
        raise _wrong(at or _name_of(cls), data, f"the fields of {_name_of(cls)}")
    known = _fields(cls)
    # Refused, not passed over: a field that is spelled wrong would leave its default in force.
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ValueError(_unknown(unknown, at, cls, known))
    missing = [_join(at, name) for name in _required(cls) if name not in data]
    if missing:
        raise ValueError(f"{_name_of(cls)} lacks {', '.join(missing)}; no default: set it")
    values = {}
    for name, value in data.items():
        values[name] = _decode(known[name], value, _join(at, name))
    return cls(**values)


def _required(cls: type) -> list[str]:
    """Fields without a default, in order."""
    names = []
    for f in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        no_default = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.init and no_default:
            names.append(f.name)
    return names


def _without_tag(data: dict[str, Any]) -> dict[str, Any]:
    untagged = dict(data)
    untagged.pop(_KIND, None)
    return untagged


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
    known = list(itertools.chain.from_iterable(kinds.names(role) for role in roles))
    at_kind = _join(at, _KIND)
    if _KIND not in value:
        raise ValueError(f"{at_kind} is missing; set it to one of {', '.join(known)}")
    name: Any = value[_KIND]
    if not isinstance(name, str):
        raise _wrong(at_kind, name, f"a name, one of {', '.join(known)}")
    kind = kinds.names(Kind).get(name)
    if kind is None:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise ValueError(
            f"{at_kind}={name!r} is no registered kind{hint}; registered here are "
            f"{', '.join(known)}. A config.json runs no code: go on with train.py RUN/config.json "
            "--recipe RECIPE.py, the file that registers the kind (k31fn.sample takes --recipe too)"
        )
    if not isinstance(kind, roles):
        raise ValueError(f"{at_kind}={name!r} {kinds.wrong_role(kind, *roles)}")
    return _decode_dataclass(kind.config, _without_tag(value), at)


def _decode_union(kind: Any, value: Any, at: str) -> Any:
    """By the tag where several classes are possible, else the member that fits the value's type."""
    tagged = classes(kind)
    members = get_args(kind)
    if tagged and isinstance(value, dict):
        tag = value.get(_KIND)
        # a list cannot be looked up: it has no hash
        if not isinstance(tag, str) or tag not in tagged:
            raise ValueError(f"{_join(at, _KIND)}={tag!r} must be one of {sorted(tagged)}")
        return _decode_dataclass(tagged[tag], _without_tag(value), at)
    # first by type, so that an error inside a part names the field in it
    for member in members:
        if member is type(value) or (dataclasses.is_dataclass(member) and isinstance(value, dict)):
            return _decode(member, value, at)
    # then what is left, such as a list for a tuple or an integer for a float
    for member in members:
        if dataclasses.is_dataclass(member):
            continue
        with contextlib.suppress(ValueError):
            return _decode(member, value, at)
    raise _wrong(at, value, " or ".join(map(_spell, members)))


def _decode_dtype(value: Any, at: str) -> torch.dtype:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise _wrong(at, value, "the name of a torch dtype, such as 'bfloat16'")
    return dtype


def _tuple_of(kind: Any) -> Any:
    """The tuple among the members of ``kind``."""
    for member in (kind, *get_args(kind)):
        if get_origin(member) is tuple:
            return member
    return tuple[Any, ...]


def _element_kinds(kind: Any, length: int) -> tuple[Any, ...]:
    args = get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args


def _unknown(names: Sequence[str], at: str, cls: type, known: dict[str, Any]) -> str:
    texts = []
    for name in names:
        nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        listed = ", ".join(nearest or known)  # all of them where none is near
        texts.append(f"{_join(at, name)} is not a field of {_name_of(cls)}; nearest: {listed}")
    return "; ".join(texts)


def _wrong(at: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{at}={value!r} ({type(value).__name__}) must be {expected}")


def _spell(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _name_of(kind)
    return getattr(kind, "__name__", str(kind))


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
