from __future__ import annotations

import dataclasses
import itertools

import pytest

from k31fn.parallel.pipeline import Action, bubble, check, schedule
from k31fn.parallel.pipeline.messages import messages
from k31fn.parallel.pipeline.timeline import timeline

SIZES = [(1, 1), (2, 1), (2, 2), (2, 5), (3, 7), (4, 2), (4, 4), (4, 8), (8, 16)]
TABLES = [schedule(kind, p, m) for kind in ("1f1b", "zero_bubble") for p, m in SIZES] + [
    schedule("interleaved", p, m, num_chunks=v)
    for p, m, v in [(1, 3, 2), (2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 12, 3)]
]


def name(table):
    kind = "split" if table.split else "whole"
    return f"{kind}-{table.num_ranks}x{table.num_chunks}-{table.num_micro_batches}"


def residual_sets(row):
    """Most sets alive at once, from the table alone."""
    live = most = 0
    for action in row:
        live += action.kind == "forward"
        most = max(most, live)
        live -= action.kind in ("backward", "backward_weight")
    return most


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_a_table_has_each_action_once_and_no_deadlock(table):
    check(table)
    actions = [a for row in table.rows for a in row]
    parts = 3 if table.split else 2
    assert len(actions) == len(set(actions)) == parts * table.num_stages * table.num_micro_batches


# unequal durations too: the theory's bubble of these schedules does not need F = B
@pytest.mark.parametrize(("F", "I", "W"), [(1.0, 1.0, 1.0), (1.0, 1.5, 1.0), (2.0, 3.0, 1.5)])
@pytest.mark.parametrize(
    "table", [t for t in TABLES if not t.split or t.num_micro_batches >= t.num_ranks], ids=name
)
def test_the_bubble_is_the_theory_s(table, F, I, W):
    p, v, m = table.num_ranks, table.num_chunks, table.num_micro_batches
    durations = {"forward": F, "backward": I + W, "backward_input": I, "backward_weight": W}
    expected = (p - 1) / (v * m + p - 1)
    if table.split:
        idle = (p - 1) * (F + I - W)
        expected = idle / (m * (F + I + W) + idle)
    assert bubble(timeline(table, durations)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_residual_sets(table):
    p, v, m = table.num_ranks, table.num_chunks, table.num_micro_batches
    for rank, row in enumerate(table.rows):
        bound = p if table.split else p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1
        assert residual_sets(row) == min(bound, m * v)


def test_a_transfer_is_waited_for():
    table = schedule("1f1b", 2, 1)
    (first, last) = timeline(table, transfer=0.25)
    assert [(t.start, t.end) for t in last] == [(1.25, 2.25), (2.25, 4.25)]
    assert [(t.start, t.end) for t in first] == [(0.0, 1.0), (4.5, 6.5)]


def test_zero_bubble_fills_what_1f1b_waits_for():
    whole, split = (timeline(schedule(kind, 4, 8)) for kind in ("1f1b", "zero_bubble"))
    assert bubble(split) < bubble(whole) / 2


# -------------------------------------------------------------------------------- order of messages
def arrive(table, order):
    """Whether all messages arrive if each rank has one queue, in which a send or a receive blocks
    all behind it.

    A message passes when it is first in its sender's and its receiver's queue and the action that
    makes it is done; an action is done once those before it on its rank are and the messages that
    it takes have passed.
    """
    todo = {
        r: [m for m in order if r in (table.rank_of(m.source), table.rank_of(m.to))]
        for r in range(len(table.rows))
    }
    position, passed, done = dict.fromkeys(todo, 0), set(), set()

    def may_run(action):
        s, i = action.stage, action.micro_batch
        before = (s - 1, "forward") if action.kind == "forward" else (s + 1, "backward")
        needed = [m for m in order if (m.to, m.micro_batch, m.source, m.kind) == (s, i, *before)]
        return action.kind == "backward_weight" or all(m in passed for m in needed)

    while True:
        moved = False
        for rank, row in enumerate(table.rows):
            while position[rank] < len(row) and may_run(row[position[rank]]):
                done.add(row[position[rank]])
                position[rank] += 1
                moved = True
        for message in order:
            queues = [todo[table.rank_of(s)] for s in (message.source, message.to)]
            kinds = ["forward"] if message.kind == "forward" else ["backward", "backward_input"]
            made = any(Action(k, message.micro_batch, message.source) in done for k in kinds)
            if made and all(q and q[0] == message for q in queues):
                for q in queues:
                    q.pop(0)
                passed.add(message)
                moved = True
        if not moved:
            return not any(todo.values()) and all(
                position[r] == len(row) for r, row in enumerate(table.rows)
            )


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_messages_pass_in_their_order_even_if_each_blocks_its_rank(table):
    order = messages(table)
    crossings = 2 * (table.num_stages - 1) * table.num_micro_batches if table.num_ranks > 1 else 0
    assert len(order) == len(set(order)) == crossings
    assert arrive(table, order)


def test_another_order_of_messages_blocks():
    table = schedule("1f1b", 2, 4)
    order = sorted(messages(table), key=lambda m: (m.kind != "forward", m.micro_batch))
    assert not arrive(table, order)


# ----------------------------------------------------------------------------------------- refusals
def swap(table, rank, a, b):
    rows = [list(row) for row in table.rows]
    rows[rank][a], rows[rank][b] = rows[rank][b], rows[rank][a]
    return dataclasses.replace(table, rows=tuple(map(tuple, rows)))


def replace(table, rank, position, *actions):
    rows = [list(row) for row in table.rows]
    rows[rank][position : position + 1] = actions
    return dataclasses.replace(table, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (
            swap(schedule("1f1b", 2, 2), 1, 0, 1),
            "wait for each other for ever: rank 0 at backward of micro-batch 0",
        ),
        (swap(schedule("1f1b", 2, 2), 0, 0, 2), "wait for each other for ever"),
        (
            swap(schedule("zero_bubble", 2, 2), 0, 2, 3),
            "for ever: rank 0 at backward_weight of micro-batch 0 on stage 0",
        ),
        (replace(schedule("1f1b", 2, 2), 0, 0), r"stage 0 has \['backward'\] of micro-batch 0"),
        (
            replace(schedule("1f1b", 2, 1), 0, 0, Action("forward", 0, 1)),
            "rank 0 has forward of micro-batch 0 on stage 1",
        ),
        (
            replace(schedule("1f1b", 2, 1), 0, 0, Action("forward", 1, 0)),
            "rank 0 has forward of micro-batch 1",
        ),
        (replace(schedule("1f1b", 1, 1), 0, 0, *[Action("forward", 0, 0)] * 2), "is done twice"),
        (replace(schedule("zero_bubble", 1, 1), 0, 2), r"\['backward_input', 'forward'\]"),
        (
            replace(schedule("zero_bubble", 1, 1), 0, 2, Action("backward", 0, 0)),
            "either a backward or both",
        ),
    ],
)
def test_a_table_that_is_no_schedule_is_refused(table, match):
    with pytest.raises(ValueError, match=match):
        check(table)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("gpipe", 2, 2), "schedule='gpipe' unknown; use one of 1f1b, interleaved, zero_bubble"),
        (("1f1b", 0, 2), "num_ranks=0 must be at least 1"),
        (("1f1b", 2, 0), "num_micro_batches=0"),
        (("1f1b", 2, 4, 2), "num_chunks=2; use 'interleaved'"),
        (("zero_bubble", 2, 4, 2), "num_chunks=2; use 'interleaved'"),
        (("interleaved", 2, 4), "num_chunks=1 is '1f1b'"),
        (("interleaved", 4, 6, 2), "num_micro_batches=6 is no multiple .* 4 ranks.*nearest: 4, 8"),
        (("interleaved", 4, 3, 2), "nearest: 4$"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, match):
    kind, p, m, *v = arguments
    with pytest.raises(ValueError, match=match):
        schedule(kind, p, m, num_chunks=v[0] if v else 1)


def test_stages_lie_in_loops():
    table = schedule("interleaved", 2, 2, num_chunks=3)
    assert [table.stages_of(r) for r in range(2)] == [(0, 2, 4), (1, 3, 5)]
    for rank, row in enumerate(table.rows):
        assert all(table.rank_of(a.stage) == rank for a in row)
    first = list(itertools.takewhile(lambda a: a.kind == "forward", table.rows[1]))
    assert [(a.micro_batch, a.stage) for a in first] == [(0, 1), (1, 1), (0, 3), (1, 3), (0, 5)]
