"""What the tests of the trainer share."""

from pathlib import Path

import pytest

from k31fn.checkpoint import checkpointer
from tests.checkpoint.direct import Direct
from tests.trainer import runs


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text to train on."""
    return runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written in the process of the test, for tests of something else than
    writers.
    """
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr(checkpointer, "WriterSession", Direct)
