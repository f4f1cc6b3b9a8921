"""What one rank of a mesh holds, needs and sends in a step, as a table of text."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from k31fn import config, model
from k31fn.config.mesh_checks import split_share
from k31fn.layers import block
from k31fn.model.parts import find_part
from k31fn.model.parts import parts as model_parts
from k31fn.parallel.mesh import Mesh
from k31fn.trainer.forecast import memory
from k31fn.trainer.forecast.collective_volume import Volume, volumes
from k31fn.trainer.forecast.rank_weights import RankWeight, rank_weights

__all__ = ["render_rank", "show_bytes"]


def show_bytes(size: int) -> str:
    """The size in the unit that leaves few digits: ``21.90 GB``."""
    # powers of ten, as vendors count a device's memory
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size / 1e3:,.2f} kB"


def render_rank(recipe: config.Recipe, *, needed: bool = False) -> str:
    """What one rank of the recipe's mesh holds and sends in a step, and what it needs, as a table
    of text.
    """
    mesh = recipe.mesh
    # ranks at one place of the pipeline hold as much; of the places the fullest one counts
    ranks = [rank_weights(recipe, i) for i in range(mesh.pp)]
    most = max(range(mesh.pp), key=lambda i: _total_bytes(ranks[i]))
    lines = [_mesh_line(mesh)]
    if mesh.fsdp > 1:
        share = split_share(mesh, recipe.model)
        lines.append(
            f"fsdp        splits {share:.1%} of the parameters; each of its ranks holds all of "
            "the others"
        )
    stage = f" of stage rank {most}, which holds most" if mesh.pp > 1 else ""
    state = f"{recipe.optimizer.kind} state"
    title = f"bytes of a rank{stage}"
    lines += ["", f"{title:<42}{'weights':>12}{'gradients':>12}{state:>14}"]
    lines += _bytes_by_part(recipe.model, ranks[most])
    lines += ["", "parts of the weights, one layer of each kind"]
    lines += _shapes(recipe.model, ranks[most])
    plural = "" if recipe.micro_batches == 1 else "es"
    pieces = f"{recipe.micro_batches} micro-batch{plural}"
    step = (
        f"{recipe.batch_size} x {recipe.length} tokens, {pieces}, {recipe.compute}, remat "
        f"{recipe.remat}"
    )
    if needed:
        lines += [
            "",
            f"bytes that a rank needs in a step of {step} (k31fn.trainer.forecast.memory)",
        ]
        lines += _needed(memory.predict(recipe))
    lines += ["", f"sent by a rank in a step of {step}, balanced routes"]
    sent = volumes(recipe)
    busiest = max(range(mesh.pp), key=lambda i: sent[i].nbytes.total())
    if mesh.pp > 1:
        lines.append(f"  (stage rank {busiest}, which sends most)")
    lines += _sent(sent[busiest])
    return "\n".join(lines)


def _total_bytes(weights: Sequence[RankWeight]) -> int:
    return sum(x.weight + x.gradient + x.optimizer for x in weights)


def _mesh_line(mesh: Mesh) -> str:
    sizes = []
    for view, ranks in dataclasses.asdict(mesh).items():
        # ep is another view of the ranks of the others, and multiplies nothing
        if ranks > 1 and view != "ep":
            sizes.append(f"{view} {ranks}")
    experts = f", ep {mesh.ep}" if mesh.ep > 1 else ""
    return f"mesh        {' x '.join(sizes) or 'one rank'} = {mesh.world_size} ranks{experts}"


def _needed(needs: memory.Memory) -> list[str]:
    rows = (
        ("frozen weights", needs.frozen),
        ("trained weights", needs.trained),
        ("optimiser state", needs.optimizer),
        ("gradients", needs.gradients),
        ("two gathered layers", needs.gathered),
        ("activations, largest layer", needs.activations),
        ("total", needs.total),
    )
    return [f"  {text:<40}{show_bytes(size):>12}" for text, size in rows]


def _bytes_by_part(cfg: model.Config, rank: Sequence[RankWeight]) -> list[str]:
    part_of = find_part(cfg)
    sums: dict[str, Counter[str]] = {}
    # from the bytes of each weight: parts are split differently, so no total could be divided
    for x in rank:
        for part in (part_of(x.path), "total"):
            sums.setdefault(part, Counter()).update(
                weight=x.weight, gradient=x.gradient, optimizer=x.optimizer
            )
    lines = []
    for part in (*model_parts(cfg), "total"):
        if part in sums:  # a stage of a pipeline has not every part
            of_part = sums[part]
            weight, gradient, optimizer = (
                show_bytes(of_part[name]) for name in ("weight", "gradient", "optimizer")
            )
            lines.append(f"  {part:<40}{weight:>12}{gradient:>12}{optimizer:>14}")
    return lines


def _shapes(cfg: model.Config, rank: Sequence[RankWeight]) -> list[str]:
    """A line per weight, of the first layer of each kind that the rank has."""
    titles = [block.title(layer) for layer in model.layer_configs(cfg)]
    first: dict[str, int] = {}  # layer of each kind
    lines = []
    for x in rank:
        number = re.match(r"layers\.(\d+)\.", x.path)
        if number:
            i = int(number[1])
            if first.setdefault(titles[i], i) != i:
                continue
        # the tower's blocks are all of one kind
        if re.match(r"vision\.blocks\.[1-9]", x.path):
            continue
        split = ", ".join("*".join(dim) or "-" for dim in x.axes)
        lines.append(f"  {x.path:<40}{list(x.shape)!s:>22} -> {list(x.part)!s:<22} ({split})")
    return lines


def _sent(volume: Volume) -> list[str]:
    # a count of 0 is left where volumes were subtracted
    keys = [key for key in volume.calls if volume.calls[key]]
    keys.sort(key=lambda key: -volume.nbytes[key])
    lines = []
    for kind, axes in keys:
        calls, nbytes = volume.calls[kind, axes], volume.nbytes[kind, axes]
        lines.append(f"  {kind:<22}{' x '.join(axes):<28}{calls:>9,} calls{show_bytes(nbytes):>14}")
    return lines or ["  nothing"]
