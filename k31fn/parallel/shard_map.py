"""``shard_map``: a function of one rank's arrays, run on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.autodiff.transforms import vjp
from k31fn.parallel.axis import axis_names
from k31fn.parallel.backends import simulated
from k31fn.parallel.backends.processes import axes_of_process
from k31fn.parallel.backends.threads import each_rank
from k31fn.parallel.invariance import compare_ranks, is_checked
from k31fn.parallel.mesh import Coordinate, Mesh, MeshAxes
from k31fn.parallel.partition import P, broadcast, local_shape, resolve
from k31fn.parallel.tiling import assemble, cut

__all__ = ["BACKENDS", "pull_back", "shard_map"]

BACKENDS = ("simulated", "threads", "processes")


def shard_map(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    *,
    backend: str = "simulated",
    timeout: float | int = 60.0,
) -> Callable[..., Any]:
    """Makes a function of ``args`` that runs ``f(axes, *local_args)`` on every rank.

    ``axes`` is a :class:`~k31fn.parallel.mesh.MeshAxes`: its views are what collectives and a
    layer's ``sh`` take. ``f`` may differentiate: gradients of what a rank holds come out as the
    spec of that argument says.

    * ``simulated``: one process, one ``vmap`` per atomic axis. Global arrays in and out. A psum of
      what is equal on all ranks, a forgotten pvary and an output that varies over an axis that its
      spec does not name are errors.
    * ``threads``: a rank per thread. Global arrays in and out, arbitrary Python inside; outputs
      that should be equal are compared. Collectives are waited for at most ``timeout`` seconds.
    * ``processes``: this process is one rank (:func:`~k31fn.parallel.start_processes`). Local
      arrays in and out; specs are checked, nothing is resharded.

    The result is differentiable from outside to any order: on processes as it is, elsewhere by
    running the pullback of ``f`` on every rank (which runs ``f`` again), with the specs exchanged.

    Args:
        f: a pure function; it must not capture differentiated tensors.
        mesh: the ranks.
        in_specs: one per argument: a tree of :class:`P`, or a P for all its leaves.
        out_specs: the same for the output.
        backend: as above.
        timeout: of the threads backend.

    Raises:
        ValueError: (at a call) a spec that does not fit, or one of the faults above.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"shard_map: backend={backend!r} unknown; use one of {', '.join(BACKENDS)}"
        )
    if backend == "processes":
        axes, _ = axes_of_process(mesh)
        return lambda *args: _on_this_process(f, axes, in_specs, out_specs, args)
    run = _GlobalShardMap(mesh, backend, timeout)
    return lambda *args: run(f, in_specs, out_specs, args)


@dataclass(frozen=True)
class _GlobalShardMap:
    mesh: Mesh
    backend: str
    timeout: float | int

    def __call__(
        self,
        f: Callable[..., Any],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        args: tuple[Any, ...],
    ) -> Any:
        """Runs ``f``, as one differentiable step whose levels and threads are closed when it
        returns.
        """
        _, structure = tree.flatten(args)
        specs = broadcast(in_specs, args)

        def fwd(*args: Any) -> tuple[Any, Any]:
            values = tree.leaves(args)
            if self.backend == "simulated":
                out, leaf_specs = simulated.run(f, self.mesh, specs, values, structure, out_specs)
            else:
                out, leaf_specs = self._threads(f, specs, values, structure, out_specs)
            return out, (args, _Opaque(leaf_specs))

        def bwd(residuals: Any, ct: Any) -> tuple[Any, ...]:
            """Runs the pullback of ``f`` on every rank: a ``shard_map`` itself, so that it can be
            differentiated again. What an argument was split by, its gradient is.
            """
            args, leaf_specs = residuals
            cts = tree.leaves(ct, allow_none=True)
            # None is not a leaf that a rank could be handed, so outputs without one stay out.
            with_ct = [i for i, c in enumerate(cts) if c is not None]
            floating = _floating(tree.leaves(args))

            def pull(axes: MeshAxes, args: Any, local_cts: list[Tensor]) -> list[Tensor]:
                by_output = dict(zip(with_ct, local_cts, strict=True))
                _, grads = pull_back(lambda *a: f(axes, *a), args, by_output)
                return grads

            pull_specs = (in_specs, _pick(leaf_specs.value, with_ct))
            pull_args = (args, _pick(cts, with_ct))
            grads = self(pull, pull_specs, _pick(specs, floating), pull_args)
            return tree.unflatten(structure, _spread(grads, floating, structure.num_leaves))

        # As one step with a rule of its own: outside of it nothing may hold a tensor of a level
        # of vmap that is closed, or a graph that a rank's thread has made.
        rule = custom_vjp(fwd, bwd, name=f"shard_map({getattr(f, '__name__', type(f).__name__)})")
        return rule(*args)

    def _threads(
        self,
        f: Callable[..., Any],
        specs: list[P],
        values: list[Any],
        structure: Any,
        out_specs: Any,
    ) -> tuple[Any, list[P]]:
        for spec, value in zip(specs, values, strict=True):
            if not isinstance(value, Tensor):
                continue
            if _functorch.level(value):
                raise ValueError(
                    "shard_map on threads inside vmap: threads know no transforms; use "
                    "backend='simulated'"
                )
            local_shape(spec, value.shape, self.mesh)  # refuses what does not divide

        def body(axes: MeshAxes, *args: Any) -> tuple[list[Tensor], Any, list[P]]:
            out = f(axes, *args)
            _, out_structure = tree.flatten(out)
            # Detached: the gradient comes by bwd, and a rank's graph ends with its thread.
            outputs = [o.detach() for o in _tensors(out)]
            return outputs, out_structure, broadcast(out_specs, out)

        def local_args(coordinate: Coordinate) -> tuple[Any, ...]:
            return tree.unflatten(structure, cut(specs, values, self.mesh, coordinate))

        ranks = each_rank(body, self.mesh, local_args, timeout=self.timeout)
        _, out_structure, leaf_specs = ranks[0]
        by_leaf = zip(*(outputs for outputs, *_ in ranks), strict=True)
        global_outputs: list[Tensor] = []
        for spec, tiles in zip(leaf_specs, by_leaf, strict=True):
            global_outputs.append(assemble(list(tiles), spec, self.mesh))
        return tree.unflatten(out_structure, global_outputs), leaf_specs


class _Opaque:
    """A list of specs that passes through a tree as one leaf."""

    def __init__(self, value: list[P]) -> None:
        self.value = value


def pull_back(
    f: Callable[..., Any], args: Any, cotangents: dict[int, Tensor]
) -> tuple[Any, list[Tensor]]:
    """The value ``f(*args)``, and the gradients of the floating leaves of ``args`` for cotangents
    by output leaf.
    """
    values, structure = tree.flatten(args)
    floating = _floating(values)

    def of_floating(*xs: Tensor) -> Any:
        full = list(values)
        for i, x in zip(floating, xs, strict=True):
            full[i] = x
        return f(*tree.unflatten(structure, full))

    out, back = vjp(of_floating, *_pick(values, floating))
    outputs, out_structure = tree.flatten(out)
    cts = tree.unflatten(out_structure, [cotangents.get(i) for i in range(len(outputs))])
    return out, list(back(cts))


def _floating(values: list[Any]) -> list[int]:
    """The indices of what has a gradient."""
    return [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]


def _pick(values: list[Any], indices: list[int]) -> list[Any]:
    return [values[i] for i in indices]


def _spread(values: list[Tensor], indices: list[int], size: int) -> list[Tensor | None]:
    """A list of ``size`` with the values at these indices, None elsewhere."""
    spread: list[Tensor | None] = [None] * size
    for i, value in zip(indices, values, strict=True):
        spread[i] = value
    return spread


def _tensors(out: Any) -> list[Tensor]:
    outputs = tree.leaves(out)
    for y in outputs:
        if not isinstance(y, Tensor):
            raise ValueError(f"shard_map: an output is {y!r}; every leaf must be a tensor")
    return outputs


def _on_this_process(
    f: Callable[..., Any],
    axes: MeshAxes,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    args: tuple[Any, ...],
) -> Any:
    # Only whether the specs fit: of a local array nobody knows the global shape.
    for spec, value in zip(broadcast(in_specs, args), tree.leaves(args), strict=True):
        if isinstance(value, Tensor):
            resolve(spec, axes, value.ndim)
    out = f(axes, *args)
    for spec, y in zip(broadcast(out_specs, out), _tensors(out), strict=True):
        split_names: set[str] = set()
        for split in resolve(spec, axes, y.ndim):
            split_names.update(axis_names(split))
        # Under a transform y has no values to compare.
        if not is_checked() or _functorch.transforms_active():
            continue
        for axis in axes.atoms:
            if axis.name not in split_names and axis.host is not None:
                complaint = (
                    f"shard_map: an output of shape {list(y.shape)} has out_spec {spec}, which "
                    f"does not name {axis.name!r}, but it varies over it"
                )
                compare_ranks(axis.host.channel((axis.name,)), y, complaint)
    return out
