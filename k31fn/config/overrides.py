"""Command-line arguments as typed overrides of the fields of a config."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

__all__ = ["override"]

_T = TypeVar("_T")


def override(config: _T, args: Sequence[str], *, prog: str, description: str = "") -> _T:
    """``config`` with fields replaced: ``--steps 30 --optimizer.peak-lr 1e-3 --model.moe.num-experts 16``.

    Where a field allows several classes (attention, residual), the config's own class stays and its fields can be set;
    a part that is absent (the vision of a model of text) stays so.
    A field declared with ``field(metadata={"flat": True})`` adds its own fields without its name before them.
    ``--help`` in ``args`` prints every field with its value and exits. An unknown or mistyped field prints what is
    wrong and the nearest names, and exits with status 2.

    Raises:
        ValueError: a value that the config refuses.
        ImportError: tyro is not installed (the ``train`` extra).
    """
    if not args:
        return config
    import tyro  # optional: reading a config needs no command line

    def flat(kind: type) -> Any:
        return Annotated[kind, tyro.conf.arg(name="")]

    plain = _plain(config, flat)
    return _like(config, tyro.cli(type(plain), default=plain, args=list(args), prog=prog, description=description))


def _plain(config: Any, flat: Any) -> Any:
    """A dataclass with the fields and values of ``config``, without its checks, whose every field has one class.

    Checks wait for the whole: changing ``hidden_size`` in one place before another must not fail.
    """
    cls = type(config)
    hints = typing.get_type_hints(cls)
    fields, values = [], {}
    for f in dataclasses.fields(cls):
        value = getattr(config, f.name)
        nested = dataclasses.is_dataclass(value)
        if value == () and any(dataclasses.is_dataclass(kind) for kind in typing.get_args(hints[f.name])):
            continue
        values[f.name] = _plain(value, flat) if nested else value
        kind = type(values[f.name]) if nested else hints[f.name]
        fields.append((f.name, flat(kind) if f.metadata.get("flat") else kind))
    mirror = dataclasses.make_dataclass(cls.__qualname__, fields, frozen=True)
    mirror.__doc__ = re.sub(r"(:\w+:)?`+", "", cls.__doc__ or "")  # help is not reStructuredText
    return mirror(**values)


def _like(config: Any, plain: Any) -> Any:
    """A config of the class of ``config``, and so on inside, with the values of ``plain``."""
    values = {}
    for f in dataclasses.fields(config):
        old = getattr(config, f.name)
        new = getattr(plain, f.name, old)
        values[f.name] = _like(old, new) if dataclasses.is_dataclass(old) else new
    return type(config)(**values)
