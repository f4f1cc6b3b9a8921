"""Recipes and models from the files of ``configs/`` and of run folders."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from k31fn import model, regular_files, strict_json
from k31fn.config.codec import from_dict
from k31fn.config.earlier import with_named_layers
from k31fn.config.recipe import Recipe

__all__ = ["load", "load_recipe", "register_kinds"]

_T = TypeVar("_T")


def load(path: str | Path) -> model.Config:
    """The model of a config file (what its ``model()`` returns) or of a run's ``config.json``,
    which runs no code.

    Raises:
        ValueError: there is no such file, it is neither a Python file nor JSON of a recipe, or it
            defines no ``model()`` that returns a :class:`k31fn.model.Config`. An error raised by
            the file itself comes through.
    """
    if Path(path).suffix == ".json":
        return load_recipe(path).model
    return _call(path, "model", model.Config)


def load_recipe(path: str | Path) -> Recipe:
    """The recipe of a config file (what its ``train()`` returns) or of a run's ``config.json``,
    which runs no code.

    Raises:
        ValueError: as :func:`load`, or the JSON has an unknown, missing or wrong field; names it.
    """
    file = Path(path)
    if file.suffix != ".json":
        return _call(path, "train", Recipe)  # the user's own code, which they name
    _must_exist(file)
    # Infinity may stand in a config: a norm that does not clip. NaN is each field's to refuse.
    data = strict_json.load_object(file, not_finite=True)
    if "architectures" in data or "model_type" in data:
        raise ValueError(
            f"config file {str(file)!r} is of a checkpoint in Hugging Face's format, not of a run; "
            f"python -m k31fn.hf import {file.parent} CONFIG makes a run of it"
        )
    try:
        return from_dict(Recipe, with_named_layers(data))
    except ValueError as error:  # with the file's name, which it does not know
        raise ValueError(f"config file {str(file)!r}: {error}") from error


def register_kinds(path: str | Path) -> None:
    """Runs a recipe file for the kinds of layers that it registers; its values are not asked for.

    Raises:
        ValueError: there is no such file, or it is not a Python file. An error raised by the file
            itself comes through.
    """
    file = Path(path)
    _must_exist(file)
    if file.suffix != ".py":
        raise ValueError(
            f"recipe={str(file)!r} must be a Python file (.py) that registers kinds of layers"
        )
    _run(file.resolve())


def _call(path: str | Path, function: str, cls: type[_T]) -> _T:
    file = Path(path)
    _must_exist(file)
    # a config.json has a recipe and no functions; load_recipe takes it
    if file.suffix != ".py":
        raise ValueError(
            f"config file {str(file)!r} must be a Python file (.py) that defines {function}()"
        )
    build: Any = getattr(_run(file.resolve()), function, None)
    if not callable(build):
        raise ValueError(
            f"config file {str(file)!r} defines no {function}(); add `def {function}() -> "
            f"{_full_name(cls)}:`"
        )
    try:
        inspect.signature(build).bind()
    except TypeError as e:
        raise ValueError(
            f"config file {str(file)!r}: {function}() must need no argument: {e}"
        ) from e
    config = build()
    if not isinstance(config, cls):
        raise ValueError(
            f"config file {str(file)!r}: {function}() returned {_full_name(type(config))}, not "
            f"{_full_name(cls)}"
        )
    return config


def _run(file: Path) -> ModuleType:
    """The module that a config file makes, run anew each time; it may import its neighbours.

    It stays in ``sys.modules`` under a name of its own, where the field types of classes that it
    defines are looked up: the configs of a layer of the user's.
    """
    name = f"recipe {file}"
    loader = SourceFileLoader(name, str(file))
    try:
        loader.get_code(name)  # before it runs, so that these are not errors of what it does
    except (SyntaxError, ValueError) as e:  # ValueError: a zero byte
        raise ValueError(f"config file {str(file)!r} is not Python: {e}") from e
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None, f"{file} is no Python file"
    # there before it runs: a dataclass in it looks its own module up
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(file.parent))  # last: a neighbour hides no installed package
    try:
        loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def _must_exist(file: Path) -> None:
    if file.is_file():
        return
    if (file / "config.json").is_file():
        raise ValueError(
            f"{str(file)!r} is a run folder; its config is {str(file / 'config.json')!r}"
        )
    if file.is_dir():
        raise ValueError(
            f"{str(file)!r} is a folder; name a config in it, such as "
            f"{str(file / 'RUN' / 'config.json')!r}"
        )
    if file.exists():
        regular_files.check(file)  # which it is not
    folder = file.parent
    neighbours = sorted(folder.glob("*.py"))
    # configs/ too: who types a name alone most likely means one of those
    known = {p.stem: str(p) for p in (*Path("configs").glob("*.py"), *neighbours)}
    nearest = difflib.get_close_matches(file.stem, known, n=3, cutoff=0.6)
    hint = f"; nearest: {', '.join(known[n] for n in nearest)}" if nearest else ""
    here = ", ".join(p.name for p in neighbours) or "none"
    raise ValueError(f"config file {str(file)!r} does not exist; in its directory: {here}{hint}")


def _full_name(cls: type) -> str:
    return f"{cls.__module__.removesuffix('.config')}.{cls.__qualname__}"
