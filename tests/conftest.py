"""What every test runs under: run-time shape checks, one thread, fixed seeds, skips for absent
devices.

jaxtyping and beartype check each annotation of each k31fn function that the first case of a test
calls; its other cases run without. The checks must be in place before a module of k31fn is
imported, so nothing above may import one (nor may a pytest plugin).
"""

import faulthandler
import os
import random
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = (
    "1"  # read when torch is first imported; test processes are what runs in parallel
)

import k31fn

k31fn.checked()

import jaxtyping
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # Triton kernels run in its interpreter; read when triton is first imported
    )


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Same random numbers in each test, whatever ran before it. k31fn itself draws from keys
    only.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def autograd_knows_the_gpu() -> None:
    """Binds autograd's thread to the GPU: where a matrix product comes first, cuBLAS does, and
    warns.
    """
    if torch.cuda.is_available():
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()


_RUN: set[str] = set()  # tests of which this process has run a case


@pytest.fixture(autouse=True)
def annotations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Annotations are checked in the first case of a test, and in every slow one. A layer takes two
    to four times as long with them, and more cases call the same functions with other numbers.
    """
    test = request.node.nodeid.partition("[")[0]
    slow = request.node.get_closest_marker("slow") is not None
    jaxtyping.config.update("jaxtyping_disable", test in _RUN and not slow)
    _RUN.add(test)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unchecked(annotations: None) -> None:
    """Annotations are not checked, for tests of many steps. Other tests check the same code."""
    jaxtyping.config.update("jaxtyping_disable", True)


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
        marked = [
            item for item in items if device in item.keywords and item.get_closest_marker(device)
        ]
        if marked and (reason := _missing(device)):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No stacks are printed of a test that may take longer: a process that goes on while they are
    read can crash.
    """
    marker = item.get_closest_marker("timeout")
    if marker and marker.args[0] > float(item.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()
