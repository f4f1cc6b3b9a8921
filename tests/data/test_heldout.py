import numpy as np
import pytest
import torch

from k31fn import segments, tree
from k31fn.data import ByteTokenizer, Corpus, Dataset, NGram, heldout, trained_on

TOKENIZER = ByteTokenizer()
TEXTS = [
    bytes(np.random.default_rng(i).integers(0, 256, 50 + 7 * i, dtype=np.uint8)) for i in range(40)
]
CORPUS = Corpus.of([TOKENIZER.encode(t) for t in TEXTS], TOKENIZER)


def test_sample_is_large_enough_and_no_larger():
    sample = heldout(CORPUS, TOKENIZER, length=32, num_bytes=3000)
    scored = (sample.rows.labels >= 0).sum(dim=1)
    assert sample.num_bytes == scored.sum() >= 3000 > scored[:-1].sum()
    assert not (sample.rows.labels == 256).any()
    again = heldout(CORPUS, TOKENIZER, length=32, num_bytes=3000)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves(sample.rows), tree.leaves(again.rows), strict=True)
    )


def test_labels_are_those_of_the_packing_but_for_ends():
    rows = heldout(CORPUS, TOKENIZER, length=32, num_bytes=2000).rows
    labels = segments.next_token_labels(rows.tokens, rows.segments)
    assert torch.equal(labels.masked_fill(labels == 256, -100), rows.labels)


def test_pieces_are_the_scored_bytes_and_one_of_context_each():
    sample = heldout(CORPUS, TOKENIZER, length=32, num_bytes=3000)
    assert sum(len(p) - 1 for p in sample.pieces) == sample.num_bytes
    assert all(any(p in t for t in TEXTS) for p in sample.pieces)
    # A model that knows nothing has log 256 nats per byte, whichever way they are counted.
    losses = torch.full(sample.rows.labels.shape, np.log(256))[sample.rows.labels >= 0]
    unigram = NGram.fit([bytes(range(256)) * 1000], order=1)
    assert losses.sum() / sample.num_bytes == pytest.approx(
        unigram.nats_per_byte(sample.pieces, skip=1)
    )


def test_all_rows_if_there_are_too_few():
    sample = heldout(CORPUS, TOKENIZER, length=32)
    assert sample.rows.tokens.shape[0] == -(-len(CORPUS.tokens) // 32)
    assert sum(map(len, sample.pieces)) == sum(map(len, TEXTS))


def test_trained_on_is_what_the_batches_held():
    dataset = Dataset(CORPUS, batch_size=4, length=32, seed=2)
    seen = [t for step in range(5) for t in dataset.batch_at(step).tokens.flatten().tolist()]
    assert list(b"".join(trained_on(dataset, 5, TOKENIZER))) == [t for t in seen if t < 256]
    everything = b"".join(
        trained_on(dataset, 10_000, TOKENIZER)
    )  # many epochs: each byte once all the same
    assert sorted(everything) == sorted(b"".join(TEXTS))


def test_errors():
    with pytest.raises(ValueError, match="num_bytes=0"):
        heldout(CORPUS, TOKENIZER, length=32, num_bytes=0)
    with pytest.raises(ValueError, match="has no token to score"):
        heldout(Corpus.of([TOKENIZER.encode("a")], TOKENIZER), TOKENIZER, length=32)
