from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from k31fn.kernels.short_conv import reference
from k31fn.kernels.short_conv import short_conv as short_convs
from k31fn.segments import from_cu_seqlens, from_lengths, whole

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "kda.safetensors")


def by_conv1d(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """One document per row, by torch's own convolution."""
    extended = torch.cat([history, x], dim=1).mT
    return F.silu(F.conv1d(extended, weight[:, None], groups=len(weight))).mT


def short_conv(x: Tensor, weight: Tensor, ids: Tensor, *history: Tensor) -> Tensor:
    """The op on one input."""
    return short_convs((x,), (weight,), ids, history)[0]


def draw(
    length: int, dtype=torch.float64, batch: int = 2, channels: int = 5, width: int = 4
) -> list[Tensor]:
    shapes = [(batch, length, channels), (channels, width), (batch, width - 1, channels)]
    return [torch.randn(s, dtype=dtype) for s in shapes]


def with_gradients(f, *xs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def test_golden():
    x, weight = GOLDEN["conv.x"], GOLDEN["conv.weight"][:, 0]
    y = short_conv(x, weight, whole(2, 20).ids)
    torch.testing.assert_close(y, GOLDEN["conv.y"], rtol=0, atol=5e-6)
    packed = short_conv(x[:1], weight, from_cu_seqlens(GOLDEN["conv.varlen_cu"], length=20).ids)
    torch.testing.assert_close(packed, GOLDEN["conv.varlen_y"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_values_and_gradients_equal_torch(length, width):
    x, weight, history = draw(length, width=width)
    ids = whole(2, length).ids
    actual = with_gradients(lambda x, w, h: short_conv(x, w, ids, h), x, weight, history)
    for a, e in zip(actual, with_gradients(by_conv1d, x, weight, history), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        short_conv(x, weight, ids), by_conv1d(x, weight, 0 * history), rtol=0, atol=1e-12
    )


def test_each_document_is_what_it_is_alone():
    """Shorter than, as long as and longer than the filter; the history is the first document's."""
    x, weight, history = draw(20, batch=1)
    lengths = [2, 1, 4, 10]
    ids = from_lengths([lengths], 20).ids
    _, *packed = with_gradients(lambda x, w, h: short_conv(x, w, ids, h), x, weight, history)
    y, start, alone = short_conv(x, weight, ids, history), 0, []
    for n in lengths:
        document = x[:, start : start + n]
        before = history if start == 0 else 0 * history
        value, *grads = with_gradients(by_conv1d, document, weight, before)
        torch.testing.assert_close(y[:, start : start + n], value, rtol=0, atol=1e-12)
        torch.testing.assert_close(packed[0][:, start : start + n], grads[0], rtol=0, atol=1e-12)
        alone.append(grads)
        start += n
    torch.testing.assert_close(
        packed[1], sum(g[1] for g in alone), rtol=0, atol=1e-11
    )  # weights: the sum
    torch.testing.assert_close(packed[2], alone[0][2], rtol=0, atol=1e-12)
    assert not y[:, 17:].any()
    assert not packed[0][:, 17:].any()


def test_other_documents_later_tokens_and_padding_change_no_bit():
    x, weight, history = draw(20, dtype=torch.float32, batch=1)
    ids = from_lengths([[5, 3, 7]], 20).ids

    def run(x: Tensor) -> list[Tensor]:
        return with_gradients(lambda x: short_conv(x, weight, ids, history), x)

    y, grad = run(x)
    for changed in (slice(0, 5), slice(5, 8), slice(15, 20)):
        other = x.clone()
        other[:, changed] = 1e3
        kept = torch.ones(20, dtype=torch.bool)
        kept[changed] = False
        for actual, expected in zip(run(other), (y, grad), strict=True):
            assert torch.equal(actual[:, kept], expected[:, kept])
    for t in range(8, 14):
        later = x.clone()
        later[:, t + 1 :] = 1e3
        assert torch.equal(run(later)[0][:, : t + 1], y[:, : t + 1])


def test_without_the_mask_documents_mix(monkeypatch):
    x, weight, _ = draw(20, batch=1)
    ids = from_lengths([[5, 15]], 20).ids
    right = short_conv(x, weight, ids)
    monkeypatch.setattr(
        reference, "_visible", lambda ids, width, dtype: torch.ones(1, 20, width, dtype=dtype)
    )
    wrong = (short_conv(x, weight, ids) - right).abs().amax((0, 2))
    assert (wrong > 1e-3).nonzero().flatten().tolist() == [5, 6, 7]


def test_several_inputs_are_each_what_they_are_alone():
    """Of unlike numbers of channels, with histories and without."""
    ids = from_lengths([[5, 15], [17]], 20).ids
    drawn = [draw(20, channels=channels) for channels in (5, 2, 7)]
    inputs, weights, histories = (tuple(d[i] for d in drawn) for i in range(3))
    for before in (histories, ()):
        together = short_convs(inputs, weights, ids, before)
        for i, y in enumerate(together):
            assert torch.equal(y, short_conv(inputs[i], weights[i], ids, *before[i : i + 1]))


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    x, weight, history = draw(20, dtype=torch.float32)
    ids = whole(2, 20).ids
    low, before = x.bfloat16(), history.bfloat16()
    y = short_conv(low, weight, ids, before)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, short_conv(low.float(), weight, ids, before.float()).bfloat16())


def test_no_tokens_at_all():
    weight = torch.randn(3, 4, requires_grad=True)
    ids = torch.zeros(2, 0, dtype=torch.int64)
    for history in ((), (torch.randn(2, 3, 3),)):
        y = short_convs((torch.zeros(2, 0, 3),), (weight,), ids, history)[0]
        assert y.shape == (2, 0, 3)
        assert not torch.autograd.grad(y.sum(), weight)[0].any()
