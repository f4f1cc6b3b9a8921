"""What torch.func refuses, and what k31fn has in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.func import grad, vmap

from k31fn.autodiff import remat
from tests.autodiff.functions import close, exponential, normal


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * ctx.saved_tensors[0].exp()


@torch.library.custom_op("k31fn_tests::exp", mutates_args=())
def library_exp(x: Tensor) -> Tensor:
    return x.exp()


library_exp.register_autograd(
    lambda ctx, ct: ct * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)

FAILING = {
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        torch.exp, x, use_reentrant=True
    ),
    "old-style Function": OldStyle.apply,
    "library op": library_exp,
}


@pytest.mark.parametrize("name", FAILING)
def test_what_torch_func_refuses_and_our_replacements(name: str):
    x = normal(3)
    with pytest.raises(RuntimeError):
        grad(lambda x: FAILING[name](x).sum())(x)
    for replacement in (remat(torch.exp), exponential("output")):
        close(grad(lambda x, f=replacement: f(x).sum())(x), x.exp())


def test_writing_into_fresh_zeros_fails_under_vmap_and_stacking_does_not():
    def written(x: Tensor) -> Tensor:
        out = torch.zeros(3, dtype=x.dtype)
        out[1:] = x[1:]
        return out

    x = normal(2, 3)
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(written)(x)
    close(
        vmap(lambda x: torch.cat([x.new_zeros(1), x[1:]]))(x),
        torch.stack([written(row) for row in x]),
    )
