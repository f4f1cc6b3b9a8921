"""Embedding, cross-entropy, norm, router, block residuals and multi-token prediction on meshes,
each by itself.

Value and gradients against one device, on every backend, with the number of collectives of each
kind.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch

from k31fn import random, segments, tree
from k31fn.layers import attn_res, embedding, mtp, norm, router
from k31fn.parallel import Mesh, P, partition
from k31fn.params import LowRank, Quantized
from k31fn.testing import Ranks, assert_sharded_equals_dense
from tests.parallel import cases_model as cases
from tests.parallel.cases_model import PACKED, SLICE, TOKENS, VOCAB, D, T

MESHES = [Mesh(tp=2), Mesh(cp=2), Mesh(tp=4), Mesh(cp=2, tp=2), Mesh(dp=2, fsdp=2)]
ROWS = len(PACKED)
each_mesh = pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda m: " ".join(f"{a.name}{a.size}" for a in m.axes().atoms)
)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape).double()


def check(
    fn: Any,
    args: Any,
    in_specs: Any,
    out_specs: Any,
    mesh: Mesh,
    ranks: Ranks,
    counts: Any,
    **kwargs: Any,
) -> None:
    backends = (
        ("simulated", "threads", "processes")
        if mesh.world_size == ranks.size
        else ("simulated", "threads")
    )
    assert_sharded_equals_dense(
        fn,
        args,
        in_specs,
        out_specs,
        mesh,
        collectives=+Counter(counts),
        rtol=1e-10,
        atol=1e-11,
        backends=backends,
        ranks=ranks,
        **kwargs,
    )


def whole(specs: Any, mesh: Mesh) -> Any:
    return partition(specs, cases.WHOLE, mesh)


def over(mesh: Mesh) -> tuple[bool, bool]:
    """Whether there are ranks with other tokens of the same slice, and with other data."""
    return mesh.tp > 1, mesh.dp * mesh.fsdp * mesh.cp > 1


@each_mesh
def test_embedding(mesh: Mesh, two_ranks: Ranks):
    tp, data = over(mesh)
    specs = embedding.specs(cases.EMBEDDING)
    args = cases.shaken(specs), cases.batch().tokens
    counts = {"psum_scatter": tp, "all_gather": tp, "psum": data}
    check(cases.look_up, args, (whole(specs, mesh), SLICE), TOKENS, mesh, two_ranks, counts)


@pytest.mark.parametrize(
    "ids",
    [torch.zeros(ROWS, T, dtype=torch.int64), torch.full((ROWS, T), VOCAB - 1, dtype=torch.int32)],
)
def test_embedding_where_one_rank_has_all_rows(ids: torch.Tensor, two_ranks: Ranks):
    """A thousand equal tokens in bfloat16 have the gradient of one device: it is summed in
    float32.
    """
    specs = embedding.specs(cases.EMBEDDING)
    mesh, many = Mesh(tp=2), ids.repeat(1, 16)
    args = cases.shaken(specs, torch.bfloat16), many
    counts = {"psum_scatter": 1, "all_gather": 1}
    check(cases.look_up, args, (whole(specs, mesh), SLICE), TOKENS, mesh, two_ranks, counts)


HEADS = {
    "dense": lambda: drawn(2, D, VOCAB),
    "low rank": lambda: LowRank(drawn(2, D, VOCAB), drawn(3, D, 3), drawn(4, 3, VOCAB)),
    "quantised": lambda: Quantized(
        random.bits(random.key(2), (D, VOCAB)).to(torch.int8),
        0.02 + 0.01 * drawn(4, 4, VOCAB).abs(),
    ),
}
COLUMNS = P(None, "tp")
HEAD_SPECS = {
    "dense": COLUMNS,
    "low rank": LowRank(COLUMNS, P(), COLUMNS),
    "quantised": Quantized(COLUMNS, COLUMNS),
}
FLOATING = {"dense": 1, "low rank": 3, "quantised": 1}


@each_mesh
@pytest.mark.parametrize("fn", [cases.cross_entropy, cases.cross_entropy_in_pieces])
def test_cross_entropy(fn: Any, mesh: Mesh, two_ranks: Ranks):
    check_cross_entropy(fn, "dense", mesh, two_ranks, flops=1 / mesh.world_size)


@pytest.mark.parametrize("fn", [cases.cross_entropy, cases.cross_entropy_in_pieces])
@pytest.mark.parametrize("head", ["low rank", "quantised"])
def test_cross_entropy_of_other_leaves(fn: Any, head: str, two_ranks: Ranks):
    check_cross_entropy(fn, head, Mesh(tp=2), two_ranks)


def check_cross_entropy(fn: Any, head: str, mesh: Mesh, ranks: Ranks, **kwargs: Any) -> None:
    tp, data = over(mesh)
    args = drawn(1, ROWS, T, D), HEADS[head](), cases.batch().labels
    counts = {
        "all_gather": tp,
        "pmax": tp,
        "psum": tp + data + data * FLOATING[head] + (tp and head == "low rank"),
        "psum_scatter": tp,
    }
    check(fn, args, (TOKENS, HEAD_SPECS[head], SLICE), P(), mesh, ranks, counts, **kwargs)


def test_fused_cross_entropy_equals_plain_torch_on_one_device(request: pytest.FixtureRequest):
    """float32, two chunks on each rank: as many collectives as of one. On a GPU the ranks are
    threads; Triton's interpreter takes one thread.
    """
    pytest.importorskip("triton")
    on_gpu = torch.cuda.is_available()
    args = drawn(1, ROWS, T, D).float(), drawn(2, D, VOCAB).float(), cases.batch().labels
    assert_sharded_equals_dense(
        cases.fused_cross_entropy,
        tree.map(lambda t: t.cuda(), args) if on_gpu else args,
        (TOKENS, COLUMNS, SLICE),
        P(),
        Mesh(tp=2),
        dense=cases.cross_entropy,
        collectives={"all_gather": 1, "pmax": 1, "psum": 1, "psum_scatter": 1},
        impls={"head_cross_entropy": "triton"},
        rtol=1e-5,
        atol=1e-5,
        backends=("threads",) if on_gpu else ("processes",),
        ranks=None if on_gpu else request.getfixturevalue("two_ranks"),
    )


def test_logits_of_all_tokens_on_every_rank_are_found(two_ranks: Ranks):
    """Right numbers at the work of one device."""
    f = functools.partial(
        check,
        cases.replicated_cross_entropy,
        (drawn(1, ROWS, T, D), HEADS["dense"](), cases.batch().labels),
    )
    specs, counts = (TOKENS, COLUMNS, SLICE), {"all_gather_invariant": 2}
    f(specs, P(), Mesh(tp=2), two_ranks, counts)
    with pytest.raises(AssertionError, match=r"a rank did 1 of one device's work, at most 0.5"):
        f(specs, P(), Mesh(tp=2), two_ranks, counts, flops=0.5)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_cross_entropy_of_large_logits(scale: float, two_ranks: Ranks):
    """Of another size on each rank: the sum over the ranks neither overflows nor loses one of
    them.
    """
    mesh, shift = Mesh(tp=2), torch.linspace(0, scale, VOCAB, dtype=torch.float64)
    args = drawn(1, ROWS, T, D), drawn(2, D, VOCAB) + shift, cases.batch().labels
    counts = {"all_gather": 1, "pmax": 1, "psum": 1, "psum_scatter": 1}
    check(cases.cross_entropy, args, (TOKENS, COLUMNS, SLICE), P(), mesh, two_ranks, counts)


@each_mesh
def test_norm(mesh: Mesh, two_ranks: Ranks):
    tp, data = over(mesh)
    args = cases.shaken(norm.specs(norm.Config(D))), drawn(1, ROWS, T, D)
    check(cases.normed, args, (P(), TOKENS), TOKENS, mesh, two_ranks, {"psum": tp + data})


@each_mesh
def test_router(mesh: Mesh, two_ranks: Ranks):
    tp, data = over(mesh)
    args = (
        cases.shaken(router.specs(cases.ROUTER)),
        drawn(1, ROWS, T, D),
        segments.from_lengths(PACKED, T),
    )
    out = TOKENS, TOKENS, P(), P()
    counts = {"psum": 2 + tp + data}  # load and histogram; the gradient of the weight
    check(
        cases.routed,
        args,
        (P(), TOKENS, SLICE),
        out,
        mesh,
        two_ranks,
        counts,
        flops=1 / mesh.world_size,
    )


@each_mesh
def test_block_residuals(mesh: Mesh, two_ranks: Ranks):
    tp, data = over(mesh)
    mixes = [attn_res.specs(cases.RESIDUAL, D)] * 6
    args = cases.shaken(mixes), drawn(1, ROWS, T, D)
    counts = {"psum": 10 * (tp + data)}  # the first sublayer has nothing to mix
    check(cases.residuals, args, (P(), TOKENS), TOKENS, mesh, two_ranks, counts)


@each_mesh
def test_multi_token_prediction(mesh: Mesh, two_ranks: Ranks):
    tp, data = over(mesh)
    specs, table = mtp.specs(cases.MTP), embedding.specs(cases.EMBEDDING)
    packing = segments.from_lengths(PACKED, T)
    args = (
        cases.shaken(specs),
        cases.shaken(table),
        drawn(1, ROWS, T, D),
        cases.batch().tokens,
        packing,
    )
    in_specs = whole(specs, mesh), whole(table, mesh), TOKENS, SLICE, SLICE
    attention = {"all_gather": 4 * tp or mesh.cp > 1, "psum_scatter": 4 * tp or mesh.cp > 1}
    counts = Counter(attention)
    counts.update(all_gather=3 * tp, psum_scatter=3 * tp)  # MLP, embedding
    counts["ppermute"] = mesh.cp > 1
    held = [
        path
        for path, spec in tree.flatten_with_paths(whole(specs, Mesh(tp=2)))
        if not any(spec.dims)
    ]
    counts["psum"] = len(held) * tp + (len(tree.leaves(specs)) + 1) * data
    check(cases.predicted, args, in_specs, TOKENS, mesh, two_ranks, counts)


@pytest.mark.parametrize("n", [2, 4])
def test_labels_of_the_token_after_the_next_across_cuts(n: int, two_ranks: Ranks):
    labels = cases.batch().labels
    mesh = Mesh(cp=n)
    check(cases.second_labels, (labels,), (SLICE,), SLICE, mesh, two_ranks, {"ppermute": 1})
