"""MoonEP's simulator against counts by hand, and the published example of its picture."""

import pytest

from benchmarks import moonep_flow
from benchmarks.moonep_sim import SKEWS, Layer, Outcome, draw, markdown, simulate

LAYER = Layer(tokens=32, top_k=16)
ROW = 2 * LAYER.latent


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return [simulate(skew, 4, LAYER) for skew in SKEWS]


def test_a_collapsed_router_by_hand(found):
    """All 128 tokens choose the first rank's 16 experts: each of the others gets four of them."""
    (o,) = [o for o in found if o.skew == "collapsed"]
    assert (o.ranks, o.experts, o.imbalance) == (4, 896, 4.0)
    assert (o.replicas, o.slots, o.sent) == (12, 4, 12)
    # Three ranks send 32 tokens 16 times to the owner; to it and back, forward and backward.
    assert o.gigabytes["plain"] == pytest.approx(4 * 3 * 32 * 16 * ROW / 1e9, abs=1e-4)
    # Each rank has copies of every token, so none is spared; the home sends 12 experts, and gets
    # their gradients.
    tokens = 4 * 3 * 32 * ROW
    assert o.gigabytes["exact"] == pytest.approx((tokens + 2 * 12 * LAYER.expert_bytes) / 1e9, 1e-4)
    assert o.gigabytes["fixed"] == o.gigabytes["exact"]  # 4 slots to each of 3 ranks
    more = 2 * 3 * (224 - 4) * LAYER.expert_bytes / 1e9
    assert o.gigabytes["all slots"] - o.gigabytes["fixed"] == pytest.approx(more, abs=1e-3)


def test_every_skew(found, tmp_path):
    for o in found:
        assert o.violations == 0
        assert o.gigabytes["exact"] <= o.gigabytes["fixed"] <= o.gigabytes["all slots"]
    by_skew = {o.skew: o.imbalance for o in found}
    assert by_skew["uniform"] < 1.2 < by_skew["zipf 1.5"] < by_skew["collapsed"]
    assert len(markdown(found).splitlines()) == 2 + len(SKEWS)
    draw(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_the_picture_is_of_the_published_example(tmp_path):
    counts, plan = moonep_flow.example()
    assert counts.sum(0).tolist() == [4, 0, 16, 0, 0, 8, 0, 4]
    assert plan.sizes.sum(1).tolist() == [4] * 8
    assert plan.violations.sum() == 0
    moonep_flow.draw(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 10_000
