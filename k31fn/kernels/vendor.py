"""Operators of torch_npu as implementations: what an adapter in ``<op>/npu.py`` is
registered as.

An adapter calls vendor operators by the schemas that torch_npu 2.13.0 publishes, forward and
gradient, inside a rule of its own (:class:`k31fn.autodiff.custom_vjp`): whatever autograd torch_npu
itself has for them is not used. Its ``<function>_accepts`` says what the operators cannot do.
Nobody has run the adapters on an NPU: tests run them, with values and gradients against the
reference, over stand-ins written from the operators' documentation.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from k31fn import device
from k31fn.kernels.launch import lazily
from k31fn.kernels.registry import Implementation

__all__ = ["adapter", "declined"]


def adapter(
    op: str,
    function: str,
    *operators: str,
    dtypes: tuple[torch.dtype, ...],
    on_request: bool = False,
    no_capture: str = "",
) -> Implementation:
    """The implementation ``npu``: ``function`` of ``k31fn/kernels/<op>/npu.py``.

    Args:
        op: the sub-package.
        function: its name there; ``<function>_accepts`` stands beside it.
        operators: those of torch_npu that it calls.
        dtypes: of the first floating argument.
        on_request: it runs only where it is asked for, since it does not always serve or is not
            always faster.
        no_capture: why a graph cannot hold a call of it.
    """
    module = f"k31fn.kernels.{op}.npu"
    return Implementation(
        "npu",
        () if on_request else ("npu",),
        lazily(module, function),
        lazily(module, f"{function}_accepts"),
        dtypes=dtypes,
        on_request=("npu",) if on_request else (),
        # then the reference runs, and says nothing: a transform is for tests and research
        no_vmap="torch_npu's operators have no batching rule",
        no_capture=no_capture,
        missing=lambda: device.missing_operators(*operators),
    )


def declined(operator: str, reason: str) -> Implementation:
    """An operator of torch_npu that does not keep to the op's contract: listed, and refused with
    the reason.
    """

    def never(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{operator} is refused before it is called")

    return Implementation(operator, (), never, on_request=("npu",), missing=lambda: reason)
