import numpy as np
import pytest
import torch

from k31fn.kernels.histogram import bin_range, required_bias_histogram
from k31fn.kernels.registry import record_impls, use_impl
from tests.kernels.fused import DEVICE, poisoned


def case(tokens=300, experts=6):
    scores, bias = (
        torch.rand(tokens, experts, dtype=torch.float64),
        torch.randn(experts, dtype=torch.float64) * 0.2,
    )
    cutoff = (scores + bias).sort(1, descending=True).values[:, 2]
    return scores, cutoff, bias


def test_equals_numpy():
    scores, cutoff, bias = case()
    valid = torch.rand(300) < 0.7
    counts = required_bias_histogram(scores, cutoff, valid, bias, 50)
    low, high = bias.min().item() - 1, bias.max().item() + 1
    for j in range(6):
        required = (cutoff - scores[:, j])[valid].numpy()
        assert counts[j].tolist() == np.histogram(required, bins=50, range=(low, high))[0].tolist()


def test_counts_each_real_token_once_per_expert():
    scores, cutoff, bias = case()
    valid = torch.arange(300) < 123
    counts = required_bias_histogram(scores, cutoff, valid, bias, 1000)
    assert counts.dtype == torch.int32
    assert counts.sum(1).tolist() == [123] * 6


def test_range_covers_every_required_bias():
    bias = torch.tensor([-0.3, 0.5])
    low, width = bin_range(bias, 1000)
    assert low.item() == pytest.approx(-1.3)
    assert width.item() == pytest.approx(2.8 / 1000)
    # The extremes r = bmin - 1 and bmax + 1 fall into the first and the last bin.
    counts = required_bias_histogram(
        torch.zeros(2, 2), torch.tensor([-1.3, 1.5]), torch.ones(2).bool(), bias, 10
    )
    assert counts[:, 0].tolist() == [1, 1]
    assert counts[:, -1].tolist() == [1, 1]


def test_batches_add_up_and_vmap():
    scores, cutoff, bias = case()
    valid = torch.rand(300) < 0.7
    whole = required_bias_histogram(scores, cutoff, valid, bias, 64)
    parts = torch.vmap(lambda s, c, v: required_bias_histogram(s, c, v, bias, 64))(
        scores.view(3, 100, 6), cutoff.view(3, 100), valid.view(3, 100)
    )
    assert torch.equal(parts.sum(0), whole)


@pytest.mark.parametrize(
    ("tokens", "experts", "bins"), [(300, 6, 50), (1, 3, 1000), (70, 2, 1)], ids=str
)
def test_the_kernel_counts_the_same_numbers(tokens, experts, bins):
    scores, cutoff, bias = (x.float().to(DEVICE) for x in case(tokens, max(experts, 3)))
    valid = (torch.rand(tokens) < 0.7).to(DEVICE)
    # Required biases on the edges of bins, and beyond the last ones.
    cutoff[: tokens // 3] = bias.min() + (torch.arange(tokens // 3, device=DEVICE) - 3) / 16
    scores[: tokens // 3] = scores[: tokens // 3].mul(16).round() / 16
    with use_impl(required_bias_histogram="triton"), record_impls() as ran, poisoned():
        found = required_bias_histogram(scores, cutoff, valid, bias, bins)
    assert ran["required_bias_histogram", "triton"] == 1
    with use_impl(required_bias_histogram="reference"):
        assert torch.equal(found, required_bias_histogram(scores, cutoff, valid, bias, bins))


def test_the_kernel_counts_samples_of_vmap():
    scores, cutoff, bias = (x.float().to(DEVICE) for x in case())
    valid = (torch.rand(300) < 0.7).to(DEVICE)
    biases = torch.stack([bias, 2 * bias, -bias])

    def count(s, c, v, b):
        return required_bias_histogram(s, c, v, b, 64)

    args = (scores.view(3, 100, 6), cutoff.view(3, 100), valid.view(3, 100), biases)
    with use_impl(required_bias_histogram="triton"):
        found = torch.vmap(count)(*args)
    with use_impl(required_bias_histogram="reference"):
        apart = [count(*sample) for sample in zip(*args, strict=True)]
    assert torch.equal(found, torch.stack(apart))


@pytest.mark.cuda
def test_the_kernel_counts_the_same_numbers_at_full_size():
    scores, bias = torch.rand(8192, 896, device=DEVICE), torch.randn(896, device=DEVICE) * 0.2
    cutoff = (scores + bias).kthvalue(880, dim=1).values
    valid = torch.rand(8192, device=DEVICE) < 0.9
    with record_impls() as ran:
        found = required_bias_histogram(scores, cutoff, valid, bias, 1000)
    assert ran["required_bias_histogram", "triton"] == 1
    with use_impl(required_bias_histogram="reference"):
        assert torch.equal(found, required_bias_histogram(scores, cutoff, valid, bias, 1000))
