"""Launches on a GPU that is not the thread's current one."""

from __future__ import annotations

import pytest
import torch

from k31fn.autodiff import vjp
from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.registry import record_impls, use_impl


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_kernel_runs_where_its_arguments_are():
    torch.cuda.set_device(0)
    sources = [
        torch.randn(1, 5, 48, device="cuda:1", generator=torch.Generator("cuda:1").manual_seed(i))
        for i in (1, 2)
    ]
    query, weight = sources[0][0, 0] * 0.1, torch.ones(48, device="cuda:1")

    def mixed(impl: str) -> tuple[torch.Tensor, torch.Tensor]:
        with use_impl(attn_res=impl), record_impls() as ran:
            y, pull = vjp(lambda s: attn_res((s, sources[1]), query, weight, 1e-6), sources[0])
            (grad,) = pull(torch.ones_like(y))
        assert set(ran) == {("attn_res", impl)}
        return y, grad

    for fused, plain in zip(mixed("triton"), mixed("reference"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
        assert fused.device == torch.device("cuda:1")
