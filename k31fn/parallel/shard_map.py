"""``shard_map``: a function of one rank's arrays, run on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff import custom_vjp, vjp
from k31fn.parallel.backends import simulated
from k31fn.parallel.backends.processes import axes_of_process
from k31fn.parallel.backends.threads import each_rank
from k31fn.parallel.invariance import compare_ranks, is_checked
from k31fn.parallel.mesh import Mesh, MeshAxes
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
    """The function of ``args`` that runs ``f(axes, *local_args)`` on every rank.

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
                out, found = simulated.run(f, self.mesh, specs, values, structure, out_specs)
            else:
                out, found = self._threads(f, specs, values, structure, out_specs)
            return out, (args, _Opaque(found))

        def bwd(residuals: Any, ct: Any) -> tuple[Any, ...]:
            args, found = residuals
            cts = tree.leaves(ct, allow_none=True)
            given = [i for i, c in enumerate(cts) if c is not None]
            values = tree.leaves(args)
            wanted = [
                i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()
            ]

            def pull(axes: MeshAxes, args: Any, some: list[Tensor]) -> list[Tensor]:
                return pull_back(lambda *a: f(axes, *a), args, dict(zip(given, some, strict=True)))[
                    1
                ]

            pull_specs = (in_specs, [found.value[i] for i in given])
            grads = self(
                pull, pull_specs, [specs[i] for i in wanted], (args, [cts[i] for i in given])
            )
            every: list[Tensor | None] = [None] * len(values)
            for i, g in zip(wanted, grads, strict=True):
                every[i] = g
            return tree.unflatten(structure, every)

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
        if any(isinstance(v, Tensor) and _functorch.level(v) for v in values):
            raise ValueError(
                "shard_map on threads inside vmap: threads know no transforms; use "
                "backend='simulated'"
            )
        for spec, value in zip(specs, values, strict=True):
            if isinstance(value, Tensor):
                local_shape(spec, value.shape, self.mesh)

        def body(axes: MeshAxes, *args: Any) -> tuple[list[Tensor], Any, list[P]]:
            out = f(axes, *args)
            return (
                [o.detach() for o in _tensors(out)],
                tree.flatten(out)[1],
                broadcast(out_specs, out),
            )

        ranks = each_rank(
            body,
            self.mesh,
            lambda coordinate: tree.unflatten(structure, cut(specs, values, self.mesh, coordinate)),
            timeout=self.timeout,
        )
        _, out_structure, found = ranks[0]
        whole = [
            assemble([r[0][i] for r in ranks], spec, self.mesh) for i, spec in enumerate(found)
        ]
        return tree.unflatten(out_structure, whole), found


class _Opaque:
    """Passes through a tree as one leaf."""

    def __init__(self, value: list[P]) -> None:
        self.value = value


def pull_back(
    f: Callable[..., Any], args: Any, cotangents: dict[int, Tensor]
) -> tuple[Any, list[Tensor]]:
    """``f(*args)``, and the gradients of the floating leaves of ``args`` for cotangents by output
    leaf.
    """
    values, structure = tree.flatten(args)
    wanted = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]

    def of_floating(*some: Tensor) -> Any:
        full = list(values)
        for i, x in zip(wanted, some, strict=True):
            full[i] = x
        return f(*tree.unflatten(structure, full))

    out, back = vjp(of_floating, *[values[i] for i in wanted])
    outputs, out_structure = tree.flatten(out)
    cts = tree.unflatten(out_structure, [cotangents.get(i) for i in range(len(outputs))])
    return out, list(back(cts))


def _tensors(out: Any) -> list[Tensor]:
    outputs = tree.leaves(out)
    if wrong := [o for o in outputs if not isinstance(o, Tensor)]:
        raise ValueError(f"shard_map: an output is {wrong[0]!r}; every leaf must be a tensor")
    return outputs


def _on_this_process(
    f: Callable[..., Any],
    axes: MeshAxes,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    args: tuple[Any, ...],
) -> Any:
    for spec, value in zip(broadcast(in_specs, args), tree.leaves(args), strict=True):
        if isinstance(value, Tensor):
            resolve(spec, axes, value.ndim)
    out = f(axes, *args)
    for spec, y in zip(broadcast(out_specs, out), _tensors(out), strict=True):
        named = {a.name for dim in resolve(spec, axes, y.ndim) for a in dim}
        if is_checked() and not _functorch.transforms_active():
            for axis in axes.atoms:
                if axis.name not in named and axis.host is not None:
                    what = (
                        f"shard_map: an output of shape {list(y.shape)} has out_spec {spec}, "
                        "which does not name "
                    )
                    compare_ranks(
                        axis.host.channel((axis.name,)),
                        y,
                        f"{what}{axis.name!r}, but it varies over it",
                    )
    return out
