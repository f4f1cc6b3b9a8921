"""Rows of several lengths, one after the other."""

import numpy as np
import pytest
import torch

from k31fn.data import ByteTokenizer, Corpus, Curriculum, Dataset, pieces, trained_on

TOKENIZER = ByteTokenizer()
CORPUS = Corpus.of([np.arange(i, i + 20 + i, dtype=np.uint8) for i in range(30)], TOKENIZER)


def curriculum():
    """3 steps of 4 x 16, 2 of 2 x 32, then 5 x 16 from row 12 on."""
    parts = (
        Dataset(CORPUS, 4, 16, seed=3),
        Dataset(CORPUS, 2, 32, seed=3),
        Dataset(CORPUS, 5, 16, 3, first_row=12),
    )
    return Curriculum(parts, (0, 3, 5))


def test_a_step_is_a_function_of_its_number_alone():
    dataset = curriculum()
    forwards = [dataset.batch_at(i) for i in range(8)]
    backwards = [curriculum().batch_at(i) for i in reversed(range(8))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.labels, b.labels)
    assert [tuple(x.tokens.shape) for x in forwards] == [(4, 16)] * 3 + [(2, 32)] * 2 + [
        (5, 16)
    ] * 3
    parts = [
        dataset.batch_at(1, rank=r, num_ranks=2, micro=m, num_micro=2).tokens
        for r in (0, 1)
        for m in (0, 1)
    ]
    assert torch.equal(torch.cat(parts), forwards[1].tokens)


def test_no_row_of_a_length_comes_twice():
    """Until its epoch is over."""
    dataset, short = curriculum(), Dataset(CORPUS, 1, 16, seed=3)
    seen = torch.cat([dataset.batch_at(i).tokens for i in (0, 1, 2, 5, 6, 7)])
    assert torch.equal(seen, short.rows(np.arange(27)).tokens)
    assert len(seen) < short.num_rows


def test_what_it_was_trained_on():
    dataset = curriculum()
    assert [steps for _, steps in dataset.steps_of_parts(7)] == [3, 2, 2]
    assert [steps for _, steps in dataset.steps_of_parts(4)] == [3, 1, 0]
    expected = [piece for i in (0, 1, 2, 5, 6) for piece in pieces(dataset.batch_at(i), TOKENIZER)]
    expected += [piece for i in (3, 4) for piece in pieces(dataset.batch_at(i), TOKENIZER)]
    assert sorted(trained_on(dataset, 7, TOKENIZER)) == sorted(expected)


def test_starts_are_checked():
    with pytest.raises(ValueError, match=r"starts=\(1,\) of 1 parts"):
        Curriculum((Dataset(CORPUS, 4, 16),), (1,))
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        curriculum().batch_at(-1)
