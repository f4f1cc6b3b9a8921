"""Metrics of the model's parts: gradient norms by part, loads by layer, and their names."""

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
from k31fn.trainer.layout import RankLayout, trained_specs

__all__ = ["MetricLabels", "label", "make_measure"]


class MetricLabels(NamedTuple):
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


def label(recipe: Recipe, step: int, device: torch.device) -> MetricLabels:
    """The labels of a step's numbers: ``grad_norm/PART``, then ``moe/load/LAYER``."""
    now = recipe.at(step)
    norms = [f"grad_norm/{part.replace(' ', '_').lower()}" for part in _trained_parts(now)]
    loads = [f"moe/load/{layer}" for layer in model.moe_layers(now.model)]
    phase = recipe.phase_of(step) if recipe.phases else -1
    return MetricLabels((*norms, *loads), phase, _utilisation(now, device))


def _utilisation(recipe: Recipe, device: torch.device) -> float:
    peak = devices.peak_rates(device)
    if peak is None:
        return 0.0
    flops = flops_per_token(recipe.model, recipe.length, _what_is_trained(recipe))
    return flops / (peak.bf16_flops * recipe.mesh.world_size)


def _what_is_trained(recipe: Recipe) -> Literal["indexer", "adapters", "all"]:
    if recipe.trains_trunk:
        return "all"
    return "indexer" if recipe.trainable == "indexer" else "adapters"


def _trained_parts(recipe: Recipe) -> list[str]:
    """Parts of the model in which anything is trained, on whatever rank."""
    part_of = find_part(recipe.model)
    trained = set()
    # not this rank's specs: all ranks must measure the same parts, in one order
    for path, spec in tree.flatten_with_paths(trained_specs(recipe)):
        if "frozen" not in spec.tags:
            trained.add(part_of(path))
    return [name for name in parts(recipe.model) if name in trained]


def make_measure(layout: RankLayout) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """``measure(grads, load, like)``: the numbers that :func:`label` names, on the device and equal
    on all ranks.

    Of each part the 2-norm of ``grads``, those of the parameters that this rank holds, every
    element counted once; of each MoE layer its busiest expert's tokens over the mean, where
    ``load`` has those of this rank's layers over the data axes. ``like`` is a number of the
    numbers' dtype and device.

    Args:
        layout: of this rank, of a recipe without phases.
    """
    cfg = layout.recipe.model
    part_of = find_part(cfg)
    names = _trained_parts(layout.recipe)
    stages = active(layout.axes.pp)
    placements = dict(tree.flatten_with_paths(layout.placements))
    part_index = {}
    for path, spec in tree.flatten_with_paths(layout.specs):
        if "frozen" not in spec.tags:
            part_index[path] = names.index(part_of(path))
    layers = model.moe_layers(cfg)

    def squares_by_axes(grads: Any) -> dict[tuple[Axis, ...], list[list[Tensor]]]:
        """Squared norms of each part's gradients, by the axes over which ranks hold parts of
        them.
        """
        squares: dict[tuple[Axis, ...], list[list[Tensor]]] = {}
        for path, grad in tree.flatten_with_paths(grads):
            axes: tuple[Axis, ...] = ()
            if placements:
                axes = tuple(sorted(placements[path].axes, key=lambda a: a.name))
            by_part = squares.setdefault(axes, [[] for _ in names])
            norm = torch.linalg.vector_norm(grad, dtype=precision.island(grad.dtype))
            by_part[part_index[path]].append(norm.square())
        return squares

    def norms(grads: Any, zero: Tensor) -> Tensor:
        sums = []
        # one collective for all gradients that are split over the same axes
        for axes, by_part in squares_by_axes(grads).items():
            local = []
            for squares in by_part:
                local.append(torch.stack(squares).sum().to(zero.dtype) if squares else zero)
            total = torch.stack(local)
            sums.append(psum(total, axes) if axes else total)
        # a stage in which nothing is trained has no sums, and takes part all the same
        total = torch.stack(sums).sum(0) if sums else zero.expand(len(names))
        return (psum(total, stages) if stages else total).sqrt()

    def measure(grads: Any, load: Tensor, like: Tensor) -> Tensor:
        zero = torch.zeros_like(like)
        load = load.to(like.dtype)
        ratio = zero.expand(0)
        if len(load):
            ratio = load.amax(1) / load.mean(1).clamp(min=1)
        if stages and layers:
            # each layer is one stage's: zeros elsewhere, and the sum is its stage's number
            local = dict(zip(layout.moe_layers, ratio, strict=True))
            ratio = psum(torch.stack([local.get(layer, zero) for layer in layers]), stages)
        return torch.cat([norms(grads, zero), ratio])

    return measure
