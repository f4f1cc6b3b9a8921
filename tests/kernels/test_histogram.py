import numpy as np
import pytest
import torch

from k31fn.kernels.histogram import bin_range, required_bias_histogram


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
