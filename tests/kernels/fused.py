"""What the tests of fused kernels share: where they run, and what an unwritten output looks
like.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # on the CPU: Triton's interpreter (tests/conftest.py)


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is NaN, so an element that a kernel does not write shows."""
    before = torch.get_deterministic_debug_mode()
    # not use_deterministic_algorithms, which imports torch's compiler: four seconds
    torch.set_deterministic_debug_mode("warn")
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
