"""Metrics of the model's parts: gradient norms by part, loads by layer, and their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from k31fn import device as devices
from k31fn import model, tree
from k31fn.config.recipe import Recipe
from k31fn.model.flops import flops_per_token
from k31fn.model.parts import find_part, parts
from k31fn.parallel.axis import Axis, active
from k31fn.parallel.collectives import psum
from k31fn.trainer.layout import RankLayout, trained_specs

__all__ = ["BAD_LEAF", "BAD_LEAVES", "MetricLabels", "label", "make_measure"]

BAD_LEAF = "non_finite/first_leaf"
"""Index of the first leaf whose gradient is infinite or NaN; -1: none is."""
BAD_LEAVES = "non_finite/leaves"
"""How many leaves' gradients are."""


class MetricLabels(NamedTuple):
    """What the numbers of :func:`make_measure` are, and what else holds for all steps of a phase.

    Attributes:
        names: in the order of the numbers.
        leaves: paths of the trained leaves, to which ``BAD_LEAF`` is an index.
        phase: number of the phase; -1: the run has none.
        utilisation: MFU of one token per second, over all ranks; 0: the devices' peak rate is not
            known.
        ranks: of the run.
    """

    names: tuple[str, ...] = ()
    phase: int = -1
    utilisation: float = 0.0
    leaves: tuple[str, ...] = ()
    ranks: int = 1


def label(recipe: Recipe, step: int, device: torch.device) -> MetricLabels:
    """The labels of a step's numbers: ``grad_norm/PART``, ``moe/load/LAYER``, ``BAD_LEAF``,
    ``BAD_LEAVES``.
    """
    now = recipe.at(step)
    norms = [f"grad_norm/{part.replace(' ', '_').lower()}" for part in _trained_parts(now)]
    loads = [f"moe/load/{layer}" for layer in model.moe_layers(now.model)]
    phase = recipe.phase_of(step) if recipe.phases else -1
    names = (*norms, *loads, BAD_LEAF, BAD_LEAVES)
    utilisation = _utilisation(now, device)
    return MetricLabels(names, phase, utilisation, _trained_leaves(now), now.mesh.world_size)


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
    trained = {part_of(path) for path in _trained_leaves(recipe)}
    return [name for name in parts(recipe.model) if name in trained]


def _trained_leaves(recipe: Recipe) -> tuple[str, ...]:
    """Paths of the leaves that are trained, on whatever rank."""
    paths = []
    # not this rank's specs: all ranks must measure the same parts, in one order
    for path, spec in tree.flatten_with_paths(trained_specs(recipe)):
        if "frozen" not in spec.tags:
            paths.append(path)
    return tuple(paths)


def make_measure(layout: RankLayout) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """``measure(norms, load, like)``: the numbers that :func:`label` names, on the device and equal
    on all ranks.

    Of each part the 2-norm of its gradients, every element counted once, from ``norms``, those of
    the parameters that this rank holds (:func:`k31fn.optim.leaf_norms`); of each MoE layer its
    busiest expert's tokens over the mean, where ``load`` has those of this rank's layers over the
    data axes. ``like`` is a number of the numbers' dtype and device.

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
    leaves = _trained_leaves(layout.recipe)
    leaf_index = {path: number for number, path in enumerate(leaves)}
    # uploaded once: in each step the host would wait for the device
    places: dict[tuple[str, ...], Tensor] = {}

    def by_axes(norms: Any) -> dict[tuple[Axis, ...], dict[str, Tensor]]:
        """Norms of the gradients by path, by the axes over which ranks hold parts of them."""
        found: dict[tuple[Axis, ...], dict[str, Tensor]] = {}
        for path, norm in tree.flatten_with_paths(norms):
            axes: tuple[Axis, ...] = ()
            if placements:
                axes = tuple(sorted(placements[path].axes, key=lambda a: a.name))
            found.setdefault(axes, {})[path] = norm
        return found

    def local_sums(norms: dict[str, Tensor], zero: Tensor) -> Tensor:
        """Squared norms of the parts, then a 1 for each leaf that is not finite."""
        squares: list[list[Tensor]] = [[] for _ in names]
        for path, norm in norms.items():
            squares[part_index[path]].append(norm.square())
        sums = []
        for of_part in squares:
            sums.append(torch.stack(of_part).sum().to(zero.dtype) if of_part else zero)
        paths = tuple(norms)
        if paths not in places:
            index = torch.tensor([leaf_index[path] for path in paths], device=zero.device)
            places[paths] = index
        own = torch.stack([norm.to(zero.dtype) for norm in norms.values()])
        bad = (~own.isfinite()).to(zero.dtype)
        by_leaf = zero.new_zeros(len(leaves)).scatter(0, places[paths], bad)
        return torch.cat([torch.stack(sums), by_leaf])

    def sums_over_ranks(norms: Any, zero: Tensor) -> tuple[Tensor, Tensor]:
        """The parts' norms, and the two numbers about leaves that are not finite."""
        sums = []
        # one collective for all gradients that are split over the same axes
        for axes, of_axes in by_axes(norms).items():
            total = local_sums(of_axes, zero)
            sums.append(psum(total, axes) if axes else total)
        # a stage in which nothing is trained has no sums, and takes part all the same
        size = len(names) + len(leaves)
        total = torch.stack(sums).sum(0) if sums else zero.expand(size)
        total = psum(total, stages) if stages else total
        bad = total[len(names) :] > 0
        first = torch.where(bad.any(), bad.to(torch.int64).argmax(), -1)
        about = torch.stack([first, bad.sum()]).to(zero.dtype)
        return total[: len(names)].sqrt(), about

    def measure(norms: Any, load: Tensor, like: Tensor) -> Tensor:
        zero = torch.zeros_like(like)
        load = load.to(like.dtype)
        ratio = zero.expand(0)
        if len(load):
            ratio = load.amax(1) / load.mean(1).clamp(min=1)
        if stages and layers:
            # each layer is one stage's: zeros elsewhere, and the sum is its stage's number
            local = dict(zip(layout.moe_layers, ratio, strict=True))
            ratio = psum(torch.stack([local.get(layer, zero) for layer in layers]), stages)
        of_parts, about_leaves = sums_over_ranks(norms, zero)
        return torch.cat([of_parts, ratio, about_leaves])

    return measure
