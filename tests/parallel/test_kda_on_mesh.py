"""KDA over heads, tokens and slices of documents: equal to one device, and only what must travel
does.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.kda import KdaFragment
from k31fn.layers import kda, short_conv
from k31fn.parallel import (
    AxisRules,
    Mesh,
    MeshAxes,
    P,
    Sharding,
    all_gather,
    axis_index,
    partition,
    ppermute,
    pvary,
    record_collectives,
    shard_map,
)
from k31fn.segments import Segments, from_lengths
from k31fn.testing import Ranks, assert_sharded_equals_dense
from tests.parallel import cases_kda as cases

T = 80
# The cuts are at 40, or at 20, 40 and 60. Documents that span three slices, end at a cut, begin at
# a cut, or begin 1, 2 and 3 tokens before one; a padded tail, and slices of nothing but padding.
LENGTHS = [[7, 53, 20], [20, 33], [37, 38], [19, 2, 17, 42]]
PACKED = from_lengths(LENGTHS, T)
X, PACKING = P(("dp", "fsdp"), ("cp", "tp")), P(("dp", "fsdp"), "cp")
WEIGHTS = 14  # leaves
ON_FOUR, MIXED = Mesh(cp=4), Mesh(cp=2, tp=2)
ON_TWO = ("simulated", "threads")


def arguments(dtype: torch.dtype = torch.float64) -> tuple[kda.Params[Tensor], Tensor, Segments]:
    """Weights moved off the initial values that hide a term; the state lasts, as most decays are
    weak.
    """
    weights = params.init(kda.specs(cases.CFG), random.key(2), dtype=dtype)
    weights = tree.map(lambda w: w * 15 if w.ndim > 1 else w + 0.3 * torch.rand_like(w), weights)
    return weights, torch.randn(len(LENGTHS), T, cases.CFG.hidden_size, dtype=dtype), PACKED


def specs(mesh: Mesh, *, spread: bool = True):
    return partition(kda.specs(cases.CFG), AxisRules() if spread else AxisRules(spread=()), mesh)


def counts(mesh: Mesh, *, spread: bool) -> dict[str, int]:
    """What one rank issues: over tp, x and the decay's input in, y out, and the gradients of w_fa
    and o_norm; over cp, the halo of the three convolutions together, and one pair of states; over
    the data axes, each weight.
    """
    tp, cp, data = mesh.tp > 1, mesh.cp > 1, mesh.dp * mesh.fsdp * mesh.cp > 1
    gathered = 3 * tp + cp + WEIGHTS * (spread and mesh.fsdp * mesh.cp > 1)
    found = {"all_gather": gathered, "psum_scatter": gathered, "ppermute": 2 * cp, "psum": 2 * tp}
    found["psum"] += WEIGHTS * (mesh.dp > 1 if spread else data)
    return {kind: n for kind, n in found.items() if n}


def check(
    mesh: Mesh, f=cases.whole, *, dtype=torch.float64, rtol=1e-10, atol=1e-10, apart=False, **kwargs
):
    """``apart``: states and transitions travel in two messages."""
    spread, twice = f is cases.spread, Counter(all_gather=1, psum_scatter=1) if apart else Counter()
    return assert_sharded_equals_dense(
        f,
        arguments(dtype),
        (specs(mesh, spread=spread), X, PACKING),
        X,
        mesh,
        collectives=Counter(counts(mesh, spread=spread)) + twice,
        rtol=rtol,
        atol=atol,
        **kwargs,
    )


# ------------------------------------------------------------------------------- against one device
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2)], ids=str)
def test_two_ranks_on_every_backend(mesh: Mesh, two_ranks: Ranks):
    assert check(mesh, ranks=two_ranks).backends == ("simulated", "threads", "processes")


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(tp=2)], ids=str)
def test_fused_kernels_on_two_ranks_equal_plain_torch_on_one_device(mesh: Mesh):
    """float32; documents across the cut and before it. On a GPU the ranks are threads too."""
    pytest.importorskip("triton")
    on_gpu = torch.cuda.is_available()
    weights = params.init(kda.specs(cases.WIDE), random.key(2), dtype=torch.float32)
    weights = tree.map(lambda w: w * 15 if w.ndim > 1 else w + 0.3 * torch.rand_like(w), weights)
    x = torch.randn(2, 40, cases.WIDE.hidden_size)
    args = (weights, x, from_lengths([[7, 25, 8], [20, 17]], 40))
    found = partition(kda.specs(cases.WIDE), AxisRules(spread=()), mesh)
    # on a split context norms and gates are made before the state is known
    ran = ("kda", "kda_fragment") if mesh.cp > 1 else ("kda_gated",)
    assert_sharded_equals_dense(
        cases.fused,
        tree.map(lambda t: t.cuda(), args) if on_gpu else args,
        (found, X, PACKING),
        X,
        mesh,
        dense=lambda axes, params, *rest: (
            kda.apply(params, rest[0], cases.WIDE, segments=rest[1]).y
        ),
        collectives=counts(mesh, spread=False),
        impls=dict.fromkeys(ran, "triton"),
        rtol=1e-4,
        atol=1e-3,  # gradients of some 100, as in test_fp32_on_processes
        # Triton's interpreter changes its module while it runs, so it takes one thread
        backends=ON_TWO if on_gpu else ("simulated",),
    )


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=4), Mesh(cp=4), Mesh(cp=2, tp=2), Mesh(cp=4, ep=2)], ids=str
)
def test_on_four_ranks(mesh: Mesh):
    """In (cp4, ep2) cp is two atomic axes."""
    check(mesh, backends=ON_TWO)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(fsdp=2, cp=2), pytest.param(Mesh(dp=2, cp=2, tp=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_with_weights_spread_over_the_data_ranks(mesh: Mesh):
    check(mesh, cases.spread, backends=ON_TWO)


def test_gathered_and_relayed_inside_remat():
    """All of the forward's collectives twice; the ranks' own numbers reach the replay."""
    forward, backward = (
        {"all_gather": WEIGHTS + 2 + 1, "psum_scatter": 1, "ppermute": 1},
        counts(MIXED, spread=True),
    )
    assert_sharded_equals_dense(
        cases.rematerialised,
        arguments()[:2],
        (specs(MIXED), X),
        X,
        MIXED,
        collectives={kind: n + forward.get(kind, 0) for kind, n in backward.items()},
        rtol=1e-10,
        atol=1e-10,
        backends=ON_TWO,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ON_TWO)
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2), Mesh(cp=4), Mesh(cp=2, tp=2)], ids=str)
def test_on_one_gpu_it_equals_the_cpu(mesh: Mesh, backend: str):
    args = arguments()
    run = shard_map(
        with_gradients, mesh, (specs(mesh, spread=False), X, PACKING), (X, X), backend=backend
    )
    for got, expected in zip(run(*tree.map(lambda t: t.cuda(), args)), run(*args), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [Mesh(tp=4), Mesh(cp=4), Mesh(cp=2, tp=2), Mesh(fsdp=2, cp=2)], ids=str
)
def test_on_four_processes(mesh: Mesh, four_ranks: Ranks):
    check(mesh, cases.spread, backends=("processes",), ranks=four_ranks)


def test_fp32_on_processes(two_ranks: Ranks):
    """Sums in another order. The largest gradients are about 100, so atol is 1e-5 of them; one
    device in float32 is off by as much from float64.
    """
    check(
        Mesh(cp=2),
        dtype=torch.float32,
        rtol=1e-5,
        atol=1e-3,
        backends=("processes",),
        ranks=two_ranks,
    )


@pytest.mark.parametrize("mesh", [Mesh(cp=4)], ids=str)
def test_one_document_per_row_needs_no_segments(mesh: Mesh):
    weights, x, _ = arguments()
    assert_sharded_equals_dense(
        cases.one_document,
        (weights, x),
        (specs(mesh, spread=False), X),
        X,
        mesh,
        collectives=counts(mesh, spread=False),
        rtol=1e-10,
        atol=1e-10,
        backends=ON_TWO,
    )


@pytest.mark.parametrize("backend", ON_TWO)
def test_what_padding_holds_changes_no_bit(backend):
    """Nor does it get a gradient, on whichever rank it lies."""
    mesh = Mesh(cp=4)
    weights, x, packing = arguments(torch.float32)
    padding = packing.ids == 0
    run = shard_map(
        with_gradients, mesh, (specs(mesh, spread=False), X, PACKING), (X, X), backend=backend
    )
    outputs = (
        run(weights, x, packing),
        run(weights, torch.where(padding[..., None], 1e3, x), packing),
    )
    for once, again in zip(*outputs, strict=True):
        assert torch.equal(once, again)
        assert not once[padding].any()


def test_the_convolution_alone_on_slices():
    cfg = cases.CONV
    weights = params.init(short_conv.specs(cfg), random.key(1), dtype=torch.float64)
    x = torch.randn(len(LENGTHS), T, cfg.channels, dtype=torch.float64)
    assert_sharded_equals_dense(
        cases.convolution,
        (weights, x, PACKED),
        (P(), P(None, "cp"), P(None, "cp")),
        P(None, "cp"),
        Mesh(cp=4),
        collectives={"ppermute": 2, "psum": 1},
        rtol=1e-12,
        atol=1e-12,
        backends=ON_TWO,
    )


def test_second_derivatives_through_the_slices():
    """Reverse over reverse, with respect to x, across two cuts."""
    weights, x, _ = arguments()
    mesh = Mesh(cp=4)
    mapped = shard_map(cases.whole, mesh, (specs(mesh, spread=False), X, PACKING), X)
    direction = torch.randn_like(x)

    def along(layer):
        def slope(x: Tensor) -> Tensor:
            return (value_and_grad(lambda x: layer(x).square().sum())(x)[1] * direction).sum()

        return value_and_grad(slope)(x)[1]

    expected = along(lambda x: kda.apply(weights, x, cases.CFG, segments=PACKED).y)
    torch.testing.assert_close(
        along(lambda x: mapped(weights, x, PACKED)), expected, rtol=1e-8, atol=1e-8
    )


# --------------------------------------------------------------------------- what travels, and work
def test_only_halo_and_state_pairs_cross_the_cuts():
    """Every collective of value and gradients with its operand's bytes; float64, one rank of (cp2,
    tp2).
    """
    mesh, cfg = Mesh(cp=2, tp=2), cases.CFG
    rows, d, k, heads = len(LENGTHS), cfg.hidden_size, cfg.head_dim, cfg.num_heads // 2
    weights, x, packing = arguments()
    with record_collectives() as record:
        mapped = shard_map(with_gradients, mesh, (specs(mesh, spread=False), X, PACKING), (X, X))
        mapped(weights, x, packing)
    found: dict[str, list[tuple[str, int]]] = {"cp": [], "tp": []}
    for event in record.events:
        if event.what == "issue" and event.kind != "psum":
            found[event.axes[0]].append((event.kind, event.nbytes // 8))
    halo, pairs = rows * 3 * (3 * heads * k), rows * heads * k * (k + k)
    forward, backward = (
        [("ppermute", halo), ("all_gather", pairs)],
        [("psum_scatter", 2 * pairs), ("ppermute", halo)],
    )
    assert found["cp"] == forward + backward
    own, slice_ = rows * T // 4, rows * T // 2
    entry = [("all_gather", own * d), ("all_gather", own * cfg.rank), ("psum_scatter", slice_ * d)]
    assert found["tp"][:3] == entry
    exit_ = [
        ("all_gather", own * d),
        ("psum_scatter", slice_ * cfg.rank),
        ("psum_scatter", slice_ * d),
    ]
    assert sorted(found["tp"][3:]) == sorted(exit_)


def with_gradients(
    axes: MeshAxes, weights: kda.Params[Tensor], x: Tensor, packing: Segments
) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of x; those of the weights are taken too."""

    def loss(weights: kda.Params[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        y = cases.whole(axes, weights, x, packing)
        return y.square().sum(), y

    (_, y), (_, grad) = value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
    return y, grad


WIDE = kda.Config(hidden_size=1024, num_heads=4, head_dim=8, decay_rank=16)


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=2), Mesh(tp=4), Mesh(cp=2), Mesh(cp=4), Mesh(cp=2, tp=2)], ids=str
)
def test_work_per_rank(mesh: Mesh):
    """1/n of all products. The relay comes on top: the pair of each slice, 1.6% of the layer in K3,
    where hidden_size / head_dim is 56 (here 128, but tiles are longer than heads are wide), and the
    fold, which a longer slice makes small.
    """

    def f(axes: MeshAxes, weights: kda.Params[Tensor], x: Tensor) -> Tensor:
        weights = tree.map(lambda w: pvary(w, axes.data), weights)
        return kda.apply(weights, x, WIDE, sh=Sharding.on(axes)).y

    weights = params.init(kda.specs(WIDE), random.key(2), dtype=torch.float64)
    report = assert_sharded_equals_dense(
        f,
        (weights, torch.randn(1, 128, WIDE.hidden_size, dtype=torch.float64)),
        (partition(kda.specs(WIDE), AxisRules(spread=()), mesh), X),
        X,
        mesh,
        collectives=counts(mesh, spread=False),
        rtol=1e-10,
        atol=1e-10,
        flops=1 / mesh.world_size,
        backends=("threads",),
    )
    added = report.flops * mesh.world_size - 1
    if mesh.cp == 1:
        assert added == pytest.approx(0, abs=1e-12)
    else:
        assert 0.01 < added < 0.05


# ---------------------------------------------------------------------------------- refused, broken
def test_a_slice_shorter_than_the_halo_is_refused():
    mesh = Mesh(cp=4)
    weights, x, packing = arguments()
    x, packing = x[:, :8], tree.map(lambda y: y[:, :8], packing)
    mapped = shard_map(cases.whole, mesh, (specs(mesh, spread=False), X, PACKING), X)
    with pytest.raises(
        ValueError,
        match=r"mesh.cp=4: a slice of 2 tokens is shorter than the 3 .* at least 12 tokens",
    ):
        mapped(weights, x, packing)


def test_weights_that_are_not_split_over_the_heads_axes_are_refused():
    mesh = Mesh(tp=2)
    weights, x, packing = arguments()
    with pytest.raises(ValueError, match=r"16 columns do not divide into num_heads=2 heads of 4"):
        shard_map(cases.whole, mesh, (P(), X, PACKING), X)(weights, x, packing)


def relay_with(fault: str, state: Tensor, transition: Tensor, position: Tensor, context) -> Tensor:
    """The relay, state and transition apart, with one fault."""
    begins = (position[:, 0] == 0)[:, None, None, None]
    if fault != "keeps M at a document's first token":
        transition = torch.where(begins, 0, transition)
    states, transitions = all_gather(state[None], context), all_gather(transition[None], context)
    rank, found = axis_index(context), torch.zeros_like(state)
    for j in range(len(states)):
        skipped = fault == "forgets all but the last rank" and j < len(states) - 2
        found = torch.where((j < rank) & (not skipped), transitions[j] @ found + states[j], found)
    return found if fault == "hands a state to a new document" else torch.where(begins, 0, found)


@pytest.mark.parametrize(
    "fault",
    [
        "keeps M at a document's first token",
        "forgets all but the last rank",
        "hands a state to a new document",
    ],
)
def test_a_broken_relay_is_found(fault, monkeypatch):
    monkeypatch.setattr(kda, "relay", functools.partial(relay_with, ""))
    check(ON_FOUR, backends=("simulated",), apart=True)
    monkeypatch.setattr(kda, "relay", functools.partial(relay_with, fault))
    with pytest.raises(AssertionError, match="simulated against one device"):
        check(ON_FOUR, backends=("simulated",), apart=True)


def test_a_transition_across_a_document_start_is_found(monkeypatch):
    def across(k, v, g, beta, ids, fragment=kda.kda_fragment) -> KdaFragment:
        return fragment(k, v, g, beta, ids)._replace(
            transition=fragment(k, v, g, beta, (ids > 0).long()).transition
        )

    monkeypatch.setattr(kda, "kda_fragment", across)
    with pytest.raises(AssertionError, match="simulated against one device"):
        check(ON_FOUR, backends=("simulated",))


@pytest.mark.parametrize("fault", ["unmasked", "missing"])
def test_a_broken_halo_is_found(fault, monkeypatch):
    def halo(tail: Tensor, count: int, position: Tensor, context) -> Tensor:
        return (
            ppermute(tail, context, [(i, i + 1) for i in range(3)])
            if fault == "unmasked"
            else 0 * tail
        )

    monkeypatch.setattr(short_conv, "left_halo", halo)
    with pytest.raises(AssertionError, match="simulated against one device"):
        check(ON_FOUR, backends=("simulated",))


@pytest.mark.parametrize("backend", ON_TWO)
@pytest.mark.parametrize("shape", [(8, 3), (4,)], ids=["w_fa", "o_norm"])
def test_a_forgotten_pvary_is_found(shape, backend, monkeypatch):
    monkeypatch.setattr(kda, "pvary", lambda w, axes: w if w.shape == shape else pvary(w, axes))
    with pytest.raises(ValueError, match=r"does not name 'tp'|varies over an axis"):
        check(Mesh(tp=2), backends=(backend,))
