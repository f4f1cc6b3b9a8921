"""The two sides of a paired run: a recipe each, and the implementations that its operators are computed by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from k31fn import model, tree
from k31fn.config import Recipe, override
from k31fn.kernels import choice
from k31fn.kernels.registry import use_impl

__all__ = ["Side", "check_alike", "parse_side", "precise", "rounding"]

_SAME = ("data", "seed", "batch_size", "length")  # what gives both sides the same rows
_WIDER = {"bfloat16": "float32", "float32": "float64"}


@dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes:
        name: "a" or "b".
        recipe: what it trains.
        kernels: implementation by op; the others are the device's own.
        text: how it was asked for.
    """

    name: str
    recipe: Recipe
    kernels: dict[str, str]
    text: str

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Inside, its operators are computed as it says."""
        with use_impl(**self.kernels):
            yield


def parse_side(name: str, words: Sequence[str], recipe: Recipe) -> Side:
    """The side that ``words`` describe: ``kernels=WHAT`` and ``FIELD=VALUE`` of the recipe.

    Raises:
        ValueError: a word of another form, an unknown implementation, or a value that the recipe refuses. An unknown
            field prints the nearest names and exits with status 2, as it does for ``train.py``.
    """
    kernels, fields = "", []
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or not field:
            raise ValueError(f"--{name} {word!r} must be kernels=WHAT or FIELD=VALUE, such as remat=layer")
        if field == "kernels":
            kernels = value
        else:
            fields += [f"--{field.removeprefix('--')}", value]
    chosen = choice.parse(kernels, f"--{name} kernels")
    return Side(name, override(recipe, fields, prog=f"--{name}"), chosen, " ".join(words) or "as the config says")


def check_alike(a: Side, b: Side) -> None:
    """Refuses sides that cannot be compared.

    Raises:
        ValueError: they would see other rows or have other parameters, or one needs several devices; names the field.
    """
    for side in (a, b):
        if side.recipe.mesh.world_size > 1:
            raise ValueError(f"--{side.name}: mesh has {side.recipe.mesh.world_size} ranks; a pair runs on one device")
        if side.recipe.phases:
            raise ValueError(f"--{side.name}: a pair runs one phase; leave the recipe's phases out")
    for field in _SAME:
        if getattr(a.recipe, field) != getattr(b.recipe, field):
            raise ValueError(
                f"{field} differs between the sides; both train on the same rows: set it for both, with --{field}"
            )
    shapes = [{p: s.shape for p, s in tree.flatten_with_paths(model.specs(x.recipe.model))} for x in (a, b)]
    other = [path for path in {**shapes[0], **shapes[1]} if shapes[0].get(path) != shapes[1].get(path)]
    if other:
        raise ValueError(
            f"the sides have other parameters ({len(other)}, such as {other[0]}); a pair starts both from the same ones"
        )
    if a.recipe.trainable != b.recipe.trainable:
        raise ValueError("trainable differs between the sides, so they have other gradients; set it for both")


def precise(side: Side) -> Side:
    """The same computed by the references in the next wider dtype; the side itself if it is float64."""
    compute = _WIDER.get(side.recipe.compute)
    if compute is None:
        return side
    recipe = dataclasses.replace(side.recipe, compute=compute)
    return Side("exact", recipe, choice.parse("reference"), f"reference in {compute}")


def rounding(side: Side) -> float:
    """The relative rounding error of the side's dtype."""
    return torch.finfo(getattr(torch, side.recipe.compute)).eps
