"""Gradient tests of a layer of your own. Run: ``pytest examples/test_my_layer.py``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from examples.compose import D, shift, shift_specs
from k31fn import params, random, segments
from k31fn.autodiff import custom_vjp, value_and_grad
from k31fn.testing import check_grads


def _inputs() -> tuple[dict[str, Tensor], Tensor]:
    key = random.key(1)
    p = params.init(shift_specs(), key, dtype=torch.float64)
    return p, random.normal(random.fold_in(key, 1), (2, 6, D), dtype=torch.float64)


def _two_documents() -> segments.Segments:
    return segments.from_lengths([[4, 2], [3, 3]], 6)


def test_gradients_to_second_order():
    check_grads(lambda p, x: shift(p, x, _two_documents()), _inputs(), order=2)


def test_per_sample_gradients_under_vmap():
    p, x = _inputs()

    def loss(p: Any, row: Tensor) -> Tensor:
        return shift(p, row[None], segments.whole(1, 6)).pow(2).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(p, x)
    total = torch.func.grad(lambda p: shift(p, x, segments.whole(2, 6)).pow(2).sum())(p)
    for name in p:
        torch.testing.assert_close(per_sample[name].sum(0), total[name])


def test_documents_do_not_leak():
    p, x = _inputs()
    changed = x.clone()
    changed[0, :4] += 1.0  # the first document of row 0
    before, after = (shift(p, h, _two_documents()) for h in (x, changed))
    assert torch.equal(before[0, 4:], after[0, 4:])


def test_a_wrong_backward_is_caught():
    square = custom_vjp(
        lambda x: (x * x, (x,)), lambda res, ct: (res[0] * ct,), name="square"
    )  # forgot the 2
    with pytest.raises(AssertionError):
        check_grads(lambda x: square(x), (_inputs()[1],))


def test_value_and_grad_is_torch_func():
    p, x = _inputs()

    def loss(p: Any) -> Tensor:
        return shift(p, x, _two_documents()).pow(2).mean()

    ours, theirs = value_and_grad(loss)(p)[1], torch.func.grad(loss)(p)
    assert all(torch.equal(ours[name], theirs[name]) for name in p)
