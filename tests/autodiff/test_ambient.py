"""A backward on another thread, as autograd runs it for tensors on a device, finds what its forward
found.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import ambient, carry, custom_vjp, vjp
from k31fn.kernels.registry import Implementation, Op, record_impls, use_impl

IDLE: contextvars.ContextVar[int] = contextvars.ContextVar("idle", default=0)


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> contextvars.ContextVar[int]:
    monkeypatch.setattr(ambient, "_CARRIED", list(ambient._CARRIED))
    return carry(contextvars.ContextVar("level", default=0))


def elsewhere(f: Callable[..., Any], *args: Any) -> Any:
    """The result of a call on a thread of its own, where every context variable has its default."""
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: contextvars.Context().run(lambda: found.append(f(*args)))
    )
    thread.start()
    thread.join()
    return found[0]


def test_a_backward_reads_what_its_forward_read(level: contextvars.ContextVar[int]) -> None:
    seen: list[tuple[int, int]] = []

    def bwd(residuals: Any, ct: Tensor) -> tuple[Tensor]:
        del residuals
        seen.append((level.get(), IDLE.get()))
        return (2 * ct,)

    twice = custom_vjp(lambda x: (2 * x, ()), bwd)
    x = torch.ones(3)
    for variable in (level, IDLE):
        variable.set(5)
    _, pull = vjp(twice, x)
    assert torch.equal(elsewhere(pull, x)[0], 2 * x)
    level.set(7)
    _, pull = vjp(twice, x)
    level.set(8)
    pull(x)  # on its own thread the present value counts, as everywhere
    assert seen == [(5, 0), (8, 5)]  # the other variable was not carried
    assert elsewhere(level.get) == 0


def test_an_implementation_that_was_asked_for_runs_in_a_backward_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("k31fn.kernels.registry.OPS", {})
    inner = Op("inner", lambda x: 3 * x)
    inner.register(Implementation("other", (), lambda x: 4 * x, on_request=("cpu",)))
    outer = custom_vjp(lambda x: (inner(x), ()), lambda _, ct: (inner(ct),), name="inner")
    x = torch.ones(2)
    with use_impl(inner="other"), record_impls() as ran:
        _, pull = vjp(outer, x)
        (found,) = elsewhere(pull, x)
    assert torch.equal(found, 4 * x)
    assert ran == {("inner", "other"): 2}
