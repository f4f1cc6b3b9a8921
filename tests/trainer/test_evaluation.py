"""The held-out loss against a computation from full logits, in float64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from k31fn import data, model, trainer, tree
from k31fn.layers.linear import linear
from tests.trainer import runs

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def recipe(text):
    return runs.recipe(text, compute="float64")


@pytest.fixture
def state(recipe):
    """After a step, with router biases that are not zero."""
    batches = trainer.make_batches(recipe, trainer.load_corpus(recipe).dataset.batch_at(0), CPU)
    return trainer.make_step(trainer.lay_out(recipe))(
        trainer.init_state(trainer.lay_out(recipe), CPU), batches, 0.02
    )[0]


def directly(recipe, state, scored):
    """Row by row, piece by piece of document: nothing but the bytes of a piece, and a softmax over
    all tokens.
    """
    nats = 0.0
    for row, ids in zip(scored.rows.tokens, scored.rows.segments.ids, strict=True):
        for document in ids[ids > 0].unique().tolist():
            piece = row[ids == document]
            hidden = model.apply(
                state.params, piece[None], recipe.model, balance=state.balance
            ).hidden
            for logits, token in zip(linear(hidden[0], state.params.head), piece[1:], strict=False):
                if token < 256:  # an end token is no byte
                    nats -= float(F.log_softmax(logits, 0)[token])
    return nats / scored.num_bytes


def test_it_is_the_mean_over_bytes(recipe, state):
    scored = trainer.load_corpus(recipe).all
    assert (scored.rows.tokens == 256).any()
    got = trainer.heldout_loss(trainer.lay_out(recipe), state, scored)
    assert got == pytest.approx(directly(recipe, state, scored), rel=1e-11)
    with_ends = dataclasses.replace(
        scored, rows=dataclasses.replace(scored.rows, labels=labels_with_ends(scored.rows))
    )
    assert abs(trainer.heldout_loss(trainer.lay_out(recipe), state, with_ends) - got) > 1e-3


def labels_with_ends(rows):
    following, same = rows.tokens.roll(-1, 1), rows.segments.ids.roll(-1, 1) == rows.segments.ids
    same[:, -1] = False
    return torch.where(same & (rows.segments.ids > 0), following, -100)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_whatever_the_batch_size(recipe, state, batch_size):
    scored = trainer.load_corpus(recipe).all
    assert len(scored.rows.tokens) % 3
    other = dataclasses.replace(recipe, batch_size=batch_size)
    expected = trainer.heldout_loss(trainer.lay_out(recipe), state, scored)
    assert trainer.heldout_loss(trainer.lay_out(other), state, scored) == pytest.approx(
        expected, rel=1e-12
    )


def test_the_biases_of_the_state_are_used(recipe, state):
    scored = trainer.load_corpus(recipe).all
    unbiased = dataclasses.replace(state, balance=model.init_balance(recipe.model))
    assert trainer.heldout_loss(trainer.lay_out(recipe), unbiased, scored) != trainer.heldout_loss(
        trainer.lay_out(recipe), state, scored
    )


def test_a_uniform_model(recipe):
    """A head of zeros: log 257 per byte."""
    state = trainer.init_state(trainer.lay_out(recipe), CPU)
    flat = dataclasses.replace(
        state, params=dataclasses.replace(state.params, head=state.params.head * 0)
    )
    loss = trainer.heldout_loss(trainer.lay_out(recipe), flat, trainer.load_corpus(recipe).all)
    assert loss == pytest.approx(torch.tensor(257.0, dtype=torch.float64).log().item(), rel=1e-12)


def test_progress_counts_every_row(recipe):
    state, scored, counted = (
        trainer.init_state(trainer.lay_out(recipe), CPU),
        trainer.load_corpus(recipe).all,
        [],
    )
    trainer.heldout_loss(trainer.lay_out(recipe), state, scored, progress=counted.append)
    assert sum(counted) == len(scored.rows.tokens)


def test_the_4_gram_model_scores_the_same_bytes(recipe):
    """It is fitted on the bytes that were trained on and scored on the bytes that the model is
    scored on.
    """
    corpus = trainer.load_corpus(recipe)
    labels = corpus.all.rows.labels
    assert (
        sum(len(p) - 1 for p in corpus.all.pieces)
        == corpus.all.num_bytes
        == int((labels >= 0).sum())
    )
    trained = b"".join(data.trained_on(corpus.dataset, 2, corpus.tokenizer))
    rows = [corpus.dataset.batch_at(step) for step in (0, 1)]
    assert trained == b"".join(p for r in rows for p in data.pieces(r, corpus.tokenizer))
    assert len(tree.leaves(rows)) == 8
