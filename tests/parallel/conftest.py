from __future__ import annotations

from collections.abc import Iterator

import pytest

from k31fn.testing import Ranks, spawn_ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes for the whole session: starting them takes longer than any test."""
    with spawn_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with spawn_ranks(4) as ranks:
        yield ranks
