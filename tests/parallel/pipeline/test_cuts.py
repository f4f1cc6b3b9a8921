from __future__ import annotations

import itertools

import pytest

from k31fn.parallel.pipeline import stage_ranges


def test_numbers_of_layers_differ_by_one_at_most():
    assert stage_ranges(7, 3) == (range(0, 3), range(3, 5), range(5, 7))
    assert stage_ranges(4, 4) == tuple(range(i, i + 1) for i in range(4))
    assert stage_ranges(5, 1) == (range(5),)


def test_costs_are_balanced_as_well_as_any_cuts_do():
    costs = [5.0, 1.0, 1.0, 2.0, 4.0, 3.0, 3.0]
    for n in range(1, 8):
        ranges = stage_ranges(7, n, costs=costs)
        assert [i for r in ranges for i in r] == list(range(7))
        assert all(len(r) for r in ranges)

        def largest(firsts):
            return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *firsts, 7)))

        best = min(largest(firsts) for firsts in itertools.combinations(range(1, 7), n - 1))
        assert largest([r.start for r in ranges[1:]]) == best


def test_explicit_cuts():
    assert stage_ranges(6, 3, cuts=(1, 4)) == (range(0, 1), range(1, 4), range(4, 6))
    assert stage_ranges(6, 3, cuts=(3, 6)) == (
        range(0, 3),
        range(3, 6),
        range(6, 6),
    )  # the head alone


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_stages": 5}, "5 stages for 4 layers.*nearest: 4"),
        ({"num_stages": 2, "cuts": (1, 2)}, "need 1 ascending"),
        ({"num_stages": 3, "cuts": (3, 1)}, "need 2 ascending"),
        ({"num_stages": 2, "cuts": (5,)}, "within 0..4"),
        ({"num_stages": 2, "costs": [1.0, 1.0]}, "one for each of 4 layers"),
        ({"num_stages": 2, "costs": [1.0, 1.0, 1.0, -1.0]}, "none negative"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        stage_ranges(4, **arguments)
