"""What a config's model consists of: layers, parameters, bytes. ``python -m k31fn.inspect
configs/k31_pro.py``.

Everything comes from the specs; no weight is allocated. Counting rules:

* Active parameters of a token: all but the embedding table, of which a row is looked up, the routed
  experts that it is not sent to, and the vision tower with its projector, which see images and not
  tokens. The head counts.
* Weights in the dtype of their spec: bfloat16, and the float32 islands.
* AdamW keeps a float32 master copy of each bfloat16 weight, and two moments in float32. Muon keeps
  the master copy and one momentum for matrices; the other weights stay with AdamW. Frozen weights
  have neither.

With a mesh (``--mesh.fsdp 8 --mesh.tp 2``) also what one of its ranks holds, in the dtypes of the
trainer, and what it sends in a step: :mod:`k31fn.trainer.forecast` runs that rank's step on meta
tensors, and tells from such runs what it needs (``--memory``). Rows have images if the config's
recipe says how many patches (``data.patches``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from k31fn import commands, config, model, regular_files, tree
from k31fn.config.mesh_checks import check_split
from k31fn.layers import kinds
from k31fn.model.parts import find_part
from k31fn.model.parts import parts as model_parts
from k31fn.parallel.mesh import Mesh
from k31fn.params import ParamSpec
from k31fn.trainer import folder
from k31fn.trainer.forecast.rank_report import render_rank, show_bytes

__all__ = ["main"]


def __dir__() -> list[str]:
    return __all__


# Parts that no token's computation goes through (see the counting rules above).
_NOT_ACTIVE = ("embedding", "vision tower", "projector")


@dataclass(frozen=True)
class _Summary:
    """Counts of a model.

    Attributes:
        attention: kind of attention of each layer.
        ffn: kind of feed-forward of each layer.
        opens: layers at which an AttnRes block opens, counted from 0.
        parts: parameters by part; those that the model has.
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


def _summarise(cfg: model.Config) -> _Summary:
    """Counts the model that ``cfg`` describes."""
    layers = model.layer_configs(cfg)
    attention, ffn = _layer_titles(cfg)
    part = find_part(cfg)
    leaves = tree.flatten_with_paths(model.specs(cfg))
    parts = Counter[str]()
    stored = Counter[torch.dtype]()
    active = gradient_bytes = adamw_bytes = muon_bytes = 0
    for path, spec in leaves:
        name = part(path)
        parts[name] += spec.numel
        stored[spec.dtype] += spec.numel * spec.dtype.itemsize
        if name not in _NOT_ACTIVE:
            active += _active(spec, cfg)
        if "frozen" not in spec.tags:
            # gradients are summed in float32 whatever the weight's dtype is
            gradient_bytes += 4 * spec.numel
            adamw_bytes += _optimiser_bytes(spec, moments=2)
            muon_bytes += _optimiser_bytes(spec, moments=1 if "matrix" in spec.tags else 2)
    return _Summary(
        attention=attention,
        ffn=ffn,
        opens=tuple(i for i, layer in enumerate(layers) if layer.opens_block),
        parts={name: parts[name] for name in model_parts(cfg) if name in parts},
        total=sum(parts.values()),
        active=active,
        weight_bytes=dict(sorted(stored.items(), key=lambda item: item[0].itemsize)),
        gradient_bytes=gradient_bytes,
        adamw_bytes=adamw_bytes,
        muon_bytes=muon_bytes,
    )


def _layer_titles(cfg: model.Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the token mixer and the channel mixer of each layer are called."""
    mixers, ffns = [], []
    for layer in model.layer_configs(cfg):
        mixers.append(kinds.kind_of(layer.mixer).title)
        ffns.append(kinds.kind_of(layer.ffn).title)
    return tuple(mixers), tuple(ffns)


def _active(spec: ParamSpec, cfg: model.Config) -> int:
    if "expert" not in spec.tags:
        return spec.numel
    # a token goes to top_k of the experts, which all have the same shapes
    experts = model.experts(cfg)
    return spec.numel * experts.top_k // experts.num_experts


def _optimiser_bytes(spec: ParamSpec, *, moments: int) -> int:
    # a float32 weight is its own master copy
    master = 0 if spec.dtype.itemsize >= 4 else 4
    return spec.numel * (master + 4 * moments)


def _pattern(kinds: Sequence[str]) -> str:
    """A sequence with its repetitions counted: ``23 x (KDA KDA KDA DSA) DSA``."""
    pieces = []
    at = 0
    while at < len(kinds):
        # the longest stretch from here that is a unit repeated; of as long ones the shortest unit
        best, count = 1, 1
        for period in range(1, (len(kinds) - at) // 2 + 1):
            repeats = _repeats(kinds[at:], period)
            if repeats > 1 and repeats * period > best * count:
                best, count = period, repeats
        unit = " ".join(kinds[at : at + best])
        if best > 1:
            unit = f"({unit})"
        pieces.append(unit if count == 1 else f"{count} x {unit}")
        at += best * count
    return ", ".join(pieces)


def _repeats(kinds: Sequence[str], period: int) -> int:
    """How often the first ``period`` of them come one after the other."""
    repeats = 1
    while kinds[:period] == kinds[repeats * period : (repeats + 1) * period]:
        repeats += 1
    return repeats


def _render(summary: _Summary) -> str:
    """The summary as a table of text."""
    lines = [
        f"layers      {len(summary.attention)}: {_tally(summary.attention)}; {_tally(summary.ffn)}",
        f"attention   {_pattern(summary.attention)}",
        f"ffn         {_pattern(summary.ffn)}",
    ]
    if summary.opens:
        lines.append(f"AttnRes     blocks open at layers {', '.join(map(str, summary.opens))}")
    lines += ["", f"{'parameters':<24}{'':>22}{'share':>12}"]
    for name, count in summary.parts.items():
        lines.append(f"  {name:<22}{count:>22,}{100 * count / summary.total:>11.2f}%")
    lines.append(f"  {'total':<22}{summary.total:>22,}{_short(summary.total):>12}")
    lines.append(f"  {'active per token':<22}{summary.active:>22,}{_short(summary.active):>12}")
    sizes = []
    for dtype, size in summary.weight_bytes.items():
        sizes.append((f"weights, {str(dtype).removeprefix('torch.')}", size))
    sizes.append(("gradients, float32", summary.gradient_bytes))
    sizes.append(("AdamW state", summary.adamw_bytes))
    sizes.append(("Muon + AdamW state", summary.muon_bytes))
    lines += ["", "bytes"]
    for name, size in sizes:
        lines.append(f"  {name:<22}{size:>22,}{show_bytes(size):>12}")
    return "\n".join(lines)


def _tally(kinds: Sequence[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())


def _short(count: int) -> str:
    """``2,779.66B``; millions below a billion."""
    return f"{count / 1e9:,.2f}B" if count >= 1e9 else f"{count / 1e6:,.2f}M"


@dataclass(frozen=True)
class _InspectOptions:
    """A mesh, and the step that is run on it.

    Attributes:
        mesh: ranks of each view.
        pipeline: schedule of ``mesh.pp``.
        batch_size: rows of a step; 0: the recipe's, or one per data rank and micro-batch.
        length: tokens of a row; 0: the recipe's, or 8192.
        micro_batches: pieces of a step; 0: the recipe's, or one per rank of the pipeline.
        compute: dtype of activations; if empty, the recipe's, or bfloat16.
        optimizer: muon or adamw; if empty, the recipe's, or muon.
        memory: also what a rank needs in a step (half a minute for a model of full width; not with
            a pipeline).
    """

    mesh: Mesh = field(default_factory=Mesh)
    pipeline: config.Pipeline = field(default_factory=config.Pipeline)
    batch_size: int = 0
    length: int = 0
    micro_batches: int = 0
    compute: str = ""
    optimizer: str = ""
    memory: bool = False

    def __post_init__(self) -> None:
        if self.memory and self.mesh.pp > 1:
            raise ValueError(
                f"memory with mesh.pp={self.mesh.pp}: stages are not predicted; set mesh.pp=1"
            )


def _recipe(path: Path, cfg: model.Config, options: _InspectOptions) -> config.Recipe:
    """The step that the options describe, of the config's recipe if it has one."""
    o = options
    # A config of a model alone is inspected under a usual recipe, with a row for each data rank and
    # micro-batch.
    try:
        base = config.load_recipe(path)
    except ValueError:
        micro_batches = o.micro_batches or o.mesh.pp
        rows = o.mesh.dp * o.mesh.fsdp * micro_batches  # the fewest that split evenly
        base = config.Recipe(
            "inspect", cfg, batch_size=rows, length=8192, compute="bfloat16", remat="layer"
        )
    # one replace for all: the checks of Recipe must see mesh, rows and pieces together
    optimizer = dataclasses.replace(base.optimizer, kind=o.optimizer or base.optimizer.kind)
    return dataclasses.replace(
        base,
        mesh=o.mesh,
        pipeline=o.pipeline,
        batch_size=o.batch_size or base.batch_size,
        length=o.length or base.length,
        micro_batches=o.micro_batches
        or (o.mesh.pp if base.name == "inspect" else base.micro_batches),
        compute=o.compute or base.compute,
        optimizer=optimizer,
    )


_USAGE = """usage: python -m k31fn.inspect CONFIG [--mesh.fsdp 8 --mesh.tp 2 ...]

CONFIG is a Python file that defines model(), such as configs/k31_pro.py, the config.json of a run,
its folder, or a folder of runs: the newest of them. With --help after it, all options are listed.
"""


@commands.outlives_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary of a config file; returns the exit status, 2 if there is no such config or
    mesh.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    if not args or args[0].startswith("-"):
        print(_USAGE, end="", file=sys.stderr)
        return 0 if args and args[0] in ("-h", "--help") else 2
    try:
        path = regular_files.path(args[0], "CONFIG")
        if path.is_dir():
            path = folder.resolve(path) / folder.CONFIG
        cfg = config.load(path)  # without a mesh a model is enough
        options = config.override(
            _InspectOptions(), args[1:], prog=f"python -m k31fn.inspect {args[0]}"
        )
        # without options nothing of a rank is shown, which would take seconds
        recipe = _recipe(path, cfg, options) if args[1:] else None
        check_split(options.mesh, cfg)
    except (ValueError, ImportError) as e:
        commands.print_own_traceback(e)
        print(f"k31fn.inspect: {regular_files.shown(e)}", file=sys.stderr)
        return 2
    print(_render(_summarise(cfg)))
    if recipe is not None:
        print()
        print(render_rank(recipe, needed=options.memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
