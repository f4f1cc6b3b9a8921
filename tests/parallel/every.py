"""A table of cases of which some are in the default suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(arguments: str, values: Iterable[Any], default: Iterable[Any]) -> Any:
    """A test for each of these values, slow but for those in the default suite.

    Raises:
        ValueError: one of the default that is no value.
    """
    rows = [v if isinstance(v, tuple) else (v,) for v in values]
    chosen = [v if isinstance(v, tuple) else (v,) for v in default]
    unknown = [row for row in chosen if row not in rows]
    if unknown:
        raise ValueError(f"default={unknown}: no such case")
    marked = [pytest.param(*row, marks=() if row in chosen else pytest.mark.slow) for row in rows]
    return pytest.mark.parametrize(arguments.split(), marked, ids=str)
