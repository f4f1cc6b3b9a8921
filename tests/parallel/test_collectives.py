"""Every collective and its transpose, to second order, against its matrix built with numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from k31fn.parallel import (
    Mesh,
    P,
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    check_invariance,
    each_rank,
    pmax,
    ppermute,
    pslice,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
    record_collectives,
    shard_map,
)
from k31fn.parallel.backends.processes import exchange_json
from k31fn.testing import Ranks
from tests.parallel import cases

SHAPE = (8, 2)
MESHES = {
    "2": (Mesh(tp=2), ["tp"]),
    "4": (Mesh(fsdp=4), ["fsdp"]),
    "2x2": (Mesh(fsdp=2, tp=2), ["fsdp", "tp"]),
    "2x2, outer": (Mesh(fsdp=2, tp=2), ["fsdp"]),
    "2x2, inner": (Mesh(fsdp=2, tp=2), ["tp"]),
    "2x2x2": (Mesh(fsdp=2, cp=2, tp=2), ["fsdp", "cp", "tp"]),
    "2x2x2, outer and inner": (Mesh(fsdp=2, cp=2, tp=2), ["fsdp", "tp"]),
    "a split axis": (Mesh(fsdp=4, tp=2, ep=4), ["ep"]),
}


def numpy_collective(op: str, xs: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank gets, from what each holds; one array where the operand or the result is equal
    on all.
    """
    n = len(xs)
    match op:
        case "psum":
            return [sum(xs[1:], xs[0])]
        case "all_gather":
            return [np.concatenate(xs, 1)] * n
        case "all_gather_invariant":
            return [np.concatenate(xs, 1)]
        case "psum_scatter":
            return np.split(sum(xs[1:], xs[0]), n, 0)
        case "all_to_all":
            pieces = [np.split(x, n, 0) for x in xs]
            return [np.concatenate([pieces[s][r] for s in range(n)], 1) for r in range(n)]
        case "ppermute":
            return [np.zeros_like(xs[0]), *xs[:-1]]
    raise AssertionError(op)


def from_invariant(op: str, x: np.ndarray, n: int) -> list[np.ndarray]:
    return [x] * n if op == "pvary" else np.split(x, n, 0)


def matrix(
    op: str, mesh: Mesh, over: list[str]
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """The collective on the stacked arrays of all ranks, as a matrix, and the shapes that it
    maps.
    """
    axes = mesh.axes()
    n = math.prod(a.size for a in axes.view(*over))
    others = mesh.world_size // n
    operand, result, _ = cases.COLLECTIVES[op]
    names, inner = [a.name for a in axes.atoms], {a.name for a in axes.view(*over)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, c in enumerate(mesh.coordinates()):
        groups.setdefault(tuple(c[k] for k in names if k not in inner), []).append(rank)

    def apply(x: np.ndarray) -> np.ndarray:
        out: dict[int, np.ndarray] = {}
        for g, ranks in enumerate(groups.values()):
            ys = (
                from_invariant(op, x[g], n)
                if operand == "I"
                else numpy_collective(op, [x[r] for r in ranks])
            )
            out.update({g: ys[0]} if result == "I" else dict(zip(ranks, ys, strict=True)))
        return np.stack([out[i] for i in sorted(out)])

    shape = (others if operand == "I" else mesh.world_size, *SHAPE)
    basis = np.eye(math.prod(shape)).reshape(-1, *shape)
    columns = [apply(b) for b in basis]
    return np.stack([c.ravel() for c in columns], 1), shape, columns[0].shape


def expected(op: str, mesh: Mesh, over: list[str], seed: int):
    A, shape_in, shape_out = matrix(op, mesh, over)
    rng = np.random.default_rng(seed)
    x, v, ct = (rng.standard_normal(s) for s in (shape_in, shape_in, shape_out))
    back = (A.T @ ct.ravel()).reshape(shape_in)
    results = (
        (A @ (x**2).ravel()).reshape(shape_out),
        2 * x * back,
        2 * v * back,
        (A @ (2 * x * v).ravel()).reshape(shape_out),
    )
    return [torch.from_numpy(a) for a in (x, ct, v)], [
        torch.from_numpy(np.ascontiguousarray(a)) for a in results
    ]


def specs_of(op: str, mesh: Mesh, over: list[str]) -> tuple[P, P]:
    atoms = [a.name for a in mesh.axes().atoms]
    inner = {a.name for a in mesh.axes().view(*over)}
    views = [v for v in ("fsdp", "cp", "tp") if any(a.startswith(v) for a in atoms)]
    others = [v for v in views if not {a.name for a in mesh.axes().view(v)} & inner]
    if mesh.ep > 1:
        others = ["efsdp"]
    kind = {"V": P(tuple(views)), "I": P(tuple(others))}
    operand, result, _ = cases.COLLECTIVES[op]
    return kind[operand], kind[result]


@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("op", cases.COLLECTIVES)
def test_value_gradient_and_second_derivatives(op: str, mesh_name: str, backend):
    mesh, over = MESHES[mesh_name]
    arrays, results = expected(op, mesh, over, seed=len(op) + len(mesh_name))
    i, o = specs_of(op, mesh, over)
    run = shard_map(
        lambda axes, x, ct, v: cases.derivatives(axes, op, over, x, ct, v),
        mesh,
        (i, o, i),
        (o, i, i, o),
        backend=backend,
    )
    with check_invariance():
        got = run(*arrays)
    for y, e in zip(got, results, strict=True):
        torch.testing.assert_close(
            y, e, rtol=1e-12, atol=1e-12
        )  # sums of at most 8 float64 numbers


@pytest.mark.parametrize("op", cases.COLLECTIVES)
def test_the_same_on_two_processes(op: str, two_ranks: Ranks):
    check_on_processes(op, Mesh(tp=2), ["tp"], two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["4", "2x2", "2x2, outer", "2x2, inner"])
@pytest.mark.parametrize("op", cases.COLLECTIVES)
def test_the_same_on_four_processes(op: str, mesh_name: str, four_ranks: Ranks):
    check_on_processes(op, *MESHES[mesh_name], four_ranks)


def check_on_processes(op: str, mesh: Mesh, over: list[str], ranks: Ranks) -> None:
    from k31fn.parallel.tiling import assemble

    arrays, results = expected(op, mesh, over, seed=len(op))
    i, o = specs_of(op, mesh, over)
    specs = [[list(d) for d in s.dims] for s in (i, o, i)]
    answers = ranks.run(cases.on_rank, op, over, mesh, specs, arrays)
    for k, (spec, e) in enumerate(zip((o, i, i, o), results, strict=True)):
        y = assemble([tensors[k] for tensors, _ in answers], spec, mesh)
        torch.testing.assert_close(y, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", cases.COLLECTIVES)
def test_under_an_unrelated_vmap_inside_and_outside(op: str):
    """vmap over samples, of the shard_map and within it, equals one sample at a time."""
    mesh, over = MESHES["2x2"]
    i, o = specs_of(op, mesh, over)
    collective = cases.COLLECTIVES[op][2]
    samples = torch.stack([expected(op, mesh, over, seed=s)[0][0] for s in range(3)])

    def f(axes, x):
        return collective(x[0], axes.view(*over))[None]

    one_by_one = torch.stack([shard_map(f, mesh, (i,), o)(x) for x in samples])
    torch.testing.assert_close(
        vmap(shard_map(f, mesh, (i,), o))(samples), one_by_one, rtol=0, atol=0
    )
    inner = P((), *i.dims), P((), *o.dims)
    for backend in ("simulated", "threads"):
        within = shard_map(
            lambda axes, xs: vmap(lambda x: f(axes, x))(xs),
            mesh,
            inner[:1],
            inner[1],
            backend=backend,
        )
        torch.testing.assert_close(within(samples), one_by_one, rtol=0, atol=0)


def test_ragged_rows_and_their_gradients_in_threads_and_processes(two_ranks: Ranks):
    x = torch.arange(8.0).reshape(4, 2) + 1
    threads = each_rank(cases.exchange_rows, Mesh(tp=2), lambda _: (x,))
    processes = [tuple(tensors[:2]) for tensors, _ in two_ranks.run(cases.rows_on_rank)]
    for (y0, g0), (y1, g1) in (threads, processes):
        assert torch.equal(y0, x[:1])
        assert torch.equal(y1, x[1:])
        assert torch.equal(g0, 2 * x)  # each row's cotangent comes home
        assert g1.shape == (0, 2)


def test_json_values_and_pmax_on_processes(two_ranks: Ranks):
    for tensors, value in two_ranks.run(cases.rows_on_rank):
        assert value["heard"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]
        assert tensors[2].item() == 2.0


def test_json_values_between_threads():
    heard = each_rank(
        lambda axes, me: exchange_json(["ü" * me, me], axes.tp), Mesh(tp=3), lambda c: (c["tp"],)
    )
    assert heard == [[["", 0], ["ü", 1], ["üü", 2]]] * 3


def test_pmax_has_no_gradient_and_axis_index_counts_row_major():
    mesh = Mesh(fsdp=2, tp=2)
    x = torch.tensor([3.0, 1.0, 4.0, 2.0])

    def f(axes, x):
        both = axes.view("fsdp", "tp")
        return (
            pmax(x[0], both),
            axis_index(both)[None],
            grad(lambda x: pmax(x, both).sum() + x.sum())(x),
        )

    for backend in ("simulated", "threads"):
        spec = P(("fsdp", "tp"))
        top, index, g = shard_map(f, mesh, (spec,), (P(), spec, spec), backend=backend)(x)
        assert (top.item(), index.tolist(), g.tolist()) == (4.0, [0, 1, 2, 3], [1.0] * 4)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_a_tuple_of_axes_means_the_order_of_the_mesh_however_it_is_written(backend):
    def f(axes, x):
        return all_gather_invariant(x, axes.tp + axes.fsdp), axis_index(axes.tp + axes.fsdp)[None]

    spec = P(("fsdp", "tp"))
    y, index = shard_map(f, Mesh(fsdp=2, tp=2), (spec,), (P(), spec), backend=backend)(
        torch.arange(4.0)
    )
    assert (y.tolist(), index.tolist()) == ([0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3])


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_gather_travels_in_dtype_and_its_gradient_is_summed_in_grad_dtype(backend):
    """bf16 cotangents 1 + 2^-8 would each round to 1 with bf16 sums; in fp32 nothing is lost but
    their own rounding.
    """
    w = torch.tensor([1.0, 1.001, 3.0, 4.0])
    scale = torch.tensor([256.0, 1.0, 1.0, 1.0])[:, None]

    def f(axes, w, scale):
        def loss(w):
            whole = all_gather(w, axes.fsdp, dtype=torch.bfloat16, grad_dtype=torch.float32)
            assert whole.dtype == torch.bfloat16
            return (whole * scale[0].to(whole.dtype)).sum()

        with record_collectives() as record:
            g = grad(loss)(w)
        assert record.nbytes["all_gather"] == 2  # one bf16 number
        assert record.nbytes["psum_scatter"] == 16
        return g

    g = shard_map(f, Mesh(fsdp=4), (P("fsdp"), P("fsdp")), P("fsdp"), backend=backend)(w, scale)
    assert g.dtype == torch.float32
    assert g.tolist() == [259.0] * 4  # bf16 has 258 and 260 only


@pytest.mark.parametrize("collective", [psum, pvary, all_gather, pslice, psum_scatter, pmax])
@pytest.mark.parametrize("axis", [(), Mesh(tp=1).axes().tp])
def test_over_one_rank_each_is_an_identity(collective, axis):
    x = torch.randn(4)
    assert torch.equal(collective(x, axis), x)


def test_over_one_rank_with_arguments():
    x = torch.randn(4, 3)
    assert all_to_all(x, (), 0, 1) is x
    assert ragged_all_to_all(x, (), [4], [4]) is x
    assert ppermute(x, (), [(0, 0)]) is x
    assert torch.equal(ppermute(x, (), []), torch.zeros(4, 3))
    assert all_gather(x, (), dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: psum_scatter(torch.ones(3), a), r"2 ranks do not divide dimension 0 of \[3\]"),
        (lambda a: all_gather(torch.ones(()), a), "dim=0 of a tensor of 0 dimensions"),
        (
            lambda a: ppermute(torch.ones(1), a, [(0, 1), (1, 1)]),
            "each rank is source and target at most once",
        ),
        (lambda a: ppermute(torch.ones(1), a, [(0, 2)]), "over 2 ranks"),
        (lambda a: ragged_all_to_all(torch.ones(2), a, [1, 2], [1, 1]), "send adds up to the rows"),
        (lambda a: psum(torch.ones(1), (*a, *a)), "named twice"),
    ],
)
def test_a_wrong_call_is_refused(call, message: str):
    for backend in ("simulated", "threads"):
        with pytest.raises(ValueError, match=message):
            shard_map(
                lambda axes: (call(axes.tp), torch.ones(1))[1], Mesh(tp=2), (), P(), backend=backend
            )()


def test_the_simulated_mesh_has_no_ragged_exchange():
    with pytest.raises(
        ValueError, match="sizes differ by rank; use a padded all_to_all, or backend threads"
    ):
        shard_map(
            lambda axes, x: ragged_all_to_all(x, axes.tp, [1, 1], [1, 1]),
            Mesh(tp=2),
            (P("tp"),),
            P("tp"),
        )(torch.ones(4))


def test_sums_are_in_the_order_of_ranks_on_both_backends():
    x = (
        torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)
        .repeat_interleave(5)
        .reshape(4, 5)
    )
    results = [
        shard_map(lambda axes, x: psum(x, axes.fsdp), Mesh(fsdp=4), (P("fsdp"),), P(), backend=b)(x)
        for b, _ in itertools.product(("simulated", "threads"), range(3))
    ]
    assert all(torch.equal(r, results[0]) for r in results)
