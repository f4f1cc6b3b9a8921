"""A function of one rank's arrays, on every backend, against one device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from k31fn import random, tree
from k31fn.kernels.registry import record_impls
from k31fn.parallel.backends.processes import axes_of_process
from k31fn.parallel.collective_record import record_collectives
from k31fn.parallel.invariance import check_invariance
from k31fn.parallel.mesh import Mesh, MeshAxes
from k31fn.parallel.partition import P, broadcast
from k31fn.parallel.shard_map import BACKENDS, pull_back, shard_map
from k31fn.parallel.tiling import assemble, cut
from k31fn.testing.ranks import Ranks, import_path, import_target, spawn_ranks
from k31fn.testing.trees import assert_close_trees, at, floating_positions

__all__ = ["ShardedReport", "assert_sharded_equals_dense"]


class ShardedReport(NamedTuple):
    """Account of what :func:`assert_sharded_equals_dense` did.

    Attributes:
        backends: those that ran.
        skipped: why the process backend did not, or "".
        flops: of one rank over those of one device (threads backend); nan if that backend did not
            run.
    """

    backends: tuple[str, ...]
    skipped: str
    flops: float | int


def assert_sharded_equals_dense(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
    mesh: Mesh,
    *,
    collectives: Mapping[str, int],
    rtol: float | int,
    atol: float | int,
    dense: Callable[..., Any] | None = None,
    impls: Mapping[str, str] | None = None,
    flops: float | int | None = None,
    backends: tuple[str, ...] = BACKENDS,
    ranks: Ranks | None = None,
    seed: int = 0,
) -> ShardedReport:
    """Asserts that ``fn(axes, *local_args)`` on a mesh computes what one device does: value and
    gradients.

    Gradients are those of every floating leaf of ``args``, for random cotangents, taken inside the
    ranks. Invariance is checked (:func:`~k31fn.parallel.check_invariance`).

    Args:
        fn: as for :func:`~k31fn.parallel.shard_map`. The process backend cannot import a closure:
            it is then left out, and the report says so.
        args: global arguments; trees of tensors.
        in_specs: one per argument, a P or a tree of them.
        out_specs: of the output.
        mesh: the ranks.
        collectives: how many of each kind one rank issues for value and gradients together, no
            others. A function that does the dense work on each rank is found by them.
        rtol: of values and gradients.
        atol: of values and gradients.
        dense: what one device does with the global arguments, ``dense(axes, *args)`` with no axis
            of more than one rank; None: ``fn``.
        impls: ``{op: implementation}`` that must have run, and no other implementation of that op.
        flops: upper bound of one rank's floating-point operations over one device's (threads
            backend), which may be exceeded by 5%: 1 / n where all the work is split.
        backends: which to run.
        ranks: running processes to use; None: spawns them (seconds).
        seed: of the cotangents.

    Raises:
        AssertionError: a value, a gradient, a count, an implementation or the work differs; names
            the backend.
        ValueError: one of the faults that ``shard_map`` finds.
    """
    # on a mesh of one rank every collective is an identity
    one_device = FlopCounterMode(display=False)
    out = (dense or fn)(Mesh().axes(), *args)
    outputs = tree.leaves(out)
    floating = floating_positions(outputs)
    cts = _draw(at(floating, outputs), seed)
    # a second run: the ranks are counted over value and gradients together, so one device is too
    with one_device:
        _, grads = _both(dense or fn, Mesh().axes(), args, floating, cts)
    names = at(floating_positions(tree.leaves(args)), tree.paths(args))
    case = _ShardedCase(
        fn, args, broadcast(in_specs, args), broadcast(out_specs, out), mesh, cts, floating
    )
    expected = {"value": outputs, "gradient": dict(zip(names, grads, strict=True))}
    skipped = _why_not(fn) if "processes" in backends else ""
    if skipped:
        backends = tuple(b for b in backends if b != "processes")
    fraction = float("nan")
    for backend in backends:
        if backend == "processes":
            results = case.on_processes(ranks)
        else:
            results = case.on_this_process(backend)
        _check(backend, results, expected, collectives, impls or {}, rtol, atol)
        # simulated ranks are one program whose work cannot be told apart, processes are not counted
        if backend == "threads":
            fraction = results.flops / max(one_device.get_total_flops(), 1)
            if flops is not None and fraction > 1.05 * flops:
                raise AssertionError(
                    f"threads: a rank did {fraction:.3g} of one device's work, at most {flops:.3g}"
                )
    return ShardedReport(backends, skipped, fraction)


class _Results(NamedTuple):
    """Results of a backend, and what its ranks did for it."""

    outputs: list[Tensor]
    grads: list[Tensor]
    collectives: Mapping[str, int]
    impls: set[tuple[str, str]]
    flops: float | int


@dataclass(frozen=True)
class _ShardedCase:
    """One function with its global arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    in_specs: list[P]
    out_specs: list[P]
    mesh: Mesh
    cts: list[Tensor]
    floating: list[int]

    @property
    def grad_specs(self) -> list[P]:
        # a gradient lies where its argument lies
        return at(floating_positions(tree.leaves(self.args)), self.in_specs)

    @property
    def ct_specs(self) -> list[P]:
        return at(self.floating, self.out_specs)

    def on_this_process(self, backend: str) -> _Results:
        leaves, structure = tree.flatten(self.args)
        flops: list[float] = []  # of each rank

        def both(axes: MeshAxes, leaves: list[Any], cts: list[Tensor]) -> Any:
            args = tree.unflatten(structure, leaves)
            # simulated ranks are one batched program, whose count would not be a rank's
            if backend != "threads":
                return _both(self.fn, axes, args, self.floating, cts)
            with FlopCounterMode(display=False) as counter:
                results = _both(self.fn, axes, args, self.floating, cts)
            flops.append(counter.get_total_flops())
            return results

        in_specs = (self.in_specs, self.ct_specs)
        out_specs = (self.out_specs, self.grad_specs)
        mapped = shard_map(both, self.mesh, in_specs, out_specs, backend=backend)
        # checked: a forgotten pvary is an error that names the axis, not only a wrong number
        with record_collectives() as record, record_impls() as ran, check_invariance():
            outputs, grads = mapped(leaves, self.cts)
        for other in record.ranks:
            if other.counts != record.counts:
                raise AssertionError(
                    f"{backend}: ranks issue {dict(record.counts)} and {dict(other.counts)}"
                )
        # the rank that does most: a mesh is as slow as that one
        return _Results(outputs, grads, record.counts, set(ran), max(flops, default=0.0))

    def on_processes(self, ranks: Ranks | None) -> _Results:
        with contextlib.ExitStack() as stack:
            if ranks is None:
                ranks = stack.enter_context(spawn_ranks(self.mesh.world_size))
            specs = _as_lists(self.in_specs), _as_lists(self.ct_specs)
            answers = ranks.run(
                _run_rank,
                import_path(self.fn),
                self.args,
                specs,
                self.mesh,
                self.cts,
                self.floating,
            )
        tiles, counts = [], []
        impls: set[tuple[str, str]] = set()
        for tensors, answer in answers:
            tiles.append(tensors)
            counts.append(answer["collectives"])
            impls.update(map(tuple, answer["impls"]))
        if any(count != counts[0] for count in counts):
            raise AssertionError(f"processes: ranks issue different collectives: {counts}")
        whole = []
        specs = self.out_specs + self.grad_specs
        for spec, of_ranks in zip(specs, zip(*tiles, strict=True), strict=True):
            whole.append(assemble(list(of_ranks), spec, self.mesh))
        num_outputs = len(self.out_specs)
        return _Results(whole[:num_outputs], whole[num_outputs:], counts[0], impls, 0.0)


def _run_rank(
    path: str,
    args: tuple[Any, ...],
    specs: list[Any],
    mesh: Mesh,
    cts: list[Tensor],
    floating: list[int],
) -> tuple[list[Tensor], dict[str, Any]]:
    """The work of a spawned rank, which cuts its tiles and runs the function on them. Returns its
    tiles of outputs and gradients, and the collectives and implementations that it used.
    """
    axes, coordinate = axes_of_process(mesh)
    values, structure = tree.flatten(args)
    in_specs, ct_specs = map(_as_specs, specs)
    local = tree.unflatten(structure, cut(in_specs, values, mesh, coordinate))
    local_cts = cut(ct_specs, cts, mesh, coordinate)
    with record_collectives() as record, record_impls() as ran, check_invariance():
        outputs, grads = _both(import_target(path), axes, local, floating, local_cts)
    return outputs + grads, {"collectives": dict(record.counts), "impls": [list(k) for k in ran]}


def _as_lists(specs: list[P]) -> list[list[list[str]]]:
    """The specs as JSON can hold them."""
    lists = []
    for spec in specs:
        lists.append(list(map(list, spec.dims)))
    return lists


def _as_specs(lists: list[list[list[str]]]) -> list[P]:
    """The inverse of :func:`_as_lists`."""
    return [P(*dims) for dims in lists]


def _both(
    fn: Callable[..., Any], axes: MeshAxes, args: Any, floating: list[int], cts: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    out, grads = pull_back(lambda *a: fn(axes, *a), args, dict(zip(floating, cts, strict=True)))
    return tree.leaves(out), grads


def _check(
    backend: str,
    results: _Results,
    expected: dict[str, Any],
    collectives: Mapping[str, int],
    impls: Mapping[str, str],
    rtol: float | int,
    atol: float | int,
) -> None:
    grads = dict(zip(expected["gradient"], results.grads, strict=True))
    try:
        assert_close_trees(results.outputs, expected["value"], rtol=rtol, atol=atol)
        assert_close_trees(grads, expected["gradient"], rtol=rtol, atol=atol)
    except AssertionError as e:  # which leaf, and now on which backend
        raise AssertionError(f"{backend} against one device: {e}") from e
    # as Counters, for which an absent kind and a count of 0 are equal
    if Counter(results.collectives) != Counter(collectives):
        raise AssertionError(
            f"{backend}: a rank issued {dict(results.collectives)}, expected {dict(collectives)}"
        )
    for op, impl in impls.items():
        names = {name for ran, name in results.impls if ran == op}
        if names != {impl}:
            raise AssertionError(f"{backend}: op {op!r} ran as {sorted(names)}, expected {impl!r}")


def _draw(outputs: list[Tensor], seed: int) -> list[Tensor]:
    keys = random.split(random.key(seed), max(len(outputs), 1))
    cts = []
    for key, out in zip(keys, outputs, strict=False):
        cts.append(random.normal(key, tuple(out.shape)).to(out.device, out.dtype))
    return cts


def _why_not(fn: Callable[..., Any]) -> str:
    """Why another process cannot run it, or nothing."""
    try:
        import_path(fn)
    except ValueError as e:
        return f"processes left out: {e}"
    return ""
