"""Every layer, every promise: one test for each pair of a case (``cases_*.py``) and a check
(``checks.py``).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.conformance.case import Case
from tests.conformance.checks import CHECKS, prepare


def collect() -> list[Case]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))
    return [
        case
        for name in names
        for case in importlib.import_module(f"tests.conformance.{name}").CASES
    ]


CASES = collect()


def test_case_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS)
def test_layer(case: Case, check: str):
    CHECKS[check](prepare(case))
