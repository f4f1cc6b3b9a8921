"""The two sides of a paired run: a recipe each, and the implementations that its operators are
computed by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from k31fn import model, tree
from k31fn.config import Recipe, override
from k31fn.kernels import choice
from k31fn.kernels.registry import use_impl

__all__ = ["OWN", "SHARED", "Side", "changed", "check_alike", "parse_side", "precise", "rounding"]

OWN = frozenset({"model", "optimizer", "micro_batches", "compute", "products", "master", "remat"})
"""Fields of a recipe that each side has for itself; of the model only what leaves its parameters as
they are.
"""

_ROWS = "both sides train on the same rows; set it for both, with --{flag}"
_BEGIN = "both sides train the same parameters from the same values; set it for both, with --{flag}"
_UNUSED = "a pair makes no use of it; leave it out"

SHARED = {
    **dict.fromkeys(("data", "seed", "batch_size", "length", "heldout_bytes"), _ROWS),
    **dict.fromkeys(("init", "trainable"), _BEGIN),
    "lora": "both sides train the same adapters of the same model; set it for both, in the config",
    "steps": "both sides take the same steps; set it for both, with --{flag}",
    "phases": "a pair runs one phase; leave it out",
    "name": "both sides write into one folder; set it for both, with --{flag}",
    **dict.fromkeys(("mesh", "pipeline"), "a pair runs on one device; leave it out"),
    **dict.fromkeys(("trackers", "eval_every", "eval_bytes"), _UNUSED),
    **dict.fromkeys(("checkpoint_every", "keep", "keep_every", "keep_best"), _UNUSED),
}
"""The other fields, and why a side cannot have one for itself."""

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

    def until(self, steps: int) -> Side:
        """The side in a run of so many steps."""
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, steps=steps))

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Inside, its operators are computed as it says."""
        with use_impl(**self.kernels):
            yield


def parse_side(name: str, words: Sequence[str], recipe: Recipe) -> Side:
    """The side that ``words`` describe: ``kernels=WHAT`` and ``FIELD=VALUE`` of the recipe.

    Raises:
        ValueError: a word of another form, a field given twice, an unknown implementation, or a
            value that the recipe refuses. An unknown field prints the nearest names and exits with
            status 2, as it does for ``train.py``.
    """
    given: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or not field:
            raise ValueError(
                f"--{name} {word!r} must be kernels=WHAT or FIELD=VALUE, such as remat=layer"
            )
        field = field.removeprefix("--").replace("_", "-")
        if field in given:
            raise ValueError(
                f"--{name} {field} is given twice, as {given[field]!r} and as {value!r}; give it "
                "once"
                + (
                    ", with commas: kernels=attn_res:triton,mhc_pre:reference"
                    if field == "kernels"
                    else ""
                )
            )
        given[field] = value
    chosen = choice.parse(given.pop("kernels", ""), f"--{name} kernels")
    fields = [
        argument
        for field, value in given.items()
        for argument in _arguments(name, recipe, field, value)
    ]
    return Side(
        name,
        override(recipe, fields, prog=f"--{name}"),
        chosen,
        " ".join(words) or "as the config says",
    )


def _arguments(name: str, recipe: Recipe, field: str, value: str) -> list[str]:
    """``FIELD=VALUE`` as it is written on a command line, where true and false are two flags."""
    present: Any = recipe
    for part in field.replace("-", "_").split("."):
        present = getattr(present, part, None)
    if not isinstance(present, bool):
        return [f"--{field}", value]
    if value not in ("true", "false"):
        raise ValueError(f"--{name} {field}={value!r} must be true or false")
    above, dot, last = field.rpartition(".")
    return [f"--{above}{dot}{'' if value == 'true' else 'no-'}{last}"]


def changed(old: Any, new: Any, path: str = "") -> dict[str, Any]:
    """The fields of ``new`` that are not as in ``old``, by path."""
    if type(old) is not type(new) or not dataclasses.is_dataclass(old):
        return {} if old == new else {path: new}
    found: dict[str, Any] = {}
    for f in dataclasses.fields(old):
        found |= changed(
            getattr(old, f.name), getattr(new, f.name), f"{path}.{f.name}" if path else f.name
        )
    return found


def check_alike(a: Side, b: Side, recipe: Recipe) -> None:
    """Refuses sides that cannot be compared.

    Args:
        a: side a.
        b: side b.
        recipe: what the fields that are not :data:`OWN` are in both.

    Raises:
        ValueError: they would see other rows or have other parameters, or one needs several
            devices, or has a field for itself that a pair takes from ``recipe``; names the field.
    """
    for side in (a, b):
        if side.recipe.mesh.world_size > 1:
            raise ValueError(
                f"--{side.name}: mesh has {side.recipe.mesh.world_size} ranks; a pair runs on one "
                "device"
            )
        if side.recipe.phases:
            raise ValueError(f"--{side.name}: a pair runs one phase; leave the recipe's phases out")
        for path, value in changed(recipe, side.recipe).items():
            if why := SHARED.get(path.split(".")[0]):
                raise ValueError(
                    f"--{side.name} {path}={value!r}: {why.format(flag=path.replace('_', '-'))}"
                )
    _check_parameters(a, b)


def _check_parameters(a: Side, b: Side) -> None:
    of_a, of_b = (dict(tree.flatten_with_paths(model.specs(side.recipe.model))) for side in (a, b))
    other = [
        p
        for p in {**of_a, **of_b}
        if p not in of_a or p not in of_b or of_a[p].shape != of_b[p].shape
    ]
    if other:
        raise ValueError(
            f"the sides have other parameters ({len(other)}, such as {other[0]}); a pair starts "
            "both from the same ones"
        )
    drawn = [p for p in of_a if (of_a[p].init, of_a[p].dtype) != (of_b[p].init, of_b[p].dtype)]
    if drawn:
        fields = ", ".join(
            f"{path}={value!r}" for path, value in changed(a.recipe.model, b.recipe.model).items()
        )
        raise ValueError(
            f"--b model ({fields}): the sides have other initial values ({len(drawn)}, such as "
            f"{drawn[0]}); a pair "
            "starts both from the same ones: set it for both"
        )


def precise(side: Side) -> Side:
    """The same computed by the references in the next wider dtype; the side itself if it is
    float64.
    """
    compute = _WIDER.get(side.recipe.compute)
    if compute is None:
        return side
    recipe = dataclasses.replace(side.recipe, compute=compute, master="float32", products="exact")
    return Side("exact", recipe, choice.parse("reference"), f"reference in {compute}")


def rounding(side: Side) -> float:
    """The relative rounding error of the side's dtype."""
    return torch.finfo(getattr(torch, side.recipe.compute)).eps
