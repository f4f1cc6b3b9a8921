import math

import pytest

from k31fn.optim import warmup_cosine, warmup_stable_decay

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
    assert [warmup_cosine(s, peak=1.0, num_steps=2, final_fraction=0.0) for s in (0, 1, 2)] == [
        1.0,
        0.0,
        0.0,
    ]
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


STABLE = {
    "peak": 2.0,
    "num_steps": 100,
    "warmup_steps": 10,
    "decay_steps": 20,
    "final_fraction": 0.1,
}


class TestStable:
    def test_corner_points(self):
        values = [warmup_stable_decay(s, **STABLE) for s in range(110)]
        assert values[:10] == pytest.approx([2 * (s + 1) / 10 for s in range(10)])
        assert values[9:80] == [2.0] * 71
        assert values[80:100] == pytest.approx([2 * (1 - 0.9 * k / 20) for k in range(1, 21)])
        assert values[99:] == pytest.approx([0.2] * 11)

    def test_a_longer_run_begins_alike(self):
        longer = {**STABLE, "num_steps": 300}
        assert all(
            warmup_stable_decay(s, **STABLE) == warmup_stable_decay(s, **longer) for s in range(80)
        )

    def test_without_a_part(self):
        assert warmup_stable_decay(99, peak=1.0, num_steps=100, decay_steps=0) == 1.0
        only = [warmup_stable_decay(s, peak=1.0, num_steps=4, decay_steps=4) for s in range(4)]
        assert only == pytest.approx([0.75, 0.5, 0.25, 0.0])

    def test_errors(self):
        with pytest.raises(ValueError, match=r"decay_steps=91 must be in \[0, 90\]"):
            warmup_stable_decay(0, **{**STABLE, "decay_steps": 91})
        with pytest.raises(ValueError, match=r"peak=0\.0 must be positive"):
            warmup_stable_decay(0, **{**STABLE, "peak": 0.0})
