"""The ``config.json`` of earlier runs, as today's would have it."""

from __future__ import annotations

from typing import Any

__all__ = ["with_named_layers"]

_KINDS = {"kda": "kda", "dense": "mlp", "moe": "latent_moe"}  # had one class each, and no tag


def with_named_layers(recipe: Any) -> Any:
    """A recipe whose model had one slot for linear attention and one for full attention, with its
    layers by name; any other data as it is.

    Such a model said which layers have full attention, how many are dense from the first on, and
    whether there is a multi-token-prediction layer, which has full attention and experts. The names
    of the slots become the names of the layers.

    Raises:
        ValueError: one of those fields is missing or has a value that no such model had; names it.
    """
    old = recipe.get("model") if isinstance(recipe, dict) else None
    if not isinstance(old, dict) or "full_attention_layers" not in old:
        return recipe
    model = dict(old)
    if "num_layers" not in model:
        raise ValueError("model.num_layers is missing beside model.full_attention_layers; set it")
    num_layers = _count(model, "num_layers", 0)
    num_dense = _count(model, "num_dense_layers", 1)  # the default, which hand-written data omits
    num_mtp = _count(model, "num_mtp_layers", 0)
    full = _layer_numbers(model, "full_attention_layers", num_layers)
    layers = []
    for number in range(num_layers):
        mixer = "full_attention" if number in full else "kda"
        layers.append([mixer, "dense" if number < num_dense else "moe"])
    sublayers = {}
    for name in ("kda", "full_attention", "dense", "moe"):
        if name in model:
            tag = {"kind": _KINDS[name]} if name in _KINDS else {}
            fields = model.pop(name)
            if not isinstance(fields, dict):
                raise ValueError(f"model.{name}={fields!r} must be the fields of a layer's config")
            sublayers[name] = {**tag, **fields}
    mtp = ["full_attention", "moe"] if num_mtp else []
    return {**recipe, "model": {**model, "sublayers": sublayers, "layers": layers, "mtp": mtp}}


def _count(model: dict[str, Any], name: str, default: int) -> int:
    """The number of layers that the field says, taken out of ``model``."""
    value = model.pop(name, default)
    # type, not isinstance: true is an int of Python, and no number of layers
    if type(value) is not int or value < 0:
        raise ValueError(f"model.{name}={value!r} must be a number of layers, 0 or more")
    return value


def _layer_numbers(model: dict[str, Any], name: str, num_layers: int) -> list[int]:
    """The numbers of layers that the field lists, taken out of ``model``."""
    value = model.pop(name)
    numbers: list[Any] = value if isinstance(value, list) else [None]  # None is wrong below
    # one that is too large would be lost without a word, and the model another one
    wrong = [n for n in numbers if type(n) is not int or not 0 <= n < num_layers]
    if wrong:
        raise ValueError(
            f"model.{name}={value!r} must be a list of numbers of layers, from 0 and below "
            f"num_layers={num_layers}"
        )
    return numbers
