"""Results on meta tensors that come from memory are those that torch works out."""

import contextlib
import dataclasses

import pytest
import torch

from k31fn import lora
from k31fn.kernels.shapes import shapes_only
from k31fn.parallel import Mesh
from k31fn.testing import live_bytes
from k31fn.trainer.forecast.abstract_rank import abstract_rank, run_gradient
from k31fn.trainer.forecast.shape_cache import ShapeCache
from tests.trainer import test_adapters

pytestmark = pytest.mark.usefixtures("unchecked")


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def kind(x):
    return x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()


def programs():
    """Pairs that a careless memory would take for each other."""
    x, n = meta(4, 6), meta(4, 6, dtype=torch.int64)
    return [
        lambda: x * 2,
        lambda: n * 2,
        lambda: n * 2.0,
        lambda: n + True,
        lambda: n + 1,
        lambda: torch.tanh(x.mT),
        lambda: torch.tanh(x),
        lambda: x @ meta(6, 3),
        lambda: (x @ x.mT).sum(-1, keepdim=True),
        lambda: x.sum(0),
        lambda: x.sum(1),
        lambda: x.to(torch.bfloat16),
        lambda: torch.cat([x, x]),
        lambda: torch.cat([x, x, x]),
        lambda: x.topk(2).values,
        lambda: x.topk(3).indices,
        lambda: x[1:] + 1,
        lambda: torch.where(n > 0, x, 0),
    ]


def test_results_are_alike():
    expected = [kind(f()) for f in programs()]
    with ShapeCache():
        for _ in range(2):
            assert [kind(f()) for f in programs()] == expected
    assert len(set(expected)) > 12


def test_views_and_writes_are_left_alone():
    with ShapeCache():
        for _ in range(2):
            x = meta(4, 6)
            assert x.view(24).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x
            y = torch.ops.aten._unsafe_view.default(
                x, [24]
            )  # a view, though its schema does not say so
            assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert torch.ones(2).add(1).tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2, ep=2), Mesh(fsdp=2, ep=2)], ids=str)
def test_a_step_has_the_same_bytes_and_nothing_is_left(text, mesh):
    """The second time, too, with all results known; and with the collector's help or without."""
    made = test_adapters.recipe(
        text, lora=lora.Config(rank=2, held="fp8"), remat="layer", mesh=mesh, length=16
    )
    made = dataclasses.replace(made, optimizer=test_adapters.ADAMW)
    abstract_rank(made, 0)

    def peak(*modes):
        with shapes_only("grouped_matmul"), live_bytes() as live, contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            run_gradient(made)
        assert live.current == 0
        return live.peak

    known = ShapeCache()
    assert peak(known) == peak(known) == peak()
