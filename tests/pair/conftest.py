"""What the tests of paired runs share."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from tests.trainer import runs


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """Annotations are not checked: four times as fast. Other tests check the same code."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text to train on."""
    return runs.write_text(tmp_path_factory.mktemp("text"))
