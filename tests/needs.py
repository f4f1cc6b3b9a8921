"""Packages that a test cannot do without."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where one is not installed; it is imported where it is used, not by every collection
    of the tests, as ``pytest.importorskip`` would.
    """
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
