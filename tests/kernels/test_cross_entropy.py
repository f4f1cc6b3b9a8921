"""The cross-entropy statistics against torch's own loss and against finite differences."""

import torch
import torch.nn.functional as F

from k31fn.kernels.cross_entropy import cross_entropy


def test_loss_and_gradient_equal_torchs() -> None:
    logits = (3 * torch.randn(4, 5, 11, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, 11, (4, 5))
    lse, picked = cross_entropy(logits, labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(4, 5)
    weights = torch.randn(4, 5, dtype=torch.float64)
    (ours,) = torch.autograd.grad(((lse - picked) * weights).sum(), logits)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(lse - picked, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_pieces_of_the_vocabulary_combine() -> None:
    """A label outside of a piece picks 0 there and takes no gradient."""
    logits = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 4, 9, -100, 12])
    parts = [
        cross_entropy(piece, labels - start)
        for piece, start in zip(logits.split([4, 6], -1), (0, 4), strict=True)
    ]
    assert [bool(p) for p in parts[0].picked == 0] == [False, False, True, True, True, True]
    assert [bool(p) for p in parts[1].picked == 0] == [True, True, False, False, True, True]
    lse = torch.logsumexp(torch.stack([p.lse for p in parts]), 0)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-12, rtol=0)
    picked = sum(p.picked for p in parts)
    torch.testing.assert_close(picked[:4], logits[torch.arange(4), labels[:4]], atol=0, rtol=0)
    (grad,) = torch.autograd.grad(picked.sum(), logits)
    torch.testing.assert_close(
        grad,
        F.one_hot(labels.clamp(0, 9), 10).double()
        * (labels >= 0)[:, None]
        * (labels < 10)[:, None],
    )


def test_int32_labels() -> None:
    logits, labels = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    for narrow, wide in zip(
        cross_entropy(logits, labels.int()), cross_entropy(logits, labels), strict=True
    ):
        assert torch.equal(narrow, wide)


def test_derivatives_to_second_order() -> None:
    logits, labels = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.tensor([0, 3, 7]),
    )
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels), logits)
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy(x, labels), logits)


def test_large_logits_and_bfloat16() -> None:
    """exp(1e4) overflows float32; bfloat16 logits are summed in float32."""
    lse, picked = cross_entropy(torch.tensor([[1e4, 0.0, -1e4]]), torch.tensor([1]))
    assert lse.item() == 1e4
    assert picked.item() == 0
    x = torch.randn(64, 1000).bfloat16()
    lse, _ = cross_entropy(x, torch.zeros(64, dtype=torch.int64))
    assert lse.dtype == torch.float32
    torch.testing.assert_close(
        lse, x.double().logsumexp(-1).float(), atol=2e-6, rtol=0
    )  # two roundings at 8
