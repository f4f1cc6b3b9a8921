"""Which steps stand out."""

import statistics

import pytest
import torch

from k31fn.optim import init_spikes, is_spike, update_spikes

NORM = torch.tensor(1.0)


def feed(values, threshold=6.0, norms=None, state=None):
    """Which of these losses are spikes, one after the other, and the state after them."""
    state, found = state or init_spikes(device="cpu"), []
    for i, value in enumerate(values):
        loss, norm = (
            torch.tensor(float(value)),
            NORM if norms is None else torch.tensor(float(norms[i])),
        )
        spike = is_spike(state, loss, norm, threshold)
        state = update_spikes(state, loss, norm, spike, spike)
        found.append(bool(spike))
    return found, state


def noise(count, seed=0):
    return (3 + 0.1 * torch.randn(count, generator=torch.Generator().manual_seed(seed))).tolist()


def test_against_a_plain_list():
    """Median and distance as the statistics module has them (lower medians)."""
    values = noise(150)
    values[40], values[90], values[120] = 9.0, 3.55, 3.9
    found, _ = feed(values)
    kept, expected = [], []
    for value in values:
        last = kept[-64:]
        spike = False
        if len(last) >= 32:
            middle = statistics.median_low(last)
            spread = 1.4826 * statistics.median_low([abs(v - middle) for v in last])
            spike = value > middle + 6.0 * max(spread, 0.01 * middle)
        expected.append(spike)
        kept += [] if spike else [value]
    assert found == expected
    assert [i for i, spike in enumerate(found) if spike] == [40, 120]


def test_the_norm_counts_as_well_and_the_first_steps_do_not():
    norms = [1.0] * 80
    norms[10] = norms[70] = 50.0
    found, _ = feed(noise(80), norms=norms)
    assert [i for i, spike in enumerate(found) if spike] == [70]


def test_a_level_that_stays_is_no_spike():
    _, state = feed(noise(60))
    more, state = feed([8.0 + 0.01 * (i % 5) for i in range(60)], state=state)
    assert more == [True] * 8 + [False] * 52
    assert int(state.count) == 52
    again, _ = feed([20.0], state=state)
    assert again == [True]


def test_a_step_skipped_for_another_reason_is_not_remembered():
    _, state = feed(noise(40))
    bad = torch.tensor(float("nan"))
    after = update_spikes(state, bad, bad, is_spike(state, bad, bad, 6.0), torch.tensor(True))
    assert torch.equal(after.values, state.values)
    assert int(after.count) == int(state.count)


@pytest.mark.parametrize("value", [2.0, 0.0])
def test_what_is_low_does_not_stand_out(value):
    _, state = feed(noise(50))
    assert feed([value], state=state)[0] == [False]
