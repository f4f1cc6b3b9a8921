"""Flags of what depends, in a scan, on something that a gradient is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff.keep import can_keep_graphs
from k31fn.autodiff.leaves import differentiable
from k31fn.autodiff.replay import run_recorded
from k31fn.autodiff.transforms import taping
from k31fn.autodiff.weight_grads import current_weight_tape
from k31fn.parallel.scan.plan import Step

__all__ = ["Dependence", "any_true", "is_tracked"]


def is_tracked(x: Any) -> bool:
    """Whether a gradient may be asked for; within a ``torch.func`` transform tensors do not
    tell.
    """
    if not isinstance(x, Tensor) or not differentiable(x):
        return False
    return x.requires_grad and torch.is_grad_enabled() if can_keep_graphs() else True


@dataclass(frozen=True)
class Dependence:
    """Flags of what depends on something that a gradient is asked for: trees of bools.

    Attributes:
        trained: weights, by layer.
        carries: the carry in front of each layer, and after the last one of those that ran.
        others: ``(shared, per_layer)``.
    """

    trained: list[Any]
    carries: list[Any]
    others: tuple[Any, list[Any]]

    def of(self, i: int) -> tuple[Any, ...]:
        """Flags of the arguments of a layer."""
        shared, per_layer = self.others
        return self.trained[i], self.carries[i], shared, per_layer[i]

    def run(
        self, i: int, step: Step, args: tuple[Any, ...], given: Any, keep: frozenset[str]
    ) -> Any:
        """:func:`~k31fn.autodiff.replay.run_recorded` of a layer, and what its carry depends on.

        Once a part of a carry depends on something, all of the next ones are said to; so they are
        of functions that are kept, whose values have no graph, and within a transform.
        """
        flags = self.of(i)
        # A graph of one layer tells which parts of the carry depend on a trained weight. It is
        # needed in front of the first dependent carry only: ordinary training makes none.
        exact = can_keep_graphs() and not keep and current_weight_tape() is None
        if exact and not any_true(self.carries[i]) and any_true(flags):
            with taping():
                leaves = tree.map(lambda x, wanted: x.detach().requires_grad_(wanted), args, flags)
                out, *recorded = run_recorded(step, leaves, given, keep)
            after = tree.map(lambda x: x.requires_grad, out[0])
            # A tensor that the layer passes on stays the same object, so that it is kept once.
            pairs = zip(tree.leaves(leaves), tree.leaves(args), strict=True)
            passed_on = {id(leaf): x for leaf, x in pairs}
            carry, aux = tree.map(
                lambda x: passed_on[id(x)] if id(x) in passed_on else x.detach(), out
            )
        else:
            (carry, aux), *recorded = run_recorded(step, args, given, keep)
            after = tree.map(lambda x: any_true(flags) and differentiable(x), carry)
        del self.carries[i + 1 :]  # of a run before: a forward may run again in a remat
        self.carries.append(after)
        return (carry, aux), *recorded

    def wanted(self, needs: tuple[Any, Any, Any, Any]) -> list[tuple[Any, Any, Any, Any]]:
        """Flags of the arguments of each layer: whether their gradient is computed.

        Args:
            needs: flags of the arguments of the scan: whether their gradient is used.
        """
        of_params, of_carry, of_shared, of_per_layer = needs
        carries = [_both(self.carries[0], of_carry), *self.carries[1:-1]]
        rows = zip(self.trained, of_params, carries, of_per_layer, strict=True)
        return [(_both(trained, w), carry, of_shared, own) for trained, w, carry, own in rows]


def _both(a: Any, b: Any) -> Any:
    return tree.map(lambda a, b: a and b, a, b)


def any_true(flags: Any) -> bool:
    """Whether a leaf of a tree of bools is True."""
    return any(tree.leaves(flags))
