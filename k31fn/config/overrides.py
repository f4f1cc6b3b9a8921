"""Command-line arguments as typed overrides of the fields of a config."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from k31fn.config import codec
from k31fn.layers import kinds
from k31fn.model.sublayers import Sublayers

__all__ = ["fields_of", "override"]

_T = TypeVar("_T")


def override(config: _T, args: Sequence[str], *, prog: str, description: str = "") -> _T:
    """``config`` with fields replaced: ``--steps 30 --optimizer.peak-lr 1e-3
    --model.moe.num-experts 16``.

    Where a field allows several classes (layers, the residual), the config's own class stays and
    its fields can be set, or another is chosen by its name as in the config's JSON, with all its
    default values: ``--model.residual mhc``. The name of its own class changes nothing. A part that
    is absent (the vision of a model of text) stays so. A field declared with
    ``field(metadata={"flat": True})`` adds its own fields without its name before them. ``--help``
    in ``args`` prints every field with its value and exits.

    Raises:
        ValueError: a field that there is not, with the nearest names; a value that is not of its
            type, or that the config refuses.
        ImportError: tyro is not installed (the ``train`` extra).
    """
    if not args:
        return config
    import tyro  # optional: reading a config needs no command line

    def flat(kind: type) -> Any:
        return Annotated[kind, tyro.conf.arg(name="")]

    config, args = _choose(config, args)
    if not args:
        return config
    # Through a mirror of the config: tyro would offer subcommands where a field allows several
    # classes, and build each part by itself, whose checks would see half of the changes.
    plain = _plain(config, flat)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            changed = tyro.cli(
                type(plain), default=plain, args=list(args), prog=prog, description=description
            )
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise ValueError(_in_one_line(errors.getvalue())) from None
    return _like(config, changed)


def _in_one_line(box: str) -> str:
    """What a frame of tyro's says, without its title; its sections apart by semicolons."""
    # drawn in ASCII where the output is not UTF-8
    rows = [row.strip("│ ") for row in box.splitlines()[1:]]
    return re.sub(r"(^| )╰?(─|-){3,}╯?( |$)", "; ", " ".join(rows)).strip("; ")


def _choose(config: _T, args: Sequence[str]) -> tuple[_T, list[str]]:
    """The config with the classes that arguments name, and the other arguments."""
    rest = list(args)
    for argument in args:
        name, _, value = argument.partition("=")
        path = name.removeprefix("--").replace("-", "_").split(".")
        if not name.startswith("--"):
            continue
        allowed, own = _classes_at(config, path)  # of what the arguments before have chosen
        if not allowed:
            continue  # a plain field, which tyro sets
        at = rest.index(argument)
        # "--name=value" is one argument, "--name value" two
        num_arguments, chosen = 1, value
        if not value:
            num_arguments = 2
            chosen = rest[at + 1] if at + 1 < len(rest) else ""
        if chosen not in allowed:
            raise ValueError(f"{name}: {chosen!r} must be one of {', '.join(sorted(allowed))}")
        # its own class changes nothing: its fields keep the values that the config gave them
        if allowed[chosen] is not own:
            config = _with(config, path, _defaults(allowed[chosen], f"{name} {chosen}"))
        del rest[at : at + num_arguments]
    return config, rest


def _defaults(cls: type, argument: str) -> Any:
    try:
        return cls()
    except TypeError as e:  # a field without a default
        raise ValueError(
            f"{argument}: {e}; it has no defaults, so write a config that sets it"
        ) from e


def _classes_at(config: Any, path: Sequence[str]) -> tuple[dict[str, type], type]:
    """The classes that a field allows, by name, if there are several and it is not absent; and its
    own.
    """
    hint = None
    for part in _full(config, path):
        inside = _fields(config)
        if part not in inside:
            return {}, type(None)
        hint = _hint(config, part)
        config = inside[part]
    return codec.classes(hint) if dataclasses.is_dataclass(config) else {}, type(config)


def fields_of(config: Any) -> dict[str, Any]:
    """The values inside of a config by the names that the command line has for them; empty for what
    is no config.
    """
    values = {}
    for name, value in _fields(config).items():
        if name in _flat_names(config):
            values |= fields_of(value)
        else:
            values[name] = value
    return values


def _fields(config: Any) -> dict[str, Any]:
    """The values directly inside of a config, by name."""
    if isinstance(config, Sublayers):
        return dict(config)
    if not dataclasses.is_dataclass(config):
        return {}
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _hint(config: Any, name: str) -> Any:
    """The declared type of the field of a config."""
    if isinstance(config, Sublayers):
        return Annotated[Any, type(kinds.kind_of(config[name]))]  # another kind of the same role
    return typing.get_type_hints(type(config), include_extras=True)[name]


def _flat_names(config: Any) -> list[str]:
    """The fields that add their own without their name."""
    if not dataclasses.is_dataclass(config):
        return []
    return [f.name for f in dataclasses.fields(config) if f.metadata.get("flat")]


def _with(config: Any, path: Sequence[str], value: Any) -> Any:
    """The config with the field at ``path`` replaced."""
    first, *rest = _full(config, path)
    inside = _fields(config)
    new = _with(inside[first], rest, value) if rest else value
    if isinstance(config, Sublayers):
        return Sublayers(**{**inside, first: new})
    return dataclasses.replace(config, **{first: new})


def _full(config: Any, path: Sequence[str]) -> list[str]:
    """The path of a field with the names of the flat fields on the way."""
    full: list[str] = []
    for part in path:
        inside = _fields(config)
        if part not in inside:
            for name in _flat_names(config):
                # a flat field may have a flat field: of a call, the recipe, and so on
                if part in fields_of(inside[name]):
                    return [*full, name, *_full(inside[name], path[len(full) :])]
        full.append(part)
        config = inside.get(part)
    return full


def _plain(config: Any, flat: Any) -> Any:
    """A dataclass with the fields and values of ``config``, without its checks, whose every field
    has one class.

    Checks wait for the whole: changing ``hidden_size`` in one place before another must not fail.
    """
    if isinstance(config, Sublayers):
        parts, types = {}, []
        for name, value in config.items():
            parts[name] = _plain(value, flat)
            types.append((name, type(parts[name])))
        return dataclasses.make_dataclass("Sublayers", types)(**parts)
    cls = type(config)
    hints = typing.get_type_hints(cls)
    fields, values = [], {}
    for f in dataclasses.fields(cls):
        value = getattr(config, f.name)
        nested = dataclasses.is_dataclass(value) or isinstance(value, Sublayers)
        allows_config = any(dataclasses.is_dataclass(k) for k in typing.get_args(hints[f.name]))
        if value == () and allows_config:
            continue  # an absent part has no fields to set, and stays absent
        # its own class alone: which one it is was settled by _choose
        values[f.name] = _plain(value, flat) if nested else value
        kind = type(values[f.name]) if nested else hints[f.name]
        fields.append((f.name, flat(kind) if f.metadata.get("flat") else kind))
    mirror = dataclasses.make_dataclass(cls.__qualname__, fields, frozen=True)
    # tyro reads a class's source in its module, for help and for what it says of an unknown option:
    # the package's is short and has no class; that of types.py, where mirrors are made, is long
    mirror.__module__ = "k31fn.config"
    mirror.__doc__ = re.sub(r"(:\w+:)?`+", "", cls.__doc__ or "")  # help is not reStructuredText
    return mirror(**values)


def _like(config: Any, plain: Any, at: str = "") -> Any:
    """A config of the class of ``config``, and so on inside, with the values of ``plain``.

    Args:
        config: or a part of one, or the value of a field.
        plain: as :func:`_plain` makes it.
        at: the option of the part, without ``--``; errors of its class name it.
    """
    if isinstance(config, Sublayers):
        layers = {}
        for name, old in config.items():
            layers[name] = _like(old, getattr(plain, name), _option(at, name))
        return Sublayers(**layers)
    if not dataclasses.is_dataclass(config):
        return plain
    values = {}
    for f in dataclasses.fields(config):
        old = getattr(config, f.name)
        inner = at if f.metadata.get("flat") else _option(at, f.name)
        values[f.name] = _like(old, getattr(plain, f.name, old), inner)  # old: an absent part
    try:
        return type(config)(**values)
    except ValueError as e:
        # most classes name themselves, as whoever builds them in code knows them
        if not at or str(e).startswith(at):
            raise
        raise ValueError(f"--{at}: {e}") from e


def _option(at: str, name: str) -> str:
    return ".".join([*filter(None, [at]), name.replace("_", "-")])
