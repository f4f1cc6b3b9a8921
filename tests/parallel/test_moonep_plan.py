"""MoonEP's plan against a form in plain Python, and against the laws that it must keep."""

from __future__ import annotations

import random

import pytest
import torch

from k31fn.parallel.moonep import plan as moonep
from k31fn.parallel.moonep.plan import make_plan, places_of


def uniform(rng, num_ranks, num_experts, num_rows):
    return [[rng.randrange(num_experts) for _ in range(num_rows)] for _ in range(num_ranks)]


def zipf(rng, num_ranks, num_experts, num_rows):
    weights = [1 / (i + 1) ** 1.2 for i in range(num_experts)]
    rng.shuffle(weights)
    return [rng.choices(range(num_experts), weights, k=num_rows) for _ in range(num_ranks)]


def one_expert(rng, num_ranks, num_experts, num_rows):
    return [[rng.randrange(num_experts)] * num_rows] * num_ranks


def none_for_one_rank(rng, num_ranks, num_experts, num_rows):
    own = num_experts // num_ranks
    without = rng.randrange(num_ranks)
    others = [e for e in range(num_experts) if e // own != without]
    return [rng.choices(others, k=num_rows) for _ in range(num_ranks)]


def one_group(rng, num_ranks, num_experts, num_rows):
    """The experts of one rank get all rows, each as many: it fills the others with many experts."""
    own = num_experts // num_ranks
    first = rng.randrange(num_ranks) * own
    return [[first + i % own for i in range(num_rows)] for _ in range(num_ranks)]


def few(rng, num_ranks, num_experts, num_rows):
    """Fewer rows on all ranks together than there are experts."""
    del num_rows
    return uniform(rng, num_ranks, num_experts, max(1, num_experts // num_ranks - 1))


def different(rng, num_ranks, num_experts, num_rows):
    """Each rank likes an expert of its own."""
    return [[rng.randrange(num_experts)] * num_rows for _ in range(num_ranks)]


SKEWS = [uniform, zipf, one_expert, none_for_one_rank, one_group, few, different]


def count(routes, num_experts):
    return torch.stack([torch.bincount(torch.tensor(r), minlength=num_experts) for r in routes])


def by_hand(copies, num_ranks, num_rows):
    """``{(expert, rank): rows}``, a pair of ranks and an expert at a time."""
    own = len(copies) // num_ranks
    left = dict(enumerate(copies))
    surplus = [sum(copies[r * own : (r + 1) * own]) - num_rows for r in range(num_ranks)]
    shares = {}
    while max(surplus) > 0:
        giver, taker = surplus.index(max(surplus)), surplus.index(min(surplus))
        rows = -surplus[taker]
        surplus[giver] -= rows
        surplus[taker] = 0
        while rows:
            expert = max(range(giver * own, (giver + 1) * own), key=lambda e: (left[e], -e))
            moved = min(rows, left[expert])
            shares[expert, taker] = moved
            left[expert] -= moved
            rows -= moved
    for expert, rows in left.items():
        if rows:
            shares[expert, expert // own] = rows
    return shares


def check(routes, num_experts, num_slots=None):
    """Follows every row to its place, and compares what lies there with the plan in Python."""
    num_ranks, num_rows = len(routes), len(routes[0])
    own = num_experts // num_ranks
    num_slots = own if num_slots is None else num_slots
    counts = count(routes, num_experts)
    plan = make_plan(counts, num_rows, num_slots)
    assert plan.violations.tolist() == [0] * num_ranks

    expected = by_hand(counts.sum(0).tolist(), num_ranks, num_rows)
    copied = [
        sorted(e for e, r in expected if r == rank and e // own != r) for rank in range(num_ranks)
    ]
    padded = [experts + [-1] * (num_slots - len(experts)) for experts in copied]
    assert plan.slots.tolist() == padded
    assert max(map(len, copied)) <= own
    assert all(len({e // own for e in experts}) <= 1 for experts in copied)

    lying = [[None] * num_rows for _ in range(num_ranks)]
    seen = [0] * num_experts
    for source, route in enumerate(routes):
        numbers = []
        for expert in route:
            numbers.append(seen[expert])
            seen[expert] += 1
        ranks, places = places_of(plan, torch.tensor(route), torch.tensor(numbers))
        for i, (rank, place) in enumerate(zip(ranks.tolist(), places.tolist(), strict=True)):
            assert lying[rank][place] is None, "two rows in one place"
            lying[rank][place] = (route[i], source, i)
    for rank in range(num_ranks):
        experts = [*range(rank * own, (rank + 1) * own), *copied[rank]]
        rows = [expected.get((e, rank), 0) for e in experts]
        assert plan.sizes[rank].tolist() == rows + [0] * (num_slots - len(copied[rank]))
        in_order = [e for e, n in zip(experts, rows, strict=True) for _ in range(n)]
        assert [row[0] for row in lying[rank]] == in_order  # so no place is empty
        for e in experts:
            mine = [row[1:] for row in lying[rank] if row[0] == e]
            assert mine == sorted(mine), "not in the order of source ranks and tokens"


def test_the_published_example():
    """Ranks with [4, 0, 16, 0, 0, 8, 0, 4] rows become 8 ranks with 4 each."""
    loads = [4, 0, 16, 0, 0, 8, 0, 4]
    counts = torch.zeros(8, 8, dtype=torch.int64)
    rows = [e for e, n in enumerate(loads) for _ in range(n)]
    for i, expert in enumerate(rows):
        counts[i % 8, expert] += 1
    plan = make_plan(counts, 4, 1)
    assert plan.sizes.sum(1).tolist() == [4] * 8
    assert plan.slots.flatten().tolist() == [-1, 2, -1, 2, 2, -1, 5, -1]
    assert plan.violations.tolist() == [0] * 8


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(
    "shape", [(2, 4, 12), (3, 6, 8), (4, 4, 10), (8, 32, 48), (64, 128, 6)], ids=str
)
def test_any_skew(shape, skew):
    num_ranks, num_experts, num_rows = shape
    for seed in range(1 if num_ranks > 8 else 4):
        check(skew(random.Random(seed), num_ranks, num_experts, num_rows), num_experts)


def test_one_rank_keeps_its_rows():
    plan = make_plan(torch.tensor([[2, 0, 3]]), 5, 3)
    assert plan.sizes.tolist() == [[2, 0, 3, 0, 0, 0]]
    assert plan.slots.tolist() == [[-1, -1, -1]]
    assert plan.violations.tolist() == [0]


def test_too_few_slots_are_counted_and_every_row_has_a_place():
    """A rank gets four experts and has two slots."""
    routes = one_group(random.Random(0), 2, 8, 8)
    counts = count(routes, 8)
    needed = 2
    assert make_plan(counts, 8, needed).violations.tolist() == [0, 0]
    plan = make_plan(counts, 8, needed - 1)
    assert sorted(plan.violations.tolist()) == [0, 1]
    assert plan.sizes.sum(1).tolist() == [8, 8]
    for expert in range(8):
        number = torch.arange(int(counts[:, expert].sum()))
        _, place = places_of(plan, torch.full_like(number, expert), number)
        assert ((place >= 0) & (place < 8)).all()


def test_counts_that_do_not_add_up_are_violations():
    counts = count(uniform(random.Random(0), 4, 8, 12), 8)
    counts[1, 3] += 2
    assert make_plan(counts, 12, 2).violations.sum() > 0
    assert make_plan(counts, 12, 2).violations[1] > 0


@pytest.mark.parametrize("lost", [-1, 1])
def test_a_row_lost_or_doubled_is_a_violation(lost, monkeypatch):
    right = moonep._shares

    def wrong(*args):
        shares = right(*args)
        shares[5, 2] += lost
        return shares

    monkeypatch.setattr(moonep, "_shares", wrong)
    violations = make_plan(count(uniform(random.Random(0), 4, 8, 12), 8), 12, 2).violations
    assert violations[2] > 0


def test_two_home_groups_are_a_violation(monkeypatch):
    """Rows of two ranks go to a third one: every row is somewhere once, every rank is full."""
    counts = torch.tensor([[2, 2, 0]] * 3)
    right = torch.tensor([[4, 0, 2], [0, 4, 2], [0, 0, 0]])
    monkeypatch.setattr(moonep, "_shares", lambda *args: right)
    assert make_plan(counts, 4, 2).violations.tolist() == [0, 0, 1]


def test_samples_of_vmap_and_meta_tensors():
    routes = [skew(random.Random(1), 4, 8, 12) for skew in (uniform, zipf, one_expert)]
    counts = torch.stack([count(r, 8) for r in routes])
    together = torch.vmap(lambda c: make_plan(c, 12, 2))(counts)
    for i, sample in enumerate(counts):
        for got, expected in zip(together, make_plan(sample, 12, 2), strict=True):
            assert torch.equal(got[i], expected)
    on_meta = make_plan(counts[0].to("meta"), 12, 2)
    for got, expected in zip(on_meta, make_plan(counts[0], 12, 2), strict=True):
        assert got.shape == expected.shape
