import collections
import math
import time

import numpy as np
import pytest

from k31fn.data import NGram, stdlib

TRAIN = [b"the cat sat on the mat", b"", b"a", b"the dog\x00\xff\xff\xff\xff", b"cattle"]
TEST = [b"the catalogue", b"zebra\xff\xff\xff\xff", b"", b"a", b"\x00\x00"]


class Plain:
    """The recursion of the docstring, with dicts."""

    def __init__(self, documents, order):
        self.order = order
        self.counts = collections.defaultdict(collections.Counter)
        for d in documents:
            for t in range(len(d)):
                for k in range(min(t, order - 1) + 1):
                    self.counts[d[t - k : t]][d[t]] += 1

    def p(self, context, w):
        lower = self.p(context[1:], w) if context else 1 / 256
        seen = self.counts.get(context, {})
        total = sum(seen.values())
        return (seen.get(w, 0) + len(seen) * lower) / (total + len(seen)) if total else lower

    def nats(self, documents):
        n = self.order - 1
        return [
            -math.log(self.p(d[max(t - n, 0) : t], d[t])) for d in documents for t in range(len(d))
        ]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_against_dicts(order):
    model, plain = NGram.fit(TRAIN, order), Plain(TRAIN, order)
    for documents in (TRAIN, TEST):
        np.testing.assert_allclose(model.nats(documents), plain.nats(documents), rtol=1e-12)
    assert model.nats_per_byte(TEST) == pytest.approx(np.mean(plain.nats(TEST)), rel=1e-12)
    later = [x for d in TEST for x in plain.nats([d])[2:]]
    assert model.nats_per_byte(TEST, skip=2) == pytest.approx(np.mean(later), rel=1e-12)


def test_wrong_smoothing_is_caught():
    plain = Plain(TRAIN, 4)
    plain.counts[b"the"][ord("x")] += 1  # a count, and with it a kind of follower, more
    assert not np.allclose(NGram.fit(TRAIN).nats(TEST), plain.nats(TEST), rtol=1e-12)


@pytest.mark.parametrize("context", [b"", b"t", b"the", b"e cat", b"\xff\xff\xff", b"qqq", b"hex"])
def test_probabilities_sum_to_one(context):
    model, plain = NGram.fit(TRAIN), Plain(TRAIN, 4)
    p = model.probabilities(context)
    assert p.shape == (256,)
    assert p.min() > 0
    assert p.sum() == pytest.approx(1, abs=1e-12)  # rounding of 256 additions
    assert p[ord("c")] == pytest.approx(plain.p(context[-3:], ord("c")), rel=1e-12)


def test_documents_are_apart():
    assert not np.allclose(
        NGram.fit([b"ab", b"cd"]).nats([b"abcd"]), NGram.fit([b"abcd"]).nats([b"abcd"])
    )
    assert np.allclose(
        NGram.fit([b"ab", b"cd"]).nats([b"ab", b"cd"]),
        NGram.fit([b"cd", b"ab"]).nats([b"ab", b"cd"]),
    )


def test_more_context_predicts_source_code_better():
    documents = [d.data for d in stdlib() if d.name.startswith(("a", "b"))]
    train, test = documents[::2], documents[1::2]
    figures = [NGram.fit(train, order).nats_per_byte(test) for order in (1, 2, 3, 4)]
    assert figures == sorted(figures, reverse=True)
    assert 1.2 < figures[-1] < 2.2 < figures[0] < 5.55


def test_fitting_megabytes_takes_seconds():
    data = np.random.default_rng(0).integers(97, 123, 2_000_000, dtype=np.uint8).tobytes()
    start = time.process_time()
    NGram.fit([data])
    assert time.process_time() - start < 5  # measured 0.4; a loop over bytes would take some 10


def test_errors():
    for order in (0, 5):
        with pytest.raises(ValueError, match=f"order={order} must be 1 to 4"):
            NGram.fit(TRAIN, order)
    with pytest.raises(ValueError, match="no bytes to fit"):
        NGram.fit([b""])
    with pytest.raises(ValueError, match="no byte to score behind the first skip=9"):
        NGram.fit(TRAIN).nats_per_byte([b"short"], skip=9)
