"""What the tests of paired runs share."""

from pathlib import Path

import pytest

from tests.trainer import runs


@pytest.fixture(autouse=True)
def of_many_steps(unchecked: None) -> None:
    """Annotations are not checked: pairs of runs are many steps."""


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text to train on."""
    return runs.write_text(tmp_path_factory.mktemp("text"))
