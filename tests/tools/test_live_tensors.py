"""What lives between forward and backward under each scheme, as benchmarks/live_tensors.py draws
it.
"""

from __future__ import annotations

import pytest

from benchmarks.live_tensors import LAYERS, PARTS, live_tensors
from k31fn.model.layers import RUN, Remat

INPUT, JOINS, INSIDE, OUTPUT = PARTS
TWO_BRANCHES = 2 * LAYERS
"""Outputs of the branches of all layers, each one hidden state."""


@pytest.mark.parametrize("scheme", ["layer", "intra_layer", "cross_layer"])
def test_what_a_scheme_keeps(scheme: Remat) -> None:
    """Two hidden states inside of a branch: before and after its activation."""
    live = live_tensors(scheme)
    blocks = LAYERS // 4  # states that opened a block, which all later ones contain
    keeps = scheme != "layer"
    assert blocks >= LAYERS // RUN
    assert live.totals() == {
        INPUT: blocks if scheme == "cross_layer" else LAYERS,
        JOINS: 0,
        INSIDE: 2 * TWO_BRANCHES * keeps,
        OUTPUT: TWO_BRANCHES * keeps,
    }
    assert live.rest == pytest.approx(0, abs=0.1)


def test_all_is_seen_without_recomputation() -> None:
    live = live_tensors("none")
    assert live.totals()[JOINS] > 2 * LAYERS
    assert live.totals()[INSIDE] == 2 * TWO_BRANCHES
    assert live.rest == pytest.approx(0, abs=0.1)
