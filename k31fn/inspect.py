"""What a config's model consists of: layers, parameters, bytes. ``python -m k31fn.inspect configs/k31_pro.py``.

Everything comes from the specs; no weight is allocated. Counting rules:

* Active parameters of a token: all but the embedding table, of which a row is looked up, and the routed experts that
  it is not sent to. The head counts.
* Weights in the dtype of their spec: bfloat16, and the float32 islands.
* AdamW keeps a float32 master copy of each bfloat16 weight, and two moments in float32. Muon keeps the master copy and
  one momentum for matrices; the other weights stay with AdamW. Frozen weights have neither.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k31fn import config, model, tree
from k31fn.layers import attn_res, dsa, kda, latent_moe
from k31fn.params import ParamSpec

__all__ = ["PARTS", "Summary", "main", "pattern", "render", "summarise"]

# Part of the model by path, the first that fits; {kda} and {full} stand for the numbers of these layers.
_PARTS = (
    ("embedding", r"embedding\..*"),
    ("KDA", r"layers\.{kda}\.attn\..*"),
    ("indexer", r"layers\.{full}\.attn\.indexer\..*"),
    ("full attention", r"layers\.{full}\.attn\..*"),
    ("dense MLP", r"layers\.{dense}\.ffn\..*"),
    ("router", r"layers\.\d+\.ffn\.router\..*"),
    ("routed experts", r"layers\.\d+\.ffn\.experts\..*"),
    ("shared experts", r"layers\.\d+\.ffn\.shared\..*"),
    ("latent projections", r"layers\.\d+\.ffn\..*"),
    ("AttnRes", r"layers\.\d+\.(attn|ffn)_mix\..*|final_mix\..*"),
    ("norms", r"layers\.\d+\.(attn|ffn)_norm\..*|final_norm\..*"),
    ("head", r"head"),
    ("MTP", r"mtp\..*"),
)
PARTS = tuple(name for name, _ in _PARTS)


@dataclass(frozen=True)
class Summary:
    """Counts of a model.

    Attributes:
        attention: kind of attention of each layer.
        ffn: kind of feed-forward of each layer.
        opens: layers at which an AttnRes block opens, counted from 0.
        parts: parameters by part; those in :data:`PARTS` that the model has.
        total: all parameters.
        active: parameters that take part in the computation for one token.
        weight_bytes: by dtype.
        gradient_bytes: of float32 gradients.
        adamw_bytes: optimiser state of AdamW on all weights.
        muon_bytes: optimiser state of Muon on matrices and AdamW on the rest.
    """

    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    opens: tuple[int, ...]
    parts: dict[str, int]
    total: int
    active: int
    weight_bytes: dict[torch.dtype, int]
    gradient_bytes: int
    adamw_bytes: int
    muon_bytes: int


def summarise(cfg: model.Config) -> Summary:
    """Counts the model that ``cfg`` describes."""
    layers = model.layer_configs(cfg)
    attention = tuple("KDA" if isinstance(c.attention, kda.Config) else _full(cfg) for c in layers)
    ffn = tuple("MoE" if isinstance(c.ffn, latent_moe.Config) else "dense" for c in layers)
    rules = _rules(attention, ffn)
    leaves = tree.flatten_with_paths(model.specs(cfg))
    parts, stored = Counter[str](), Counter[torch.dtype]()
    for path, spec in leaves:
        parts[_part(path, rules)] += spec.numel
        stored[spec.dtype] += spec.numel * spec.dtype.itemsize
    trained = [spec for _, spec in leaves if "frozen" not in spec.tags]
    return Summary(
        attention=attention,
        ffn=ffn,
        opens=tuple(i for i, c in enumerate(layers) if c.opens_block and isinstance(c.residual, attn_res.Config)),
        parts={name: parts[name] for name in PARTS if name in parts},
        total=sum(parts.values()),
        active=sum(_active(spec, cfg) for _, spec in leaves) - parts["embedding"],
        weight_bytes=dict(sorted(stored.items(), key=lambda item: item[0].itemsize)),
        gradient_bytes=sum(4 * spec.numel for spec in trained),
        adamw_bytes=sum(_optimiser_bytes(spec, moments=2) for spec in trained),
        muon_bytes=sum(_optimiser_bytes(spec, moments=1 if "matrix" in spec.tags else 2) for spec in trained),
    )


def _full(cfg: model.Config) -> str:
    return "DSA" if isinstance(cfg.full_attention, dsa.Config) else "MLA"


def _rules(attention: Sequence[str], ffn: Sequence[str]) -> list[tuple[str, re.Pattern[str]]]:
    numbers = {
        "{kda}": [i for i, kind in enumerate(attention) if kind == "KDA"],
        "{full}": [i for i, kind in enumerate(attention) if kind != "KDA"],
        "{dense}": [i for i, kind in enumerate(ffn) if kind == "dense"],
    }
    rules = []
    for name, text in _PARTS:
        for key, layers in numbers.items():
            text = text.replace(key, f"({'|'.join(map(str, layers)) or '(?!)'})")
        rules.append((name, re.compile(text)))
    return rules


def _part(path: str, rules: list[tuple[str, re.Pattern[str]]]) -> str:
    name = next((name for name, rule in rules if rule.fullmatch(path)), None)
    assert name is not None, f"{path} belongs to no part of k31fn.inspect"
    return name


def _active(spec: ParamSpec, cfg: model.Config) -> int:
    return spec.numel * cfg.moe.top_k // cfg.moe.num_experts if "expert" in spec.tags else spec.numel


def _optimiser_bytes(spec: ParamSpec, *, moments: int) -> int:
    master = 0 if spec.dtype.itemsize >= 4 else 4
    return spec.numel * (master + 4 * moments)


def pattern(kinds: Sequence[str]) -> str:
    """A sequence with its repetitions counted: ``23 x (KDA KDA KDA DSA) DSA``."""
    pieces, at = [], 0
    while at < len(kinds):
        best, count = 1, 1
        for period in range(1, (len(kinds) - at) // 2 + 1):
            repeats = 1
            while kinds[at : at + period] == kinds[at + repeats * period : at + (repeats + 1) * period]:
                repeats += 1
            if repeats > 1 and repeats * period > best * count:
                best, count = period, repeats
        unit = " ".join(kinds[at : at + best])
        pieces.append(unit if count == 1 else f"{count} x {unit}" if best == 1 else f"{count} x ({unit})")
        at += best * count
    return ", ".join(pieces)


def render(summary: Summary) -> str:
    """The summary as a table of text."""
    lines = [
        f"layers      {len(summary.attention)}: {_tally(summary.attention)}; {_tally(summary.ffn)}",
        f"attention   {pattern(summary.attention)}",
        f"ffn         {pattern(summary.ffn)}",
    ]
    if summary.opens:
        lines.append(f"AttnRes     blocks open at layers {', '.join(map(str, summary.opens))}")
    lines += ["", f"{'parameters':<24}{'':>22}{'share':>12}"]
    for name, count in summary.parts.items():
        lines.append(f"  {name:<22}{count:>22,}{100 * count / summary.total:>11.2f}%")
    lines.append(f"  {'total':<22}{summary.total:>22,}{_short(summary.total):>12}")
    lines.append(f"  {'active per token':<22}{summary.active:>22,}{_short(summary.active):>12}")
    sizes = {f"weights, {str(d).removeprefix('torch.')}": n for d, n in summary.weight_bytes.items()}
    sizes |= {"gradients, float32": summary.gradient_bytes, "AdamW state": summary.adamw_bytes}
    sizes |= {"Muon + AdamW state": summary.muon_bytes}
    lines += ["", "bytes"]
    lines += [f"  {name:<22}{size:>22,}{_bytes(size):>12}" for name, size in sizes.items()]
    return "\n".join(lines)


def _tally(kinds: Sequence[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())


def _short(count: int) -> str:
    """``2,779.66B``; millions below a billion."""
    return f"{count / 1e9:,.2f}B" if count >= 1e9 else f"{count / 1e6:,.2f}M"


def _bytes(size: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size / 1e3:,.2f} kB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary of a config file; returns the exit status, 2 if there is no such config."""
    parser = argparse.ArgumentParser(prog="python -m k31fn.inspect", description="what a config's model consists of")
    parser.add_argument("config", help="a Python file that defines model(), such as configs/k31_pro.py")
    path = parser.parse_args(arguments).config
    try:
        cfg = config.load(path)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(render(summarise(cfg)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
