"""The rule of a scan, and its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k31fn import tree
from k31fn.autodiff.ambient import Ambient
from k31fn.autodiff.custom_vjp import custom_vjp, detached
from k31fn.autodiff.keep import can_keep_graphs
from k31fn.autodiff.replay import call_recorded
from k31fn.autodiff.weight_grads import current_weight_tape
from k31fn.parallel.fsdp.placement import Placements
from k31fn.parallel.scan.backward import pull_layers
from k31fn.parallel.scan.dependence import Dependence, is_tracked
from k31fn.parallel.scan.kept_layers import CarryTrees, KeptLayers, Residuals, offer_rebuild
from k31fn.parallel.scan.plan import GatheringStep, RematPlan, Step
from k31fn.parallel.scan.prefetch import weights_in_order

__all__ = ["scan"]

_CARRIES_ONLY = RematPlan()


def scan(
    steps: Sequence[Step],
    placements: Sequence[Placements],
    params: Sequence[Any],
    carry: Any,
    shared: Any,
    per_layer: Any,
    plan: RematPlan = _CARRIES_ONLY,
) -> tuple[Any, tuple[Any, ...]]:
    """Runs ``carry, aux[i] = steps[i](gather(params[i]), carry, shared, per_layer[i])`` for each
    layer.

    The gradient keeps no gathered weights and, but for what ``plan`` names, nothing inside of a
    layer, which is run again. Derivatives are of first order; for higher ones gather in a loop of
    your own. Overlap is as in :mod:`k31fn.parallel.overlap`; here ``torch.func.grad`` on real ranks
    has it too. Under :func:`k31fn.autodiff.split_vjp` there is none: each layer gathers its weights
    inside.

    Args:
        steps: the layers; pure functions that capture no differentiated tensor.
        placements: of each layer's parameters; none: they are whole.
        params: this rank's parts of them.
        carry: what the first layer is handed.
        shared: what all layers are handed.
        per_layer: what each is handed besides.
        plan: what is kept for the backward; within a ``torch.func`` transform all carries and no
            function.

    Returns:
        The last carry, and each layer's ``aux``.

    Raises:
        RuntimeError: (in the backward) at a second derivative, or at a second backward outside of
            ``torch.func``.
    """
    if not steps:
        return carry, ()
    if placements and current_weight_tape() is not None:
        # A put off weight gradient leads through a graph from the whole weight to its part, which
        # weights that are gathered below do not have.
        steps = [GatheringStep(step, place) for step, place in zip(steps, placements, strict=True)]
        placements = ()
    # Asked here: in the forward of a rule the levels of torch.func are not seen.
    keeps_objects = can_keep_graphs()
    others = tree.map(is_tracked, (shared, list(per_layer)))
    dependence = Dependence(
        _trained_weights(params, placements), [tree.map(is_tracked, carry)], others
    )

    def fwd(given: Any, params: Any, carry: Any, shared: Any, per_layer: Any) -> Any:
        carries, auxes, decisions, functions = [], [], [], []
        ahead = weights_in_order(params, placements, range(len(steps)))
        for i, step in enumerate(steps):
            carries.append(carry)
            made_before = given[i] if given else ()
            # The weights have no name here: they are freed when the layer is done.
            (carry, aux), made, kept = dependence.run(
                i, step, (ahead.take(), carry, shared, per_layer[i]), made_before, plan.keep
            )
            auxes.append(aux)
            decisions.append(made)
            functions.append(kept)
        ambient = Ambient((params, carry))
        if keeps_objects:
            args = params, shared, per_layer
            layers = KeptLayers(
                steps, placements, args, carries, decisions, functions, plan, dependence
            )
            offer_rebuild(layers, ambient)
        else:
            layers = CarryTrees(carries, functions)
        residuals = Residuals(params, shared, per_layer, decisions, layers, ambient)
        return ((carry, tuple(auxes)), decisions), residuals

    def bwd(needs: Any, residuals: Residuals, ct: Any) -> tuple[Any, ...]:
        # Without the decisions, the first argument and the second result of the rule.
        wanted = dependence.wanted(needs[1:])
        grads = residuals.ambient.run(
            lambda: pull_layers(steps, placements, plan.keep, wanted, residuals, ct[0])
        )
        return (None, *grads)

    rule = custom_vjp(
        fwd,
        bwd,
        opaque=True,
        needs=True,
        name="scan",
        instead="remat='none', or layers that gather inside remat",
    )
    carry, auxes = call_recorded(rule, params, carry, shared, per_layer)
    # A rule's outputs all have a graph. What depends on nothing must not: a caller asks a carry
    # whether it has one.
    carry = tree.map(
        lambda x, reached: x if reached else detached(x), carry, dependence.carries[-1]
    )
    return carry, auxes


def _trained_weights(params: Sequence[Any], placements: Sequence[Placements]) -> list[Any]:
    """Trees of bools, one for each layer: whether a gradient of the weight may be asked for."""
    trained = tree.map(is_tracked, list(params))
    if not placements:
        return trained

    def unless_frozen(tracked: bool, place: Any) -> bool:
        # A frozen weight may be watched all the same, where a caller differentiates the whole tree.
        return tracked and not place.frozen

    return tree.map(unless_frozen, trained, list(placements))
