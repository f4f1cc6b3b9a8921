"""The fused short convolution against the reference in float64, packed and with histories.

Tolerances: sums of four products in float32 and a sigmoid, 1e-5; gradients sum over tokens, 3e-5.
bfloat16: rounded once, to 2^-9, where the
interpreter cuts to 2^-8; gradients add two such.
"""

import pytest
import torch
from torch import Tensor

from k31fn.kernels.registry import use_impl
from k31fn.kernels.short_conv import short_conv
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.short_conv.triton", exc_type=ImportError)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-7, "grad_rtol": 2**-6, "grad_atol": 2**-6}
PACKED = [[1, 1, 1, 2, 3, 3, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2]]


def inputs(
    ids: list[list[int]], channels: int, width: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    documents = torch.tensor(ids, device=DEVICE)
    x = torch.randn(*documents.shape, channels, device=DEVICE).to(dtype)
    return x, torch.randn(channels, width, device=DEVICE), documents


@pytest.mark.parametrize(("channels", "width"), [(11, 4), (3, 2), (17, 3)])
def test_equals_the_reference(channels: int, width: int):
    with poisoned():
        args = inputs(PACKED, channels, width)
        assert_op_matches(
            short_conv, "triton", (*args, ()), **FLOAT32, reference_dtype=torch.float64
        )


def test_history():
    """The history belongs to the document of the row's first token, and gets its gradient."""
    with poisoned():
        args = inputs(PACKED, 9)
        history = torch.randn(2, 3, 9, device=DEVICE)
        assert_op_matches(
            short_conv, "triton", (*args, history), **FLOAT32, reference_dtype=torch.float64
        )


def test_bfloat16():
    args = inputs(PACKED, 9, dtype=torch.bfloat16)
    assert_op_matches(
        short_conv,
        "triton",
        (*args, ()),
        **BFLOAT16,
        reference_dtype=torch.float64,
        vmap_grad=False,
    )


def test_padding_may_hold_nan_and_documents_do_not_meet():
    x, weight, ids = inputs(PACKED, 5)
    with use_impl(short_conv="triton"):
        y = short_conv(x, weight, ids, ())
        other = x.clone()
        other[0, 3] = 7.0  # the only token of document 2
        other[0, 8] = torch.nan  # padding
        changed = short_conv(other, weight, ids, ())
    same = torch.ones(9, dtype=torch.bool)
    same[3] = False
    assert torch.equal(y[0, same], changed[0, same])
    assert not torch.equal(y[0, 3], changed[0, 3])
    assert torch.equal(changed[0, 8], torch.zeros(5, device=DEVICE))


def test_a_convolution_that_crosses_documents_is_caught():
    """The comparison is sharp: with one document per row it differs."""
    x, weight, ids = inputs(PACKED, 5)
    with use_impl(short_conv="triton"):
        crossing = short_conv(x, weight, torch.ones_like(ids), ())
    exact = short_conv.reference(x, weight, ids, ())
    assert (crossing - exact).abs().max() > 0.1


@pytest.mark.cuda
@pytest.mark.parametrize("history", [False, True])
def test_at_full_width(history: bool):
    """Several chunks and tiles, a width that no tile divides; twenty repeats are bit-identical."""
    ids = torch.ones(2, 777, dtype=torch.int64, device=DEVICE)
    ids[0, 300:] = 2
    ids[1, 700:] = 0
    x = torch.randn(2, 777, 1000, device=DEVICE).bfloat16()
    weight = torch.randn(1000, 4, device=DEVICE)
    before = torch.randn(2, 3, 1000, device=DEVICE).bfloat16() if history else ()
    with poisoned():
        assert_op_matches(
            short_conv,
            "triton",
            (x, weight, ids, before),
            **BFLOAT16,
            reference_dtype=torch.float64,
            vmap_grad=False,
        )
    with use_impl(short_conv="triton"):
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        runs = []
        for _ in range(20):
            y = short_conv(x, weight, ids, before)
            runs.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(
    ("shape", "width", "words"),
    [((2, 9, 5), 1, "2 to 4 taps"), ((2, 9, 4), 4, "weight .channels W."), ((2, 8, 5), 4, "ids")],
)
def test_refusals(shape: tuple[int, ...], width: int, words: str):
    ids = torch.ones(2, 9, dtype=torch.int64)
    reason = kernels.accepts(torch.zeros(shape), torch.zeros(5, width), ids, ())
    assert words.replace(".", "") in reason.replace("[", "").replace("]", "").replace(".", "")
