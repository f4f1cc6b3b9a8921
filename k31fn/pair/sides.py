"""The two sides of a paired run: a recipe each, and the implementations that its operators are
computed by.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from k31fn import model, tree
from k31fn.config.overrides import fields_of, override
from k31fn.config.recipe import Recipe
from k31fn.kernels import choice
from k31fn.kernels.registry import use_impl

__all__ = [
    "OWN",
    "SHARED",
    "Side",
    "changed_text",
    "check_alike",
    "differing",
    "parse_side",
    "precise",
]

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

# one step is enough: the reference's own error is 2^-16 of a bfloat16 side's, 2^-29 of a float32's
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
        """Computes operators inside as the side says."""
        with use_impl(**self.kernels):
            yield


def parse_side(name: str, words: Sequence[str], recipe: Recipe) -> Side:
    """The side that ``words`` describe: ``kernels=WHAT`` and ``FIELD=VALUE`` of the recipe.

    Raises:
        ValueError: a word of another form, a field given twice, an unknown implementation, or a
            value that the recipe refuses, or an unknown field. One inside of a part of the recipe
            prints the nearest names and exits with status 2, as it does for ``train.py``.
    """
    assigned: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or not field:
            raise ValueError(
                f"--{name} {word!r} must be kernels=WHAT or FIELD=VALUE, such as remat=layer"
            )
        # one spelling, so that peak_lr and peak-lr are seen to be given twice
        field = field.removeprefix("--").replace("_", "-")
        if field in assigned:
            commas = ", with commas: kernels=attn_res:triton,mhc_pre:reference"
            raise ValueError(
                f"--{name} {field} is given twice, as {assigned[field]!r} and as {value!r}; give "
                f"it once{commas if field == 'kernels' else ''}"
            )
        assigned[field] = value
    kernels = choice.parse(assigned.pop("kernels", ""), f"--{name} kernels")
    arguments = []
    for field, value in assigned.items():
        arguments += _arguments(name, recipe, field, value)
    text = " ".join(words) or "as the config says"
    # the parser's own errors send the reader to the help of this command
    changed = override(recipe, arguments, prog="python -m k31fn.pair CONFIG")
    return Side(name, changed, kernels, text)


def _arguments(name: str, recipe: Recipe, field: str, value: str) -> list[str]:
    """``FIELD=VALUE`` as it is written on a command line, where true and false are two flags."""
    # the field's present value says whether it is such a switch; an unknown one is left to the
    # command line's parser, which names the nearest
    present: Any = recipe
    path = field.replace("-", "_").split(".")
    known = ["kernels", *fields_of(recipe)]
    # the parser does not know kernels=, which is meant where it is spelled wrong
    if path[0] not in known:
        nearest = ", ".join(difflib.get_close_matches(path[0], known, n=3, cutoff=0.5) or known)
        raise ValueError(
            f"--{name} {field}={value!r}: {path[0]} is no field of the recipe; nearest: {nearest}"
        )
    for part in path:
        present = fields_of(present).get(part)
    if not isinstance(present, bool):
        return [f"--{field}", value]
    if value not in ("true", "false"):
        raise ValueError(f"--{name} {field}={value!r} must be true or false")
    above, dot, last = field.rpartition(".")
    return [f"--{above}{dot}{'' if value == 'true' else 'no-'}{last}"]


def _changed(old: Any, new: Any, path: str = "") -> dict[str, Any]:
    """The fields of ``new`` that are not as in ``old``, by path."""
    of_old = fields_of(old)
    of_new = fields_of(new)
    # another class is another choice as a whole (mhc.Config for attn_res.Config), not its fields
    if type(old) is not type(new) or not of_old or of_old.keys() != of_new.keys():
        return {} if old == new else {path: new}
    fields: dict[str, Any] = {}
    for name, value in of_old.items():
        fields |= _changed(value, of_new[name], f"{path}.{name}" if path else name)
    return fields


def changed_text(old: Any, new: Any) -> str:
    """The fields of :func:`_changed` as ``PATH=VALUE``, separated by commas."""
    return ", ".join(f"{path}={value!r}" for path, value in _changed(old, new).items())


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The paths that only one of the two has, or whose values are not equal."""
    return [path for path in {**a, **b} if a.get(path) != b.get(path)]


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
        for path, value in _changed(recipe, side.recipe).items():
            why = SHARED.get(path.split(".")[0])
            if why:
                raise ValueError(
                    f"--{side.name} {path}={value!r}: {why.format(flag=path.replace('_', '-'))}"
                )
    _check_parameters(a, b)


def _check_parameters(a: Side, b: Side) -> None:
    shapes: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for side in (a, b):
        shapes.append({})
        values.append({})
        for path, spec in tree.flatten_with_paths(model.specs(side.recipe.model)):
            shapes[-1][path] = spec.shape
            values[-1][path] = (spec.init, spec.dtype)
    other = differing(*shapes)
    if other:
        raise ValueError(
            f"the sides have other parameters ({len(other)}, such as {other[0]}); a pair starts "
            "both from the same ones"
        )
    drawn = differing(*values)
    if drawn:
        # a model's field can change them without changing a shape, such as a standard deviation
        raise ValueError(
            f"--b model ({changed_text(a.recipe.model, b.recipe.model)}): the sides have other "
            f"initial values ({len(drawn)}, such as {drawn[0]}); a pair starts both from the same "
            "ones: set it for both"
        )


def precise(side: Side) -> Side:
    """The side as the references compute it in the next wider dtype; itself if it is float64."""
    compute = _WIDER.get(side.recipe.compute)
    if compute is None:
        return side
    # exact products: against FP8 ones the error of a side would be that of its rounding to FP8
    recipe = dataclasses.replace(side.recipe, compute=compute, master="float32", products="exact")
    return Side("exact", recipe, choice.parse("reference"), f"reference in {compute}")
