"""The private torch API that k31fn needs, in one place.

functorch is the name that torch.func had: its C++ part still has it. The package of that name on
PyPI is not meant and must not be installed.

Tested with torch 2.11.0 and 2.13.0. Besides, tree.py registers pytree nodes with torch and
testing/memory.py watches operations and storages; everything else in k31fn uses public names only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

_C: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

__all__ = [
    "current_level",
    "forward_mode_active",
    "grad_active",
    "is_batched",
    "is_batched_here",
    "is_tracked",
    "level",
    "reinterpret",
    "saved_tensors_hooks_allowed",
    "transforms_active",
]


def transforms_active() -> bool:
    """Whether a ``torch.func`` transform encloses the caller."""
    return torch._C._are_functorch_transforms_active()


def grad_active() -> bool:
    """Whether a differentiating transform (``grad``, ``vjp``, ``jacrev``) encloses the caller, at
    any depth.
    """
    return any(i.key() == _C.TransformType.Grad for i in _C.get_interpreter_stack() or ())


def saved_tensors_hooks_allowed() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` may be used; not within a ``torch.func``
    derivative.
    """
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def forward_mode_active() -> bool:
    """Whether a forward-mode level (``torch.func.jvp``, ``jacfwd``, ``dual_level``) encloses the
    caller.
    """
    return forward_ad._current_level >= 0


def _unwrap(x: torch.Tensor) -> torch.Tensor:
    return _C.get_unwrapped(x)


def is_batched(x: torch.Tensor) -> bool:
    """Whether ``x`` is batched by an enclosing ``torch.func.vmap``, at any depth."""
    # A tensor is wrapped once by each transform, the innermost outside.
    while _C.is_functorch_wrapped_tensor(x):
        if _C.is_batchedtensor(x):
            return True
        x = _unwrap(x)
    return False


def is_batched_here(x: torch.Tensor) -> bool:
    """Whether ``x`` is batched by the innermost enclosing transform."""
    return _C.is_batchedtensor(x) and _C.maybe_get_level(x) == _C.maybe_current_level()


def is_tracked(x: torch.Tensor) -> bool:
    """Whether ``x`` is being differentiated, by an autograd graph or by a ``torch.func`` level at
    any depth.
    """
    while True:
        if x.requires_grad or _C.is_gradtrackingtensor(x):
            return True
        if not _C.is_functorch_wrapped_tensor(x):
            return False
        x = _unwrap(x)


def current_level() -> int:
    """Depth of the innermost enclosing transform, 0 outside of all."""
    level = _C.maybe_current_level()  # None outside of all
    return 0 if level is None else level


def level(x: torch.Tensor) -> int:
    """The transform level that ``x`` belongs to, 0 for a plain tensor."""
    # Negative for a plain tensor, and for one whose level is closed.
    return max(0, _C.maybe_get_level(x))


class _Reinterpret(torch.autograd.Function):
    """A view as another dtype; a Function for the sake of its vmap rule."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
        return _Reinterpret.apply(*args), in_dims[0]


def reinterpret(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.view(dtype)`` for a dtype of the same size, which vmap of torch 2.11 refuses; without
    gradient.
    """
    return _Reinterpret.apply(x, dtype)
