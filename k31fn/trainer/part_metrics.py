"""What a step tells of the parts of the model: gradient norms by part, loads by layer, and how busy
devices are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from k31fn import device as devices
from k31fn import model, precision, tree
from k31fn.config.recipe import Recipe
from k31fn.model.flops import flops_per_token
from k31fn.model.parts import find_part, parts
from k31fn.parallel.axis import Axis, active
from k31fn.parallel.collectives import psum
from k31fn.parallel.mesh import MeshAxes
from k31fn.trainer.layout import Layout, lay_out

__all__ = ["Labels", "label", "make_measure"]


class Labels(NamedTuple):
    """What the numbers of :func:`make_measure` are, and what else holds for all steps of a phase.

    Attributes:
        names: in the order of the numbers.
        phase: number of the phase; -1: the run has none.
        utilisation: MFU of one token per second, over all ranks; 0: the devices' peak rate is not
            known.
    """

    names: tuple[str, ...] = ()
    phase: int = -1
    utilisation: float = 0.0


def label(recipe: Recipe, step: int, device: torch.device) -> Labels:
    """The labels of a step's numbers: ``grad_norm/PART``, then ``moe/load/LAYER``."""
    now = recipe.at(step)
    norms = [f"grad_norm/{part.replace(' ', '_').lower()}" for part in _parts(now)]
    loads = [f"moe/load/{layer}" for layer in model.moe_layers(now.model)]
    peak = devices.peak_rates(device)
    utilisation = 0.0
    if peak is not None:
        flops = flops_per_token(now.model, now.length, _trained(now))
        utilisation = flops / (peak.bf16_flops * now.mesh.world_size)
    return Labels((*norms, *loads), recipe.phase_of(step) if recipe.phases else -1, utilisation)


def _trained(recipe: Recipe) -> Literal["indexer", "adapters", "all"]:
    if recipe.trains_trunk:
        return "all"
    return "indexer" if recipe.trainable == "indexer" else "adapters"


def _parts(recipe: Recipe) -> list[str]:
    """Parts of the model in which anything is trained, on whatever rank."""
    part = find_part(recipe.model)
    leaves = tree.flatten_with_paths(lay_out(recipe, MeshAxes()).specs)
    trained = {part(path) for path, spec in leaves if "frozen" not in spec.tags}
    return [name for name in parts(recipe.model) if name in trained]


def make_measure(recipe: Recipe, layout: Layout) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """``measure(grads, load, like)``: the numbers that :func:`label` names, on the device and equal
    on all ranks.

    Of each part the 2-norm of ``grads``, those of the parameters that this rank holds, every
    element counted once; of each MoE layer its busiest expert's tokens over the mean, where
    ``load`` has those of this rank's layers over the data axes. ``like`` is a number of the
    numbers' dtype and device.

    Args:
        recipe: without phases.
        layout: of this rank.
    """
    part, names, stages = find_part(recipe.model), _parts(recipe), active(layout.axes.pp)
    places = dict(tree.flatten_with_paths(layout.placements))
    index = {
        path: names.index(part(path))
        for path, s in tree.flatten_with_paths(layout.specs)
        if "frozen" not in s.tags
    }
    layers = model.moe_layers(recipe.model)

    def norms(grads: Any, none: Tensor) -> Tensor:
        squares: dict[tuple[Axis, ...], list[list[Tensor]]] = {}
        for path, g in tree.flatten_with_paths(grads):
            axes = tuple(sorted(places[path].axes, key=lambda a: a.name)) if places else ()
            of_part = squares.setdefault(axes, [[] for _ in names])[index[path]]
            of_part.append(torch.linalg.vector_norm(g, dtype=precision.island(g.dtype)).square())
        sums = []
        for axes, found in squares.items():
            each = torch.stack(
                [
                    torch.stack(of_part).sum().to(none.dtype) if of_part else none
                    for of_part in found
                ]
            )
            sums.append(psum(each, axes) if axes else each)
        total = (
            torch.stack(sums).sum(0) if sums else none.expand(len(names))
        )  # a stage in which nothing is trained
        return (psum(total, stages) if stages else total).sqrt()

    def measure(grads: Any, load: Tensor, like: Tensor) -> Tensor:
        none, load = torch.zeros_like(like), load.to(like.dtype)
        ratio = load.amax(1) / load.mean(1).clamp(min=1) if len(load) else none.expand(0)
        if stages and layers:
            own = dict(zip(layout.moe_layers, ratio, strict=True))
            ratio = psum(torch.stack([own.get(layer, none) for layer in layers]), stages)
        return torch.cat([norms(grads, none), ratio])

    return measure
