"""What every test runs under: run-time shape checks, one thread, fixed seeds, skips for absent devices.

jaxtyping and beartype check each annotation of each k31fn function while the tests run. The hook must be in place
before the first import of k31fn, so nothing above it may import k31fn (nor may a pytest plugin).
"""

import os
import random
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported; test processes are what runs in parallel

import jaxtyping

if loaded := sorted(m for m in sys.modules if m.partition(".")[0] == "k31fn"):
    raise RuntimeError(f"{loaded} imported before tests/conftest.py: shapes would go unchecked; import it later")
jaxtyping.install_import_hook("k31fn", "beartype.beartype")

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Same random numbers in each test, whatever ran before it. k31fn itself draws from keys only."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _missing(device: str) -> str | None:
    """Why tests marked ``device`` cannot run here, or None."""
    backend = getattr(torch, device, None)  # torch_npu adds torch.npu; torch.cuda is always there
    if backend is None:
        try:
            __import__(f"torch_{device}")
        except ImportError as e:
            return f"no {device}: {e}"
        backend = getattr(torch, device)
    return None if backend.is_available() else f"no {device} device on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for device in ("cuda", "npu"):
        marked = [item for item in items if device in item.keywords and item.get_closest_marker(device)]
        if marked and (reason := _missing(device)):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
