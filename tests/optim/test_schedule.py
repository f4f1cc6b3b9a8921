import math

import pytest

from k31fn.optim import warmup_cosine

RUN = {"peak": 2.0, "num_steps": 101, "warmup_steps": 11, "final_fraction": 0.1}


def test_corner_points():
    def at(step):
        return warmup_cosine(step, **RUN)

    assert at(0) == pytest.approx(2 / 11)
    assert at(5) == pytest.approx(2 * 6 / 11)
    assert at(10) == 2.0
    assert at(55) == pytest.approx(2 * (0.1 + 0.9 / 2))  # half way from step 10 to step 100
    assert at(32) == pytest.approx(2 * (0.1 + 0.45 * (1 + math.cos(math.pi * 22 / 90))))
    assert at(100) == at(101) == at(10**9) == pytest.approx(0.2)
    values = [at(s) for s in range(101)]
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


def test_degenerate_lengths():
    assert warmup_cosine(0, peak=1.0, num_steps=1) == 1.0
    assert [warmup_cosine(s, peak=1.0, num_steps=2, final_fraction=0.0) for s in (0, 1, 2)] == [1.0, 0.0, 0.0]
    assert [warmup_cosine(s, peak=1.0, num_steps=2, warmup_steps=2) for s in (0, 1)] == [0.5, 1.0]
    assert warmup_cosine(0, peak=1.0, num_steps=5, warmup_steps=1) == 1.0
    assert warmup_cosine(3, peak=1.0, num_steps=9, final_fraction=1.0) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 at least 1"),
        ({"warmup_steps": 102}, "warmup_steps=102"),
        ({"peak": 0.0}, "peak=0.0 must be positive"),
        ({"final_fraction": 1.5}, "final_fraction=1.5"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        warmup_cosine(0, **{**RUN, **change})
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        warmup_cosine(-1, **RUN)
