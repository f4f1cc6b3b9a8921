from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from k31fn.testing import Ranks, spawn_ranks

_RUN: set[Path] = set()  # files of which this process has run a test


@pytest.fixture(autouse=True)
def annotations_of_a_file(request: pytest.FixtureRequest, annotations: None) -> None:
    """Annotations are checked in the first test of a file. On a mesh the layers are those that
    tests/layers checks, with parts of the same tensors.
    """
    if request.node.path in _RUN:
        jaxtyping.config.update("jaxtyping_disable", True)
    _RUN.add(request.node.path)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes for the whole session: starting them takes longer than any test."""
    with spawn_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with spawn_ranks(4) as ranks:
        yield ranks
