"""Rows of experts by kernels against the references in float64.

Tolerances: a sum of up to 16 products in float32, 1e-5; bfloat16: rounded once, to 2^-9, where the
interpreter cuts (2^-8).
"""

import pytest
import torch

from k31fn.kernels.experts import combine, dispatch, permute, sort_by_expert
from k31fn.kernels.registry import use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.experts.triton.copies", exc_type=ImportError)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5, "reference_dtype": torch.float64}
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-7, "reference_dtype": torch.float64, "vmap_grad": False}


def route(tokens: int, choices: int, experts: int):
    idx = torch.rand(tokens, experts).argsort(1)[:, :choices]
    return sort_by_expert(idx.to(DEVICE), experts)


def drawn(*shape: int, dtype: torch.dtype = torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(("tokens", "choices", "width"), [(7, 3, 70), (1, 1, 64), (2, 4, 1)])
def test_equal_the_references(tokens: int, choices: int, width: int):
    """More columns than a tile, and one."""
    order, inverse, _ = route(tokens, choices, 5)
    rows = drawn(tokens * choices, width)
    weights = torch.rand(tokens, choices, device=DEVICE)
    with poisoned():
        assert_op_matches(dispatch, "triton", (drawn(tokens, width), order, inverse), **FLOAT32)
        assert_op_matches(permute, "triton", (rows, order, inverse.flatten()), **FLOAT32)
        assert_op_matches(combine, "triton", (rows, weights, order, inverse), **FLOAT32)


def part_of(order, inverse, num_rows: int):
    """Only the first rows are here: a route in which copies are absent."""
    return order[:num_rows], torch.where(inverse < num_rows, inverse, -1)


@pytest.mark.parametrize("num_rows", [1, 9, 21])
def test_absent_copies(num_rows: int):
    order, inverse = part_of(*route(7, 3, 5)[:2], num_rows)
    weights = torch.rand(7, 3, device=DEVICE)
    with poisoned():
        assert_op_matches(dispatch, "triton", (drawn(7, 70), order, inverse), **FLOAT32)
        args = (drawn(num_rows, 70), weights, order, inverse)
        assert_op_matches(combine, "triton", args, **FLOAT32)


def test_bfloat16():
    order, inverse, _ = route(5, 2, 4)
    rows = drawn(10, 20, dtype=torch.bfloat16)
    weights = torch.rand(5, 2, device=DEVICE)
    assert_op_matches(combine, "triton", (rows, weights, order, inverse), **BFLOAT16)
    assert_op_matches(dispatch, "triton", (rows[:5], order, inverse), **BFLOAT16)


def test_a_token_without_weight_leaves_no_trace():
    """NaN in it reaches no row, in which its weight is 0."""
    _, inverse, _ = route(4, 2, 3)
    x = drawn(4, 70)
    weights = torch.rand(4, 2, device=DEVICE) + 0.1
    x[1] = float("nan")
    weights[1] = 0.0
    rows = kernels.scatter(x, inverse, 8, weights)
    assert torch.equal(rows[inverse[1]], torch.zeros(2, 70, device=DEVICE))
    assert torch.equal(rows[inverse[2]], x[2].expand(2, 70))
    assert kernels.scatter(x, inverse, 8)[inverse[1]].isnan().all()


def test_permute_takes_rows_of_any_shape():
    order, inverse, _ = route(3, 2, 4)
    for shape in ((6,), (6, 2, 5)):
        rows = drawn(*shape)
        with use_impl(permute="triton"):
            assert torch.equal(permute(rows, order, inverse.flatten()), rows[order])


def test_two_tensors_of_rows_are_added_in_float32():
    _, inverse, _ = route(1, 2, 2)
    ones = torch.ones(2, 1, device=DEVICE, dtype=torch.bfloat16)
    # In bfloat16 256 + 1 is 256.
    assert kernels.sum_copies(128 * ones, inverse, ones).item() == 258


def test_refusals():
    order, inverse, _ = route(3, 2, 4)
    x = drawn(4, 5)
    with use_impl(dispatch="triton"), pytest.raises(ValueError, match=r"one place each, got rows"):
        dispatch(x, order, inverse)
    with use_impl(combine="triton"), pytest.raises(ValueError, match=r"weights are \[3, 2\]"):
        combine(drawn(6, 5), drawn(2, 3), order, inverse)
    rows = drawn(6, 5)
    with use_impl(permute="triton"), pytest.raises(ValueError, match="one place each, got rows"):
        permute(rows, order[:5], inverse.flatten())


@pytest.mark.cuda
@pytest.mark.parametrize("width", [3584, 200])
def test_at_full_width(width: int):
    """Sixteen choices of many tokens; twenty repeats are bit-identical."""
    order, inverse, _ = route(777, 16, 64)
    x = drawn(777, width, dtype=torch.bfloat16).requires_grad_()
    rows = drawn(777 * 16, width, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(777, 16, device=DEVICE).requires_grad_()
    with poisoned():
        assert_op_matches(dispatch, "triton", (x.detach(), order, inverse), **BFLOAT16)
        args = (rows.detach(), weights.detach(), order, inverse)
        # The gradient of a weight is a sum of thousands of products, up to 200.
        assert_op_matches(combine, "triton", args, **{**BFLOAT16, "grad_atol": 2**-4})
    runs = []
    for _ in range(20):
        out = dispatch(x, order, inverse), combine(rows, weights, order, inverse)
        grads = torch.autograd.grad(sum(y.square().sum() for y in out), (x, rows, weights))
        runs.append((*out, *grads))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
