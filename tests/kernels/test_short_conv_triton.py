"""The fused short convolutions against the reference in float64, packed and with histories, one
input and several at once.

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

kernels = pytest.importorskip("k31fn.kernels.short_conv.triton.op", exc_type=ImportError)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5, "grad_rtol": 3e-5, "grad_atol": 3e-5}
BFLOAT16 = {"rtol": 2**-7, "atol": 2**-7, "grad_rtol": 2**-6, "grad_atol": 2**-6}
PACKED = [[1, 1, 1, 2, 3, 3, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2]]


def inputs(
    ids: list[list[int]], *channels: int, width: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """One input and its taps for each number of channels, and the documents."""
    documents = torch.tensor(ids, device=DEVICE)
    shape = documents.shape
    xs = tuple(torch.randn(*shape, count, device=DEVICE).to(dtype) for count in channels)
    return xs, tuple(torch.randn(count, width, device=DEVICE) for count in channels), documents


def histories(xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(len(x), 3, x.shape[2], device=DEVICE).to(x.dtype) for x in xs)


@pytest.mark.parametrize(("channels", "width"), [(11, 4), (3, 2), (17, 3)])
def test_equals_the_reference(channels: int, width: int):
    with poisoned():
        args = inputs(PACKED, channels, width=width)
        assert_op_matches(
            short_conv, "triton", (*args, ()), **FLOAT32, reference_dtype=torch.float64
        )


def test_three_inputs_of_unlike_widths_share_the_launch():
    """More channels than a tile has, and fewer."""
    with poisoned():
        assert_op_matches(
            short_conv,
            "triton",
            (*inputs(PACKED[:1], 17, 3, 5), ()),
            **FLOAT32,
            reference_dtype=torch.float64,
            vmap_grad=False,
        )


def test_a_device_that_takes_one_input_at_once(monkeypatch):
    """As Ascend: a launch for each."""
    monkeypatch.setattr(kernels, "_at_once", lambda kind: 1)
    with poisoned():
        args = inputs([[1, 1, 2]], 2, 3)
        assert_op_matches(
            short_conv,
            "triton",
            (*args, histories(args[0])),
            **FLOAT32,
            reference_dtype=torch.float64,
            vmap_grad=False,
        )


def test_history():
    """The history belongs to the document of the row's first token, and gets its gradient."""
    with poisoned():
        args = inputs(PACKED, 9)
        before = histories(args[0])
        assert_op_matches(
            short_conv, "triton", (*args, before), **FLOAT32, reference_dtype=torch.float64
        )


@pytest.mark.parametrize("with_history", [False, True])
def test_chunks_of_one_document_and_of_several(monkeypatch, with_history: bool):
    """Chunks of 8: some inside a document, which no token is compared in, some at its ends."""
    monkeypatch.setattr(kernels, "CHUNK", 8)
    with poisoned():
        args = inputs([[1] * 21 + [2] * 7 + [0] * 2], 5, 3)
        before = histories(args[0]) if with_history else ()
        assert_op_matches(
            short_conv,
            "triton",
            (*args, before),
            **FLOAT32,
            reference_dtype=torch.float64,
            vmap_grad=False,
        )


def test_bfloat16():
    args = inputs(PACKED, 9, 2, dtype=torch.bfloat16)
    assert_op_matches(
        short_conv,
        "triton",
        (*args, ()),
        **BFLOAT16,
        reference_dtype=torch.float64,
        vmap_grad=False,
    )


def test_samples_that_share_some_operands():
    """vmap over one input of two, and over one weight."""
    (x, y), (of_x, of_y), ids = inputs(PACKED[:1], 5, 3)
    samples = torch.stack([x, 2 * x])

    def loss(x: Tensor, of_y: Tensor) -> Tensor:
        outs = short_conv((x, y), (of_x, of_y), ids, ())
        return sum((out.square().sum() for out in outs), x.new_zeros(()))

    weights = torch.stack([of_y, 0.5 * of_y])
    with use_impl(short_conv="triton"):
        found = torch.func.vmap(torch.func.grad(loss, (0, 1)))(samples, weights)
    with use_impl(short_conv="reference"):
        for i in range(2):
            expected = torch.func.grad(loss, (0, 1))(samples[i], weights[i])
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a[i], b, rtol=3e-5, atol=1e-4)


def test_padding_may_hold_nan_and_documents_do_not_meet():
    (x,), weights, ids = inputs(PACKED, 5)
    with use_impl(short_conv="triton"):
        (y,) = short_conv((x,), weights, ids, ())
        other = x.clone()
        other[0, 3] = 7.0  # the only token of document 2
        other[0, 8] = torch.nan  # padding
        (changed,) = short_conv((other,), weights, ids, ())
    same = torch.ones(9, dtype=torch.bool)
    same[3] = False
    assert torch.equal(y[0, same], changed[0, same])
    assert not torch.equal(y[0, 3], changed[0, 3])
    assert torch.equal(changed[0, 8], torch.zeros(5, device=DEVICE))


def test_a_convolution_that_crosses_documents_is_caught():
    """The comparison is sharp: with one document per row it differs."""
    xs, weights, ids = inputs(PACKED, 5)
    with use_impl(short_conv="triton"):
        (crossing,) = short_conv(xs, weights, torch.ones_like(ids), ())
    (exact,) = short_conv.reference(xs, weights, ids, ())
    assert (crossing - exact).abs().max() > 0.1


@pytest.mark.cuda
@pytest.mark.parametrize("with_history", [False, True])
def test_at_full_width(with_history: bool):
    """Several chunks and tiles, widths that no tile divides; twenty repeats are bit-identical."""
    ids = torch.ones(2, 777, dtype=torch.int64, device=DEVICE)
    ids[0, 300:] = 2
    ids[1, 700:] = 0
    xs, weights, ids = inputs(ids.tolist(), 1000, 40, 1536, dtype=torch.bfloat16)
    before = histories(xs) if with_history else ()
    with poisoned():
        assert_op_matches(
            short_conv,
            "triton",
            (xs, weights, ids, before),
            **BFLOAT16,
            reference_dtype=torch.float64,
            vmap_grad=False,
        )
    with use_impl(short_conv="triton"):
        leaves = [a.requires_grad_() for a in (*xs, *weights)]
        runs = []
        for _ in range(20):
            ys = short_conv(xs, weights, ids, before)
            loss = sum(y.float().square().sum() for y in ys)
            runs.append((*ys, *torch.autograd.grad(loss, leaves)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(
    ("shapes", "width", "words"),
    [
        ([(2, 9, 5)], 1, "2 to 4 taps"),
        ([(2, 9, 4)], 4, "weight [channels W]"),
        ([(2, 9, 5), (2, 8, 5)], 4, "ids must be"),
        ([(2, 9, 5)] * 4, 4, "1 to 3 inputs"),
    ],
)
def test_refusals(shapes: list[tuple[int, ...]], width: int, words: str):
    ids = torch.ones(2, 9, dtype=torch.int64)
    xs = tuple(torch.zeros(shape) for shape in shapes)
    weights = (torch.zeros(5, width),) * len(xs)
    assert words in kernels.accepts(xs, weights, ids, ())


def test_histories_and_dtypes_that_do_not_fit_are_refused():
    ids = torch.ones(2, 9, dtype=torch.int64)
    xs = (torch.zeros(2, 9, 5), torch.zeros(2, 9, 4))
    weights = (torch.zeros(5, 4), torch.zeros(4, 4))
    assert kernels.accepts(xs, weights, ids, ()) == ""
    assert "a history for each" in kernels.accepts(xs, weights, ids, (torch.zeros(2, 3, 5),))
    one_wide = (torch.zeros(2, 3, 5), torch.zeros(2, 3, 5))
    assert "a history must be [2, 3, 4]" in kernels.accepts(xs, weights, ids, one_wide)
    low = (xs[0].bfloat16(), xs[1])
    assert "one dtype" in kernels.accepts(low, weights, ids, ())
