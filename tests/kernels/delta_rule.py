"""Operands, results and the check that the tests of the fused delta rules share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k31fn.kernels.registry import Op, record_impls, use_impl
from k31fn.segments import from_lengths
from tests.kernels.fused import DEVICE, poisoned

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
Inputs = tuple[Tensor, ...]


def operands(
    lengths: list[list[int]],
    length: int,
    decays: Callable[[], Tensor],
    keys: str,
    dtype: torch.dtype,
    size: tuple[int, int, int],
) -> Inputs:
    """q, k, v, g, beta, ids and a state; ``size``: heads, K, V."""
    batch, (heads, width, columns) = len(lengths), size
    q, k = (torch.randn(batch, length, heads, width) for _ in range(2))
    beta = torch.rand(batch, length, heads)
    if keys != "random":
        beta = torch.full_like(beta, 0.999)
        one = torch.randn(heads, width)
        sign = (-1.0) ** torch.arange(length)[:, None, None]
        k = {"alike": one + 0.05 * k, "equal": one + 0 * k, "opposite": sign * one + 0 * k}[keys]
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, state = torch.randn(batch, length, heads, columns), torch.randn(batch, heads, width, columns)
    g = decays()
    ids = from_lengths(lengths, length).ids
    low = ((q * width**-0.5).to(dtype), k.to(dtype), v.to(dtype))
    return tuple(x.to(DEVICE) for x in (*low, g, beta, ids, 0.3 * state))


def results_of(op: Op, xs: Inputs, cts: tuple[Tensor, Tensor], impl: str) -> list[Tensor]:
    """Outputs and the gradients of all inputs, by that implementation and no other."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in xs]
    with use_impl(**{op.name: impl}), record_impls() as ran:
        out = op(*leaves)
    assert ran == {(op.name, impl): 1}
    grads = torch.autograd.grad(
        list(out),
        [x for x in leaves if x.requires_grad],
        [c.to(o.dtype) for c, o in zip(cts, out, strict=True)],
    )
    return [*(o.detach() for o in out), *grads]


def cotangents(xs: Inputs) -> tuple[Tensor, Tensor]:
    return torch.randn_like(xs[2]), 0.3 * torch.randn_like(xs[6])


def check_op(op: Op, xs: Inputs, limit: float) -> None:
    """Each result is within ``limit`` of the reference in float64, in norms."""
    cts = cotangents(xs)
    wide = tuple(x.double() if x.is_floating_point() else x for x in xs)
    with poisoned():
        ours = results_of(op, xs, cts, "triton")
    for name, a, b in zip(NAMES, ours, results_of(op, wide, cts, "reference"), strict=True):
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
        assert error <= limit, f"{name}: {error:.1e}"  # NaN is not
