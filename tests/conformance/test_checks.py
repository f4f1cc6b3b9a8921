"""Each check of the suite fails on a layer that breaks its promise, and passes the same layer
unbroken.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import autodiff, segments
from k31fn.segments import Segments, cu_seqlens
from tests.conformance.case import Case
from tests.conformance.checks import CHECKS, prepare

ONE = segments.whole(2, 5)


class Twisted(torch.autograd.Function):
    """``exp(x)`` with a backward that is wrong under torch.func, and a wrong forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.functional = torch._C._are_functorch_transforms_active()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * ctx.saved_tensors[0] * (1.5 if ctx.functional else 1.0)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2.0 * tangent


class NoVmap(Twisted):
    """``exp(x)`` without a vmap rule."""

    generate_vmap_rule = False

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * ctx.saved_tensors[0]


class Hasty(Twisted):
    """``exp(x)`` whose backward looks at a value."""

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * ctx.saved_tensors[0] if ct.abs().sum().item() else torch.zeros_like(ct)


once_only = autodiff.custom_vjp(
    lambda x: (lambda y: (y, (y,)))(x.exp()),
    lambda res, ct: (ct * res[0],),
    opaque=True,
    name="fused",
)
wrong = autodiff.custom_vjp(
    lambda x: (lambda y: (y, (y,)))(x.exp()), lambda res, ct: (1.001 * ct * res[0],), name="wrong"
)
on_thread = threading.local()
on_thread.scale = 1.0
counter = [0]


def counting(w: Tensor, x: Tensor) -> Tensor:
    counter[0] += 1
    return x * w * counter[0]


def writing(w: Tensor, x: Tensor) -> Tensor:
    x.detach().add_(1.0)
    return x * w


def filling(w: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(2, 5, 6, dtype=x.dtype)
    out[:, 1:] = (x * w)[:, :-1]
    return out


def by_offsets(w: Tensor, x: Tensor, segments: Segments = ONE) -> Tensor:
    flat = (x * w).flatten(0, 1)
    pieces = cu_seqlens(segments).tolist()
    return torch.cat([flat[a:b].cumsum(0) for a, b in itertools.pairwise(pieces)])


BROKEN: dict[str, Callable[..., Any]] = {
    "four_ways_to_the_gradient_agree": lambda w, x: Twisted.apply(x * w),
    "vmap_over_inputs_equals_the_loop": filling,
    "vmap_with_shared_parameters_gives_gradients_per_sample": lambda w, x: NoVmap.apply(x * w),
    "vmap_over_packings_equals_the_loop": by_offsets,
    "jacrev_rows_are_pullbacks": lambda w, x: Hasty.apply(x * w),
    "hessian_is_symmetric_and_equals_jacrev_of_grad": lambda w, x: once_only(x * w),
    "finite_differences_agree_to_second_order": lambda w, x: wrong(x * w),
    "inputs_are_unchanged": writing,
    "forward_mode_says_reverse_mode": lambda w, x: NoVmap.apply(x * w),
    "remat_changes_no_bit": counting,
    "the_pullback_runs_on_another_thread": lambda w, x: x * w * getattr(on_thread, "scale", 2.0),
}


def case(f: Callable[..., Any], name: str) -> Case:
    def make(key: Tensor, dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        w = torch.linspace(0.5, 1.0, 6, dtype=dtype)
        return f, (w, torch.linspace(-1.0, 1.0, 60, dtype=dtype).view(2, 5, 6).clone())

    return Case(name, make, packed=name == "vmap_over_packings_equals_the_loop")


def test_every_check_has_a_layer_that_breaks_it():
    assert BROKEN.keys() == CHECKS.keys()


@pytest.mark.parametrize("check", CHECKS)
def test_a_broken_layer_fails(check: str):
    with pytest.raises((AssertionError, RuntimeError)):
        CHECKS[check](prepare(case(BROKEN[check], check)))


@pytest.mark.parametrize("check", CHECKS)
def test_the_unbroken_layer_passes(check: str):
    def f(w: Tensor, x: Tensor, segments: Segments = ONE) -> Tensor:
        return (x * w).exp() * (segments.ids > 0)[..., None]

    CHECKS[check](prepare(case(f, check)))
