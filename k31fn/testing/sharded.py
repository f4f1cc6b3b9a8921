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
from k31fn.testing.trees import assert_close_trees

__all__ = ["ShardedReport", "assert_sharded_equals_dense"]


class ShardedReport(NamedTuple):
    """What :func:`assert_sharded_equals_dense` did.

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
    values = tree.leaves(args)
    one = FlopCounterMode(display=False)
    out = (dense or fn)(Mesh().axes(), *args)
    outputs = tree.leaves(out)
    floating = [i for i, y in enumerate(outputs) if y.is_floating_point()]
    cts = _draw([outputs[i] for i in floating], seed)
    with one:
        _, grads = _both(dense or fn, Mesh().axes(), args, floating, cts)
    case = _Case(
        fn, args, broadcast(in_specs, args), broadcast(out_specs, out), mesh, cts, floating
    )
    expected = {"value": outputs, "gradient": dict(zip(_names(args, values), grads, strict=True))}
    skipped, fraction = "", float("nan")
    if "processes" in backends and (skipped := _why_not(fn)):
        backends = tuple(b for b in backends if b != "processes")
    for backend in backends:
        got = case.on_processes(ranks) if backend == "processes" else case.on_this_process(backend)
        _check(backend, got, expected, collectives, impls or {}, rtol, atol)
        if backend == "threads":
            fraction = got.flops / max(one.get_total_flops(), 1)
            if flops is not None and fraction > 1.05 * flops:
                raise AssertionError(
                    f"threads: a rank did {fraction:.3g} of one device's work, at most {flops:.3g}"
                )
    return ShardedReport(backends, skipped, fraction)


class _Got(NamedTuple):
    outputs: list[Tensor]
    grads: list[Tensor]
    collectives: Mapping[str, int]
    impls: set[tuple[str, str]]
    flops: float | int


@dataclass(frozen=True)
class _Case:
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
        pairs = zip(self.in_specs, tree.leaves(self.args), strict=True)
        return [s for s, v in pairs if isinstance(v, Tensor) and v.is_floating_point()]

    @property
    def ct_specs(self) -> list[P]:
        return [self.out_specs[i] for i in self.floating]

    def on_this_process(self, backend: str) -> _Got:
        leaves, structure = tree.flatten(self.args)
        work: list[float] = []

        def both(axes: MeshAxes, leaves: list[Any], cts: list[Tensor]) -> Any:
            counting: Any = (
                FlopCounterMode(display=False) if backend == "threads" else contextlib.nullcontext()
            )
            with counting:
                result = _both(self.fn, axes, tree.unflatten(structure, leaves), self.floating, cts)
            work.extend([counting.get_total_flops()] if backend == "threads" else [])
            return result

        specs = (self.in_specs, self.ct_specs), (self.out_specs, self.grad_specs)
        mapped = shard_map(both, self.mesh, *specs, backend=backend)
        with record_collectives() as record, record_impls() as ran, check_invariance():
            outputs, grads = mapped(leaves, self.cts)
        for other in record.ranks:
            if other.counts != record.counts:
                raise AssertionError(
                    f"{backend}: ranks issue {dict(record.counts)} and {dict(other.counts)}"
                )
        return _Got(outputs, grads, record.counts, set(ran), max(work, default=0.0))

    def on_processes(self, ranks: Ranks | None) -> _Got:
        with contextlib.ExitStack() as stack:
            if ranks is None:
                ranks = stack.enter_context(spawn_ranks(self.mesh.world_size))
            specs = [
                [[list(d) for d in s.dims] for s in some] for some in (self.in_specs, self.ct_specs)
            ]
            answers = ranks.run(
                run_rank, import_path(self.fn), self.args, specs, self.mesh, self.cts, self.floating
            )
        counts = [a["collectives"] for _, a in answers]
        if any(c != counts[0] for c in counts):
            raise AssertionError(f"processes: ranks issue different collectives: {counts}")
        n = len(self.out_specs)
        whole = [
            assemble([tensors[i] for tensors, _ in answers], spec, self.mesh)
            for i, spec in enumerate(self.out_specs + self.grad_specs)
        ]
        impls = {(op, impl) for _, a in answers for op, impl in a["impls"]}
        return _Got(whole[:n], whole[n:], counts[0], impls, 0.0)


def run_rank(
    path: str,
    args: tuple[Any, ...],
    specs: list[Any],
    mesh: Mesh,
    cts: list[Tensor],
    floating: list[int],
) -> tuple[list[Tensor], dict[str, Any]]:
    """What a spawned rank does: cuts its tiles and runs the function on them."""
    axes, coordinate = axes_of_process(mesh)
    values, structure = tree.flatten(args)
    in_specs, ct_specs = ([P(*dims) for dims in some] for some in specs)
    local = tree.unflatten(structure, cut(in_specs, values, mesh, coordinate))
    with record_collectives() as record, record_impls() as ran, check_invariance():
        outputs, grads = _both(
            import_target(path), axes, local, floating, cut(ct_specs, cts, mesh, coordinate)
        )
    return outputs + grads, {"collectives": dict(record.counts), "impls": [list(k) for k in ran]}


def _both(
    fn: Callable[..., Any], axes: MeshAxes, args: Any, floating: list[int], cts: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    out, grads = pull_back(lambda *a: fn(axes, *a), args, dict(zip(floating, cts, strict=True)))
    return tree.leaves(out), grads


def _check(
    backend: str,
    got: _Got,
    expected: dict[str, Any],
    collectives: Mapping[str, int],
    impls: Mapping[str, str],
    rtol: float | int,
    atol: float | int,
) -> None:
    grads = dict(zip(expected["gradient"], got.grads, strict=True))
    try:
        assert_close_trees(got.outputs, expected["value"], rtol=rtol, atol=atol)
        assert_close_trees(grads, expected["gradient"], rtol=rtol, atol=atol)
    except AssertionError as e:
        raise AssertionError(f"{backend} against one device: {e}") from e
    if Counter(got.collectives) != Counter(collectives):
        raise AssertionError(
            f"{backend}: a rank issued {dict(got.collectives)}, expected {dict(collectives)}"
        )
    for op, impl in impls.items():
        if (names := {i for o, i in got.impls if o == op}) != {impl}:
            raise AssertionError(f"{backend}: op {op!r} ran as {sorted(names)}, expected {impl!r}")


def _draw(outputs: list[Tensor], seed: int) -> list[Tensor]:
    keys = random.split(random.key(seed), max(len(outputs), 1))
    return [
        random.normal(k, tuple(y.shape)).to(y.device, y.dtype)
        for k, y in zip(keys, outputs, strict=False)
    ]


def _names(args: Any, values: list[Any]) -> list[str]:
    pairs = zip(tree.paths(args), values, strict=True)
    return [p for p, v in pairs if isinstance(v, Tensor) and v.is_floating_point()]


def _why_not(fn: Callable[..., Any]) -> str:
    try:
        import_path(fn)
    except ValueError as e:
        return f"processes left out: {e}"
    return ""
