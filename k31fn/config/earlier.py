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
    """
    old = recipe.get("model") if isinstance(recipe, dict) else None
    if not isinstance(old, dict) or "full_attention_layers" not in old:
        return recipe
    model = dict(old)
    full = model.pop("full_attention_layers")
    num_dense = model.pop("num_dense_layers", 1)  # 1 was the default, which hand-written data omits
    layers = []
    for number in range(model.pop("num_layers", 0)):
        mixer = "full_attention" if number in full else "kda"
        layers.append([mixer, "dense" if number < num_dense else "moe"])
    sublayers = {}
    for name in ("kda", "full_attention", "dense", "moe"):
        if name in model:
            tag = {"kind": _KINDS[name]} if name in _KINDS else {}
            sublayers[name] = {**tag, **model.pop(name)}
    mtp = ["full_attention", "moe"] if model.pop("num_mtp_layers", 0) else []
    return {**recipe, "model": {**model, "sublayers": sublayers, "layers": layers, "mtp": mtp}}
