"""What the tests of the trainer share."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from k31fn.checkpoint import checkpointer
from tests.checkpoint.direct import Direct
from tests.trainer import runs


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text to train on."""
    return runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not checked: four times as fast, for tests of many steps.

    Other tests check the same code.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written in the process of the test, for tests of something else than
    writers.
    """
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr(checkpointer, "WriterSession", Direct)
