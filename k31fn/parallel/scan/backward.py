"""The backward of a scan: layer by layer, while gathers and scatters of its neighbours travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff.custom_vjp import detached
from k31fn.autodiff.leaves import differentiable
from k31fn.autodiff.replay import pull_replayed
from k31fn.parallel.fsdp.fused_gather import start_scatter, wait_scatter
from k31fn.parallel.fsdp.placement import Placements
from k31fn.parallel.scan.dependence import any_true
from k31fn.parallel.scan.kept_layers import Residuals
from k31fn.parallel.scan.plan import Step
from k31fn.parallel.scan.prefetch import weights_in_order

__all__ = ["pull_layers"]


def pull_layers(
    steps: Sequence[Step],
    placements: Sequence[Placements],
    keep: frozenset[str],
    wanted: Sequence[tuple[Any, Any, Any, Any]],
    residuals: Residuals,
    ct: tuple[Any, Sequence[Any]],
) -> tuple[Any, Any, Any, Any]:
    """Gradients of the parameters' parts, of the first carry, of ``shared`` and of ``per_layer``.

    Args:
        steps: the layers.
        placements: of each layer's parameters; none: they are whole.
        keep: names of functions that were kept.
        wanted: by layer, of which of its arguments gradients are computed.
        residuals: of the forward.
        ct: cotangents of the last carry and of each layer's ``aux``.
    """
    params, shared, per_layer, decisions, layers, _ = residuals
    of_carry, of_aux = ct
    grads = _absent(list(params))
    grads_per_layer = _absent(list(per_layer))
    shared_leaves, shared_def = tree.flatten(shared)
    shared_sums: list[Tensor | None] = [None] * len(shared_leaves)
    scattering: Any = None  # the layer above, and its gradients on their way
    pulled = [i for i in reversed(range(len(steps))) if any_true(wanted[i])]
    if pulled:
        # Before the first whole layer is asked for: while carries are made again no layer's
        # weights are there.
        layers.rebuild()
    ahead = weights_in_order(params, placements, pulled)
    for i in reversed(range(len(steps))):
        if i not in pulled:
            of_carry = _absent(wanted[i][1])
            layers.skip(i)
            continue
        carry, kept = layers.take(i)
        weights = ahead.take()
        args = _constant_but(wanted[i], (weights, carry, shared, per_layer[i]))
        layer_ct = (of_carry, of_aux[i])
        layer_grads = pull_replayed(
            steps[i], args, layer_ct, decisions[i], kept, keep, needs=wanted[i]
        )
        of_weights, of_carry, of_shared, grads_per_layer[i] = layer_grads
        of_carry = _filled(of_carry, carry, wanted[i][1])
        if placements:
            of_weights = _filled(of_weights, weights, _sent(weights, placements[i]))
        # Before the gathered gradients' buffers are made: what the layer needed is freed.
        del layer_grads, args, layer_ct, weights, carry, kept
        # From the last layer to the first, as a loop of layers would sum them.
        for k, grad in enumerate(_grad_leaves(of_shared)):
            shared_sums[k] = _sum(shared_sums[k], grad)
        if scattering is not None:
            # Started before this layer's backward, behind which it travelled.
            above, pending = scattering
            grads[above] = wait_scatter(pending)
            scattering = pending = None  # it holds the whole gradients
        if placements:
            scattering = i, start_scatter(of_weights, placements[i], params[i])
        else:
            grads[i] = of_weights
        del of_weights
    if scattering is not None:
        above, pending = scattering
        grads[above] = wait_scatter(pending)
    return grads, of_carry, tree.unflatten(shared_def, shared_sums), grads_per_layer


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _sent(weights: Any, placements: Placements) -> Any:
    """Flags of weights whose gradient is sent: by all ranks, also by one that has none."""
    return tree.map(lambda x, place: not place.frozen and differentiable(x), weights, placements)


def _constant_but(wanted: Any, args: Any) -> Any:
    """The arguments, of which those that no gradient is wanted of cost none."""
    return tree.map(lambda x, wanted: x if wanted else detached(x), args, wanted)


def _absent(like: Any) -> Any:
    return tree.map(lambda _: None, like)


def _grad_leaves(grads: Any) -> list[Tensor | None]:
    return tree.leaves(grads, allow_none=True)


def _filled(grads: Any, like: Any, wanted: Any) -> Any:
    """Zeros for absent gradients, which some ranks may have and others not; None for those that are
    not wanted.
    """
    values, structure = tree.flatten(like)
    filled: list[Tensor | None] = []
    for grad, x, is_wanted in zip(_grad_leaves(grads), values, tree.leaves(wanted), strict=True):
        filled.append(torch.zeros_like(x) if grad is None and is_wanted else grad)
    return tree.unflatten(structure, filled)
