"""Which part of the model a parameter belongs to: what counts, norms and costs are grouped by."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from k31fn.layers import kda, latent_moe, mhc
from k31fn.model.config import Config, layer_configs

__all__ = ["PARTS", "find_part"]

# By path, the first that fits; {kda}, {full} and {dense} stand for the numbers of these layers,
# {AttnRes} and {mHC} for the paths of what joins layers, if it is that.
_PATTERNS = (
    ("embedding", r"embedding\..*"),
    ("KDA", r"layers\.{kda}\.attn\..*"),
    ("indexer", r"layers\.{full}\.attn\.indexer\..*"),
    ("full attention", r"layers\.{full}\.attn\..*"),
    ("dense MLP", r"layers\.{dense}\.ffn\..*"),
    ("router", r"layers\.\d+\.ffn\.router\..*"),
    ("routed experts", r"layers\.\d+\.ffn\.experts\..*"),
    ("shared experts", r"layers\.\d+\.ffn\.shared\..*"),
    ("latent projections", r"layers\.\d+\.ffn\..*"),
    ("AttnRes", r"{AttnRes}"),
    ("mHC", r"{mHC}"),
    ("norms", r"layers\.\d+\.(attn|ffn)_norm\..*|final_norm\..*"),
    ("head", r"head(\..*)?"),
    ("MTP", r"mtp\..*"),
    ("vision tower", r"vision\..*"),
    ("projector", r"projector\..*"),
)
PARTS = tuple(name for name, _ in _PATTERNS)
_MIX = r"layers\.\d+\.(attn|ffn)_mix\..*|final_mix\..*"


def find_part(cfg: Config) -> Callable[[str], str]:
    """The function from the path of a parameter of this model to its part, one of :data:`PARTS`."""
    layers = layer_configs(cfg)
    numbers = {
        "{kda}": [i for i, c in enumerate(layers) if isinstance(c.attention, kda.Config)],
        "{full}": [i for i, c in enumerate(layers) if not isinstance(c.attention, kda.Config)],
        "{dense}": [i for i, c in enumerate(layers) if not isinstance(c.ffn, latent_moe.Config)],
    }
    mhc_used = isinstance(cfg.residual, mhc.Config)
    mixes = {"{AttnRes}": "(?!)" if mhc_used else _MIX, "{mHC}": _MIX if mhc_used else "(?!)"}
    rules = [
        (name, re.compile(mixes.get(text) or _with(text, numbers))) for name, text in _PATTERNS
    ]

    def part(path: str) -> str:
        name = next((name for name, rule in rules if rule.fullmatch(path)), None)
        assert name is not None, f"{path} belongs to no part of k31fn.model.parts"
        return name

    return part


def _with(text: str, numbers: dict[str, list[int]]) -> str:
    for key, layers in numbers.items():
        text = text.replace(key, _any_of(layers))
    return text


def _any_of(layers: Sequence[int]) -> str:
    return f"({'|'.join(map(str, layers)) or '(?!)'})"
