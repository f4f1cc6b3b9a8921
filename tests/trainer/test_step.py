"""One step: the same numbers however it is cut, bad steps change nothing, and nothing waits for the
device.
"""

import dataclasses
import gc
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # tested with torch 2.13

from k31fn import config, data, model, optim, segments, trainer, tree
from k31fn.testing import live_bytes
from k31fn.trainer import part_metrics
from tests import small
from tests.trainer import runs

CPU = torch.device("cpu")
ADAMW = config.Optimizer(kind="adamw", peak_lr=0.01, warmup_steps=0, max_norm=float("inf"))


@pytest.fixture
def recipe(text):
    return runs.recipe(text)


def rows_of(recipe, step=0):
    return trainer.load_corpus(recipe).dataset.batch_at(step)


def clone(x):
    return tree.map(lambda t: t.clone(), x)


def identical(a, b):
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def one_step(recipe, rows, lr=0.01):
    state = trainer.init_state(trainer.lay_out(recipe), CPU)
    return trainer.make_step(trainer.lay_out(recipe))(
        state, trainer.make_batches(recipe, rows, CPU), lr
    )


def gradients(state):
    """AdamW's first moment after one step that was not clipped."""
    return tree.map(lambda m: m / (1 - ADAMW.beta1), state.opt_state.mu)


def largest_difference(a, b):
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.usefixtures("unchecked")
class TestAccumulation:
    """The numbers of a step depend on its rows alone (also case D13: a mean over all labels, not a
    mean of means).
    """

    @pytest.fixture
    def wide(self, recipe):
        return dataclasses.replace(recipe, compute="float64", optimizer=ADAMW)

    def test_micro_batches_and_order_of_rows(self, wide):
        rows = rows_of(wide)
        assert (
            len({int((row >= 0).sum()) for row in rows.labels}) > 1
        )  # else means of means would do as well
        state, numbers = one_step(wide, rows)
        assert state.params.head.dtype == numbers.loss.dtype == torch.float64
        for micro_batches in (2, 4):
            cut = dataclasses.replace(wide, micro_batches=micro_batches)
            for order in (slice(None), [2, 0, 3, 1]):
                other, same = one_step(cut, tree.map(lambda x, o=order: x[o], rows))
                # float64 sums of a few hundred terms in another order: some 1e-14 of values up to
                # 10
                assert largest_difference(gradients(other), gradients(state)) < 1e-10
                assert largest_difference(same, numbers) < 1e-10
                assert torch.equal(other.balance.bias, state.balance.bias)

    def test_the_same_documents_packed_otherwise(self, wide):
        """Two documents in one row and padding, or each in a row of its own."""
        wide = dataclasses.replace(wide, batch_size=2)
        tokens = torch.arange(100, 124).repeat(2, 1)
        lengths = torch.tensor([[10, 14], [9, 15]])
        ids = torch.stack([torch.repeat_interleave(torch.tensor([1, 2]), n) for n in lengths])

        def example(tokens, ids):
            packing = segments.from_ids(ids)
            return data.Example(tokens, segments.next_token_labels(tokens, packing), packing)

        packed = example(tokens, ids)
        apart = []
        for row, lengths_of_row in zip(tokens, lengths.tolist(), strict=True):
            for piece in row.split(lengths_of_row):
                pad = 24 - len(piece)
                alone = torch.ones(1, 24, dtype=torch.int64)
                alone[:, len(piece) :] = 0
                apart.append((torch.cat([piece, piece.new_zeros(pad)])[None], alone))
        spread = example(torch.cat([t for t, _ in apart]), torch.cat([i for _, i in apart]))
        state, numbers = one_step(wide, packed)
        other, same = one_step(dataclasses.replace(wide, batch_size=4, micro_batches=2), spread)
        assert largest_difference(gradients(other), gradients(state)) < 1e-10
        assert largest_difference(same, numbers) < 1e-10

    def test_a_mean_of_means_would_be_seen(self, wide, monkeypatch):
        rows = rows_of(wide)
        _, numbers = one_step(wide, rows)
        cut = dataclasses.replace(wide, micro_batches=2)
        batches = trainer.make_batches(cut, rows, CPU)
        local = [dataclasses.replace(b, num_labels=2 * (b.labels >= 0).sum()) for b in batches]
        _, wrong = trainer.make_step(trainer.lay_out(cut))(
            trainer.init_state(trainer.lay_out(cut), CPU), local, 0.01
        )
        assert abs(float(wrong.grad_norm - numbers.grad_norm)) > 1e-6


class TestDenominators:
    def test_labels_end_with_their_document(self, recipe):
        """Case D07: a document's last token is not trained to predict the next document's first."""
        rows = rows_of(recipe)
        last = segments.document_start(rows.segments).roll(-1, 1) & (rows.segments.ids > 0)
        assert last[:, :-1].any()
        assert (rows.labels[last] == -100).all()
        (batch,) = trainer.make_batches(recipe, rows, CPU)
        documents = int(segments.document_start(rows.segments).sum())
        assert int(batch.num_labels) == int(batch.num_queries) - documents

    def test_no_label_in_a_micro_batch(self, recipe):
        """Case D16: it contributes nothing."""
        recipe = dataclasses.replace(recipe, compute="float64", optimizer=ADAMW)
        rows = rows_of(recipe)
        silent = dataclasses.replace(rows, labels=rows.labels.clone())
        silent.labels[:2] = -100
        _, whole = one_step(recipe, silent)
        _, cut = one_step(dataclasses.replace(recipe, micro_batches=2), silent)
        assert largest_difference(whole, cut) < 1e-10
        assert not whole.skipped

    def test_no_label_in_a_step(self, recipe):
        """Case D16: nothing changes, nothing is NaN, and it is said."""
        rows = rows_of(recipe)
        silent = dataclasses.replace(rows, labels=torch.full_like(rows.labels, -100))
        before = trainer.init_state(trainer.lay_out(recipe), CPU)
        state, numbers = one_step(recipe, silent)
        assert identical(
            (state.params, state.opt_state, state.balance),
            (before.params, before.opt_state, before.balance),
        )
        assert (float(numbers.loss), float(numbers.non_finite), float(numbers.skipped)) == (
            0.0,
            0.0,
            1.0,
        )
        assert int(state.step) == 1


def infinite_loss(total, params):
    return total * float("inf")


def nan_gradient(total, params):
    return total + (params.head.sum() * 0).sqrt()  # 0, with the gradient inf * 0


class TestNonFinite:
    @pytest.mark.parametrize("harm", [infinite_loss, nan_gradient])
    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_it_changes_nothing(self, recipe, monkeypatch, harm, kind):
        recipe = dataclasses.replace(
            recipe, optimizer=dataclasses.replace(recipe.optimizer, kind=kind)
        )
        step, original = trainer.make_step(trainer.lay_out(recipe)), model.loss
        state, _ = step(
            trainer.init_state(trainer.lay_out(recipe), CPU),
            trainer.make_batches(recipe, rows_of(recipe), CPU),
            0.01,
        )
        before = clone(state)
        bad = trainer.make_batches(recipe, rows_of(recipe, 1), CPU)

        def harmed(params, *args, **kwargs):
            total, parts = original(params, *args, **kwargs)
            return harm(total, params), parts

        monkeypatch.setattr(model, "loss", harmed)
        after, numbers = step(state, bad, 0.01)
        assert (float(numbers.non_finite), float(numbers.skipped)) == (1.0, 1.0)
        same = [(s.params, s.opt_state, s.balance, s.key) for s in (after, before)]
        assert identical(*same)
        assert int(after.step) == int(before.step) + 1
        monkeypatch.undo()
        good, numbers = step(after, bad, 0.01)
        assert not numbers.skipped
        assert not identical(good.params, before.params)
        assert not identical(good.balance, before.balance)

    @pytest.mark.parametrize(("harm", "number"), [(nan_gradient, 1), (infinite_loss, None)])
    def test_the_leaf_is_named(self, recipe, monkeypatch, harm, number):
        """That of the head alone, or the first of all."""
        original = model.loss

        def harmed(params, *args, **kwargs):
            total, parts = original(params, *args, **kwargs)
            return harm(total, params), parts

        step, state = trainer.make_step(trainer.lay_out(recipe)), None
        batches = trainer.make_batches(recipe, rows_of(recipe), CPU)
        labels = part_metrics.label(recipe, 0, CPU)
        for harms in (False, True):
            state = state or trainer.init_state(trainer.lay_out(recipe), CPU)
            if harms:
                monkeypatch.setattr(model, "loss", harmed)
            state, numbers = step(state, batches, 0.01)
            found = dict(zip(labels.names, numbers.detail.tolist(), strict=True))
            first, bad = found["non_finite/first_leaf"], found["non_finite/leaves"]
            if not harms:
                assert (first, bad) == (-1, 0)
        assert bad == number or number is None
        if number is None:
            assert bad > 10
        else:
            assert labels.leaves[int(first)] == "head"

    def test_without_the_selection_it_would_be_seen(self, recipe, monkeypatch):
        monkeypatch.setattr(optim, "non_finite", lambda values: torch.tensor(False))
        rows = rows_of(recipe)
        original = model.loss
        monkeypatch.setattr(
            model,
            "loss",
            lambda p, *a, **k: (nan_gradient((r := original(p, *a, **k))[0], p), r[1]),
        )
        state, _ = one_step(recipe, rows)
        assert not torch.isfinite(state.params.head).all()


class Reads(TorchDispatchMode):
    """Counts operations that make the host wait, by the k31fn file that asked; also those that
    never dispatch.
    """

    METHODS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
    OPS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "_unique2",
        "unique_dim",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = Counter()
        for name in self.METHODS:
            original = getattr(torch.Tensor, name)

            def counted(tensor, *args, _original=original, _name=name, **kwargs):
                self.note(_name)
                return _original(tensor, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, name, counted)

    def note(self, name):
        frames = [f.filename for f in traceback.extract_stack() if "/k31fn/" in f.filename]
        self.found[str(Path(frames[-1]).relative_to(runs.REPOSITORY)), name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        with_mask = name == "index" and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in self.OPS or with_mask:
            self.note(name)
        return func(*args, **kwargs or {})


class TestHostWaits:
    def test_the_step_reads_nothing(self, recipe, monkeypatch):
        """What is read is the ragged expert product's: the number of rows per expert, three
        products per MoE layer.
        """
        recipe = dataclasses.replace(recipe, micro_batches=2)
        step, state = (
            trainer.make_step(trainer.lay_out(recipe)),
            trainer.init_state(trainer.lay_out(recipe), CPU),
        )
        batches = trainer.make_batches(recipe, rows_of(recipe), CPU)
        with Reads(monkeypatch) as reads:
            state, _ = step(state, batches, 0.01)
        per_step = 3 * len(model.moe_layers(recipe.model)) * recipe.micro_batches
        assert dict(reads.found) == {("k31fn/kernels/experts/grouped.py", "tolist"): per_step}

    def test_a_read_would_be_seen(self, recipe, monkeypatch):
        monkeypatch.setattr(optim, "non_finite", lambda values: torch.tensor(bool(values[0] > 1e9)))
        rows = rows_of(recipe)
        with Reads(monkeypatch) as reads:
            one_step(recipe, rows)
        assert any(name == "__bool__" for _, name in reads.found)

    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_the_step_runs_without_values(self, recipe, kind):
        """Meta tensors have none to read: with the reference expert product there is no wait at
        all.
        """
        recipe = dataclasses.replace(
            recipe, optimizer=dataclasses.replace(recipe.optimizer, kind=kind)
        )
        batches = [
            tree.map(lambda x: x.to("meta"), b)
            for b in trainer.make_batches(recipe, rows_of(recipe), CPU)
        ]
        state, numbers = trainer.make_step(trainer.lay_out(recipe))(
            trainer.abstract_state(trainer.lay_out(recipe)), batches, 0.01
        )
        assert all(x.is_meta for x in tree.leaves((state, numbers)))
        assert tree.paths(state) == tree.paths(trainer.abstract_state(trainer.lay_out(recipe)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("num_steps", "remat"),
    [
        pytest.param(20, "none", marks=pytest.mark.slow),
        pytest.param(200, "layer", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_live_memory_does_not_grow(recipe, num_steps, remat):
    recipe = dataclasses.replace(recipe, remat=remat)
    step, state = (
        trainer.make_step(trainer.lay_out(recipe)),
        trainer.init_state(trainer.lay_out(recipe), CPU),
    )
    dataset = trainer.load_corpus(recipe).dataset
    live = []
    gc.disable()  # a cycle that holds a tensor would show
    try:
        with live_bytes() as memory:
            for i in range(num_steps):
                state, numbers = step(
                    state, trainer.make_batches(recipe, dataset.batch_at(i), CPU), 0.01
                )
                live.append(memory.current)
    finally:
        gc.enable()
    assert numbers.loss.isfinite()
    assert live[2] == live[-1], live


@pytest.mark.slow
def test_python_objects_do_not_pile_up(text):
    """In a process of its own: the type checks of the tests keep some objects for each call."""
    script = """
import gc, sys
import torch
from k31fn import trainer
from tests.trainer import runs
recipe, cpu = runs.recipe(sys.argv[1]), torch.device("cpu")
layout = trainer.lay_out(recipe)
step, state = trainer.make_step(layout), trainer.init_state(layout, cpu)
batches = trainer.make_batches(recipe, trainer.load_corpus(recipe).dataset.batch_at(0), cpu)
for i in range(200):
    state, _ = step(state, batches, 0.01)
    if i in (9, 199):
        gc.collect()
        print(len(gc.get_objects()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(text)],
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    early, late = map(int, done.stdout.split())
    assert late - early < 19  # a tenth of an object per step


class TestIndexerOnly:
    @pytest.fixture
    def recipe(self, text):
        base = runs.recipe(text)
        full = dataclasses.replace(base.model.sublayers["full_attention"], stage="dense_warmup")
        return dataclasses.replace(
            base, model=small.replace(base.model, full_attention=full), trainable="indexer"
        )

    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_only_indexer_leaves_change(self, recipe, kind):
        recipe = dataclasses.replace(
            recipe, optimizer=dataclasses.replace(recipe.optimizer, kind=kind), micro_batches=2
        )
        before = trainer.init_state(trainer.lay_out(recipe), CPU)
        state = clone(before)
        step, dataset = (
            trainer.make_step(trainer.lay_out(recipe)),
            trainer.load_corpus(recipe).dataset,
        )
        for i in range(3):
            state, numbers = step(
                state, trainer.make_batches(recipe, dataset.batch_at(i), CPU), 0.01
            )
        pairs = zip(tree.flatten_with_paths(before.params), tree.leaves(state.params), strict=True)
        changed = {path for (path, a), b in pairs if not torch.equal(a, b)}
        assert changed == {p for p in tree.paths(before.params) if ".indexer." in p}
        assert len(changed) == 5
        assert identical(state.balance, before.balance)
        assert all(".indexer." in p or p.endswith("step") for p in tree.paths(state.opt_state))
        assert 0 < float(numbers.grad_norm) < 1  # of the indexers alone

    def test_the_gradient_is_that_of_a_run_of_everything(self, recipe):
        recipe = dataclasses.replace(recipe, optimizer=ADAMW, compute="float64")
        rows = rows_of(recipe)
        some, _ = one_step(recipe, rows)
        every, _ = one_step(dataclasses.replace(recipe, trainable="all"), rows)
        expected = dict(tree.flatten_with_paths(gradients(every)))
        for path, g in tree.flatten_with_paths(gradients(some)):
            torch.testing.assert_close(g, expected[path], rtol=1e-12, atol=1e-15)

    def test_without_indexer_it_is_refused(self, text):
        base = runs.recipe(text)
        mla = small.replace(base.model, full_attention=base.model.sublayers["full_attention"].attn)
        with pytest.raises(
            ValueError,
            match=r"trainable='indexer': model\.kda and model\.full_attention have no indexer",
        ):
            dataclasses.replace(base, model=mla, trainable="indexer")


def test_float32_islands_stay_in_a_bfloat16_run(recipe):
    """Case D03: parameters and optimiser state are float32, and the decays are not rounded when
    they are used.
    """
    recipe = dataclasses.replace(recipe, compute="bfloat16")
    state, numbers = one_step(recipe, rows_of(recipe))
    assert {x.dtype for x in tree.leaves((state.params, state.opt_state))} == {torch.float32}
    assert numbers.loss.dtype == torch.float32
    _, exact = one_step(dataclasses.replace(recipe, compute="float32"), rows_of(recipe))
    assert abs(float(numbers.loss - exact.loss)) < 0.02  # 2^-9 of logits of size 1 to 5, averaged
    assert float(numbers.loss) != float(exact.loss)


def test_rows_are_those_of_the_data(recipe):
    rows = rows_of(recipe, 3)
    cut = dataclasses.replace(recipe, micro_batches=2)
    batches = trainer.make_batches(cut, rows, CPU)
    np.testing.assert_array_equal(torch.cat([b.tokens for b in batches]), rows.tokens)
    np.testing.assert_array_equal(
        torch.cat([b.segments.position for b in batches]), rows.segments.position
    )
