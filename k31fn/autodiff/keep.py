"""Functions that a remat around them does not run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k31fn import _functorch, tree
from k31fn.autodiff.ambient import Ambient
from k31fn.autodiff.custom_vjp import custom_vjp, detached
from k31fn.autodiff.kept_graph import KeptGraph
from k31fn.autodiff.replay import ReplayTape, ValueQueue, current_replay_tape, running_on

__all__ = ["can_keep_graphs", "keep"]


def keep(
    name: str, f: Callable[..., Any], *, reports: Callable[[Any], Any] = lambda out: ()
) -> Callable[..., Any]:
    """``f``, which a ``remat(g, keep=[name])`` around it does not run again.

    The replay of ``g`` is handed the result of ``f`` instead, and gradients pass through what was
    kept of it. Without such a remat it is ``f``. There are two kinds:

    * ``f`` is a :class:`~k31fn.autodiff.custom_vjp`: its output and its residuals are kept. They
      leave the remat as results and come back as arguments, so this works under every
      ``torch.func`` transform. Through residuals that are no inputs or outputs of ``f`` the
      derivative is first order.
    * Any other function ``f(weights, *args)``: its output and its autograd graph are kept. The
      graph holds neither the arguments nor views of them, since the replay makes them again. So
      between forward and backward live the output and what the backward of ``f`` needs besides its
      arguments. Derivatives are of first order. A graph cannot leave a ``torch.func`` transform:
      within one nothing is kept and ``f`` runs again, with the same gradients, to any order.

    Args:
        name: what ``remat(..., keep=)`` calls it.
        f: a rule whose first argument is differentiable, or a function of trees. Under
            :func:`~k31fn.autodiff.split_vjp` the gradients of a function's first argument are put
            off.
        reports: of a function's result, the tree of leaves that are only told and never read
            (:func:`~k31fn.autodiff.report`): they are not kept, and zeros in the replay.

    Raises:
        ValueError: the first argument of a rule is not differentiable.
    """
    return _keep_rule(name, f) if isinstance(f, custom_vjp) else _keep_function(name, f, reports)


def _keep_rule(name: str, rule: custom_vjp) -> Callable[..., Any]:
    if any(i == 0 for i in rule.nondiff_argnums):
        raise ValueError(f"keep {name!r}: the first argument of {rule.name} must be differentiable")

    def fwd(kept: Any, *args: Any) -> Any:
        return kept  # (output, residuals), as the rule's own fwd returned them

    def bwd(*parts: Any) -> tuple[Any, ...]:
        num_static = len(rule.nondiff_argnums)
        static, rest = parts[:num_static], parts[num_static:]
        if rule.needs:
            # The rule has no first argument that is what was kept.
            needs, *others = rest
            rest = (needs[1:], *others)
        return (None, *rule.bwd(*static, *rest))

    handed_again = custom_vjp(
        fwd,
        bwd,
        nondiff_argnums=[i + 1 for i in rule.nondiff_argnums],
        opaque=rule.opaque,
        needs=rule.needs,
        name=rule.name,
    )

    def call(*args: Any) -> Any:
        tape = current_replay_tape()
        if tape is None or name not in tape.keep:
            return rule(*args)
        if tape.kept.replaying:
            return handed_again(tape.kept.next(name), *args)
        out, _ = tape.kept.record(name, rule.fwd(*args))
        return out

    return call


def can_keep_graphs() -> bool:
    """Whether the graph of a function can be kept here: not within a ``torch.func`` transform."""
    return not _functorch.transforms_active() and _functorch.saved_tensors_hooks_allowed()


def _keep_function(
    name: str, f: Callable[..., Any], reports: Callable[[Any], Any]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        tape = current_replay_tape()
        if tape is None or name not in tape.keep:
            return f(*args)
        if tape.kept.replaying:
            kept = tape.kept.next(name)
            return _from_kept(tape, kept, args) if kept else f(*args)
        if not can_keep_graphs():
            tape.kept.record(name, ())  # the replay runs f again
            return f(*args)
        num_before = tape.decisions.count
        # Inside, nothing is kept by name: all is in the graph.
        with running_on(ReplayTape(tape.decisions, ValueQueue(), backward=tape.backward)):
            out, graph = KeptGraph.run(f, args)
        num_decisions = tape.decisions.count - num_before
        tape.kept.record(name, (_without(out, reports), graph, num_decisions))
        return out

    return call


def _from_kept(tape: ReplayTape, kept: Any, args: tuple[Any, ...]) -> Any:
    out, graph, num_decisions = kept
    # f does not run, so nobody asks for the decisions that were made in it.
    tape.decisions.skip(num_decisions)
    # What was kept of the output has no gradient of its own: that goes through the kept graph.
    return _FROM_KEPT(detached(out), graph, *args)


def _without(out: Any, reports: Callable[[Any], Any]) -> Any:
    """The result with zeros that take no memory for its reports."""
    values, structure = tree.flatten(out)
    # Of a tree of positions, which tells where in the result the reports are.
    positions = tree.leaves(reports(tree.unflatten(structure, list(range(len(values))))))
    for i in positions:
        values[i] = values[i].new_zeros(()).expand(values[i].shape)
    return tree.unflatten(structure, values)


def _from_kept_fwd(out: Any, graph: KeptGraph, *args: Any) -> Any:
    return out, (graph, args, Ambient(args))


def _from_kept_bwd(needs: Any, residuals: Any, ct: Any) -> tuple[Any, ...]:
    graph, args, ambient = residuals
    # What is inside the graph runs as it did where the graph was made.
    grads = ambient.run(lambda: graph.pull(args, needs[2:], ct))
    return (None, None, *grads)


_FROM_KEPT = custom_vjp(
    _from_kept_fwd,
    _from_kept_bwd,
    opaque=True,
    needs=True,
    name="keep",
    instead="remat='none' or 'layer'",
)
