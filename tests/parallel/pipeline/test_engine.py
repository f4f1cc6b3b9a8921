from __future__ import annotations

import dataclasses
import weakref
from collections import Counter

import pytest
import torch

from k31fn import tree
from k31fn.layers.linear import linear
from k31fn.parallel import Mesh, P, each_rank, record_collectives, shard_map
from k31fn.parallel.backends.abstract import abstract_axes
from k31fn.parallel.pipeline import (
    Schedule,
    StageCarry,
    StageOutput,
    WireFormat,
    check_stages,
    engine,
    run,
    schedule,
    stage_ranges,
)
from k31fn.testing import Ranks, assert_close_trees
from tests.parallel.pipeline import toy

# ranks, kind, chunks: every number of stages cuts inside a span of layers that share blocks
CASES = [
    (1, "1f1b", 1),
    (2, "1f1b", 1),
    (4, "1f1b", 1),
    (8, "1f1b", 1),
    (1, "interleaved", 2),
    (2, "interleaved", 2),
    (2, "interleaved", 4),
    (4, "interleaved", 2),
    (1, "zero_bubble", 1),
    (2, "zero_bubble", 1),
    (4, "zero_bubble", 1),
]


def check(results, batches):
    # sums in another order than one device's: rounding only
    assert_close_trees(toy.together(results), toy.expected(batches), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("ranks", "kind", "chunks"), CASES)
def test_loss_and_gradients_equal_one_device(ranks, kind, chunks):
    batches = toy.micro_batches(4)
    results, _ = toy.on_threads(ranks, kind, batches, chunks)
    check(results, batches)
    assert all(s["calls"] == 4 for result, _ in results for s in result.sums)


def test_uneven_cuts_and_a_stage_without_layers():
    batches = toy.micro_batches(2)
    results, _ = toy.on_threads(4, "1f1b", batches, cuts=(1, 6, 6))
    check(results, batches)


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_accumulation_does_not_change_the_gradient(kind):
    """Case: 1, 2 and 4 micro-batches of the same 8 samples."""
    results = [toy.together(toy.on_threads(2, kind, toy.micro_batches(n))[0]) for n in (1, 2, 4)]
    for other in results[1:]:
        assert_close_trees(other, results[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "kind", "chunks"), [(2, "1f1b", 1), (2, "interleaved", 2), (2, "zero_bubble", 1)]
)
@pytest.mark.slow
def test_processes(two_ranks: Ranks, ranks, kind, chunks):
    answers = two_ranks.run(toy.on_process, ranks, kind, chunks)
    threads, record = toy.on_threads(ranks, kind, toy.micro_batches(4), chunks)
    loss = torch.zeros((), dtype=torch.float64)
    reference = toy.expected(toy.micro_batches(4))
    for (tensors, info), (result, _), own in zip(answers, threads, record.ranks, strict=True):
        expected = [reference[1][a:b] for a, b in info["layers"]]
        assert_close_trees(tensors[1:], tree.leaves(expected), rtol=1e-10, atol=1e-12)
        assert (info["counts"], info["nbytes"]) == (dict(own.counts), dict(own.nbytes))
        assert info["live"] == result.num_live
        loss = loss + tensors[0]
    torch.testing.assert_close(loss, reference[0], rtol=1e-12, atol=0.0)


# ------------------------------------------------------------------------------------- what travels
def test_only_blocks_that_the_receiver_has_not_seen_are_sent():
    """Eight stages of one layer on two ranks; layers 0, 2 and 5 make blocks."""
    batches, size = toy.micro_batches(2), 12 * toy.D * 8  # of one tensor of 12 rows in float64
    _, record = toy.on_threads(2, "interleaved", batches, 4)
    wire = WireFormat(tuple(toy.carries(stage_ranges(8, 8), batches[0])), 2)
    # into stages 1..7: the stream, and the block that the stage before has made; older ones have
    # been on both ranks
    assert [wire.nbytes(s) / size for s in range(1, 8)] == [2, 1, 2, 1, 1, 2, 1]
    sent = Counter()
    for s in range(1, 8):
        sent[(s - 1) % 2] += 2 * wire.nbytes(s)  # forward, for two micro-batches
        sent[s % 2] += 2 * wire.nbytes(s)  # its cotangent
    assert {r: own.nbytes["send"] for r, own in enumerate(record.ranks)} == dict(sent)
    assert sum(sent.values()) == sum(own.nbytes["recv"] for own in record.ranks)
    everything = sum(1 + sum(o < s for o in toy.OPENS) for s in range(1, 8))
    assert sum(sent.values()) == 2 * 2 * 10 * size < 2 * 2 * everything * size


def test_receives_are_posted_ahead_and_sends_do_not_wait():
    """1F1B on two ranks: the order of events is that of the schedule, and a receive is issued
    before it is needed.
    """
    _, record = toy.on_threads(2, "1f1b", toy.micro_batches(4), cuts=(2,))
    last = [(e.what, e.kind) for e in record.ranks[1].events]
    notes = [kind for what, kind in last if what == "note"]
    assert notes == [
        f"{k} of micro-batch {i} on stage 1" for i in range(4) for k in ("forward", "backward")
    ]
    start = last.index(("note", "forward of micro-batch 0 on stage 1"))
    # stream and one block of micro-batches 0 and 1 are asked for before the first forward, which
    # needs only those of 0
    assert Counter(last[:start]) == {("issue", "recv"): 4, ("wait", "recv"): 2}
    first = [(e.what, e.kind) for e in record.ranks[0].events]
    second_forward = first.index(("note", "forward of micro-batch 1 on stage 0"))
    assert first[:second_forward] == [
        ("note", "forward of micro-batch 0 on stage 0"),
        *[("issue", "send")] * 2,
    ]


def test_an_abstract_rank_sends_as_much():
    """One rank without the others, on meta tensors."""
    _, real = toy.on_threads(2, "interleaved", toy.micro_batches(2), 2)
    for rank in range(2):
        with record_collectives() as record:
            batches = [b.to("meta") for b in toy.micro_batches(2)]
            toy.step(abstract_axes(Mesh(pp=2), {"pp": rank}), "interleaved", batches, 2)
        assert (record.counts, record.nbytes) == (real.ranks[rank].counts, real.ranks[rank].nbytes)


# ------------------------------------------------------------------------------------ residual sets
class Kept(torch.autograd.Function):
    """An identity that keeps a residual, whose life is watched."""

    @staticmethod
    def forward(ctx, x, alive):
        ctx.residual = Residual()
        alive.add(ctx.residual)
        alive.most = max(alive.most, len(alive))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


class Residual:
    pass


class Alive(weakref.WeakSet):
    most = 0


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [("1f1b", [4, 3, 2, 1]), ("zero_bubble", [4, 4, 4, 4]), ("all forwards first", [8, 8, 8, 8])],
)
def test_live_residual_sets(kind, bounds):
    """Counted by objects in the graphs: they die when the stage's backward ends."""
    table = schedule("1f1b" if " " in kind else kind, 4, 8)
    if " " in kind:
        rows = tuple(
            tuple(sorted(row, key=lambda a: (a.kind != "forward", a.micro_batch)))
            for row in table.rows
        )
        table = dataclasses.replace(table, rows=rows)
    batches, x = [torch.zeros(2)] * 8, torch.empty(2, device="meta")

    def body(axes):
        alive, index = Alive(), axes.pp[0].host.channel(("pp",)).index

        def stage(params, carry, batch):
            y = Kept.apply(params * (carry.stream if index else batch), alive)
            return StageOutput(
                StageCarry() if index == 3 else StageCarry(y), y.sum() if index == 3 else ()
            )

        carries = [StageCarry(), StageCarry(x), StageCarry(x), StageCarry(x)]
        result = run(table, [stage], [torch.ones(2)], batches, axis=axes.pp, carries=carries)
        return alive.most, len(alive), result.num_live

    results = each_rank(body, Mesh(pp=4), lambda _: ())
    assert [live for *_, live in results] == bounds
    assert all(left == 0 for _, left, _ in results)
    if kind != "zero_bubble":  # whose own residuals go with the inputs' backward already
        assert [most for most, *_ in results] == bounds


# ------------------------------------------------------------------------------------------ mutants
def test_a_dropped_gradient_of_a_block_is_found(monkeypatch):
    def drop(deposits, blocks, cotangents):
        for j, ct in zip(blocks, cotangents, strict=True):
            deposits.setdefault(j, ct)

    batches = toy.micro_batches(2)
    results, _ = toy.on_threads(2, "interleaved", batches, 2)
    check(results, batches)
    monkeypatch.setattr(engine, "_deposit", drop)
    results, _ = toy.on_threads(2, "interleaved", batches, 2)
    with pytest.raises(AssertionError):
        check(results, batches)


def test_a_rescaled_running_sum_is_found(monkeypatch):
    """A moving average in place of the sum is right for one micro-batch and wrong for two."""

    def average(self, action, grads):
        total, new = self.grads[0], tree.leaves(grads)
        total[:] = [(a + b) / 2 for a, b in zip(total, new, strict=True)] if total else new

    monkeypatch.setattr(engine._Rank, "_accumulate", average)
    for count, right in [(1, True), (2, False)]:
        batches = toy.micro_batches(count)
        results, _ = toy.on_threads(2, "1f1b", batches)
        if right:
            check(results, batches)
        else:
            with pytest.raises(AssertionError):
                check(results, batches)


# ------------------------------------------------------------------------------------- split stages
@pytest.mark.parametrize("product", [linear, torch.matmul])
def test_stages_are_checked_before_a_split_schedule(product):
    """Products that linear does not see are not put off."""
    table, one = schedule("zero_bubble", 2, 1), 2 * 3 * 4 * 4

    def body(axes):
        x, w = torch.empty(3, 4, device="meta"), torch.randn(4, 4)
        last = bool(axes.pp[0].host.channel(("pp",)).index)

        def stage(params, carry, batch):
            y = (product if last else linear)(carry.stream if last else batch, params)
            return StageOutput(StageCarry() if last else StageCarry(y), y.sum() if last else ())

        return check_stages(
            table,
            [stage],
            [w],
            torch.randn(3, 4),
            axis=axes.pp,
            carries=[StageCarry(), StageCarry(x)],
        )

    if product is linear:
        first, last = each_rank(body, Mesh(pp=2), lambda _: ())
        assert first[0].whole == one  # the batch needs no cotangent
        assert last == ((2 * one, one, one),)
    else:
        with pytest.raises(
            ValueError,
            match=rf"stage 1 cannot .* nothing is put off: inputs {2 * one} [+] weights 0",
        ):
            each_rank(body, Mesh(pp=2), lambda _: ())


# ----------------------------------------------------------------------------------------- refusals
def one_stage(params, carry, batch):
    return StageOutput(StageCarry(params * batch, (batch,)), ())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"schedule": schedule("1f1b", 2, 1)}, "axis has 1, the schedule 2"),
        ({"stages": []}, "stages has 0, the schedule 1"),
        ({"batches": [1, 2]}, "batches has 2, the schedule 1"),
        ({"carries": []}, "carries has 0, the schedule 1"),
        ({"schedule": Schedule(1, 1, 1, ((),))}, r"stage 0 has \[\] of micro-batch 0"),
    ],
)
def test_a_call_that_does_not_fit_its_schedule_is_refused(changes, match):
    arguments = {
        "schedule": schedule("1f1b", 1, 1),
        "stages": [one_stage],
        "params": [torch.ones(2)],
        "batches": [torch.ones(2)],
        "carries": [StageCarry()],
    } | changes
    with pytest.raises(ValueError, match=match):
        run(axis=(), **arguments)


@pytest.mark.parametrize(
    ("taken", "match"),
    [
        (
            StageCarry(torch.empty(3, device="meta"), (torch.empty(2, device="meta"),)),
            r"\[2\] .* next stage takes .*\[3\]",
        ),
        (StageCarry(torch.empty(2, device="meta")), "stage 0 gives .*blocks.0"),
        (
            StageCarry({"x": torch.empty(2, device="meta")}, (torch.empty(2, device="meta"),)),
            "stream.x",
        ),
    ],
)
def test_a_stage_that_gives_something_else_than_is_said_is_refused(taken, match):
    def body(axes):
        batches = [torch.ones(2)]
        return run(
            schedule("1f1b", 2, 1),
            [one_stage],
            [torch.ones(2)],
            batches,
            axis=axes.pp,
            carries=[StageCarry(), taken],
        )

    with pytest.raises(ValueError, match=match):
        each_rank(body, Mesh(pp=2), lambda _: ())


def test_the_simulated_mesh_is_refused():
    def body(axes, x):
        carries = [StageCarry(), StageCarry(torch.empty(1, device="meta"))]
        return run(
            schedule("1f1b", 2, 1), [one_stage], [x], [x], axis=axes.pp, carries=carries
        ).grads[0]

    with pytest.raises(ValueError, match=r"simulated mesh.*need real ranks; use backend 'threads'"):
        shard_map(body, Mesh(pp=2), (P("pp"),), P("pp"))(torch.ones(2))
