"""Which part of the model a parameter belongs to: what counts, norms and costs are grouped by."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from k31fn.layers import kinds
from k31fn.layers.kind import Kind
from k31fn.model.config import Config, layer_configs

__all__ = ["find_part", "parts"]

# Outside of the sublayers, by path. Those inside are called what their kinds say, and what joins
# them what the residual scheme does.
_ENDS = (
    ("norms", r"layers\.\d+\.(attn|ffn)_norm\..*|final_norm\..*"),
    ("head", r"head(\..*)?"),
    ("MTP", r"mtp\..*"),
    ("vision tower", r"vision\..*"),
    ("projector", r"projector\..*"),
)
_ANY = ".*"
_MIX = re.compile(r"layers\.\d+\.(attn|ffn)_mix\..*|final_mix\..*")
_SUBLAYER = re.compile(r"layers\.(\d+)\.(attn|ffn)\.(.*)")


def parts(cfg: Config) -> tuple[str, ...]:
    """The parts that parameters of this model can belong to, in the order of its tables."""
    names = ["embedding"]
    for config in cfg.sublayers.values():
        for pattern, name in _patterns(kinds.kind_of(config)):
            names.append(name)
            if pattern == _ANY:
                break  # no path gets past it
    names.append(kinds.kind_of(cfg.residual).title)
    names.extend(dict(_ENDS))
    return tuple(dict.fromkeys(names))  # two sublayers of one kind are one part


def find_part(cfg: Config) -> Callable[[str], str]:
    """The function from the path of a parameter of this model to its part, one of :func:`parts`."""
    layers = layer_configs(cfg)
    scheme = kinds.kind_of(cfg.residual).title

    def part(path: str) -> str:
        if path.startswith("embedding."):
            return "embedding"
        inside = _SUBLAYER.fullmatch(path)
        if inside:
            number, which, rest = inside.groups()
            # By the layer's number: one path belongs to KDA in one layer and to DSA in another.
            layer = layers[int(number)]
            return _part_inside(layer.mixer if which == "attn" else layer.ffn, rest)
        if _MIX.fullmatch(path):
            return scheme
        for name, pattern in _ENDS:
            if re.fullmatch(pattern, path):
                return name
        # A new weight of the model that no row counts would be missing from every total.
        raise AssertionError(f"{path} belongs to no part of k31fn.model.parts")

    return part


def _part_inside(config: Any, path: str) -> str:
    """The part of a sublayer's parameter, by its path inside of the sublayer."""
    for pattern, name in _patterns(kinds.kind_of(config)):
        if re.fullmatch(pattern, path):
            return name
    raise AssertionError("the last pattern fits every path")


def _patterns(kind: Kind) -> tuple[tuple[str, str], ...]:
    """The kind's own patterns, then its title for what none of them fits."""
    return (*kind.parts, (_ANY, kind.title))
