"""The log: one step late, nothing lost, and no wait for a device."""

import io

import pytest
import torch
from rich.console import Console

from k31fn import metrics, trackers, trainer
from k31fn.kernels.registry import use_impl
from k31fn.trainer.console import View
from k31fn.trainer.log import Log, NonFiniteError
from tests.trainer import runs


def numbers(loss, non_finite=0.0, skipped=0.0, spike=0.0, violation=0.0, device="cpu"):
    values = (loss, 0.5, 2.0, 1.25, non_finite, skipped, spike, 0.0, violation, 0.0)
    return trainer.Metrics(*(torch.tensor(v, device=device) for v in values))


@pytest.fixture
def shown():
    return io.StringIO()


@pytest.fixture
def log(tmp_path, text, shown):
    recipe = runs.recipe(text)
    view = View(Console(file=shown, soft_wrap=True, highlight=False, width=200))
    view.begin(recipe, tmp_path, 0, trainer.load_corpus(recipe).dataset)
    return Log(tmp_path / "metrics.jsonl", trackers.NoTracker(), view)


def written(tmp_path):
    file = tmp_path / "metrics.jsonl"
    return metrics.read(file) if file.exists() else []


def test_a_step_is_written_when_the_next_one_has_been_queued(log, tmp_path, shown):
    log.push(0, numbers(3.0), 0.1, 100)
    assert written(tmp_path) == []
    log.push(1, numbers(2.0), 0.2, 100)
    assert [(r["step"], r["train/loss"], r["lr"]) for r in written(tmp_path)] == [(0, 3.0, 0.1)]
    log.flush()
    log.flush()
    assert [r["train/loss"] for r in written(tmp_path)] == [3.0, 2.0]
    expected = {
        "train/indexer_kl": 0.5,
        "grad_norm": 2.0,
        "moe/load_max_over_mean": 1.25,
        "skipped": 0,
    }
    assert expected.items() <= written(tmp_path)[1].items()
    assert written(tmp_path)[1]["tokens_per_second"] > 0
    lines = shown.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines[-2:]] == ["step     0/10", "step     1/10"]


def test_three_in_a_row(log, tmp_path, shown):
    bad = numbers(float("nan"), non_finite=1.0, skipped=1.0)
    for step, n in enumerate([bad, bad, numbers(2.0), bad, bad]):
        log.push(step, n, 0.1, 100)
    log.push(
        5, numbers(0.0, skipped=1.0), 0.1, 100
    )  # without a label: skipped, but not a bad number
    for step in (6, 7, 8):
        log.push(step, bad, 0.1, 100)
    with pytest.raises(NonFiniteError, match="3 steps in a row up to step 8 were not finite"):
        log.push(9, numbers(1.0), 0.1, 100)
    log.flush()
    assert [r["step"] for r in written(tmp_path)] == list(range(10))
    assert [r["skipped"] for r in written(tmp_path)] == [1, 1, 0, 1, 1, 1, 1, 1, 1, 0]
    assert (
        "step 5 skipped (5 so far): it had no label to learn from; nothing was changed"
        in shown.getvalue()
    )


def test_what_could_not_be_written_does_not_hide_the_next(log, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    log.push(0, numbers(3.0), 0.1, 100)
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "append", full)
        with pytest.raises(OSError, match="No space left"):
            log.push(1, numbers(2.0), 0.1, 100)
    log.flush()
    assert [r["step"] for r in written(tmp_path)] == [1]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_on_cuda_nothing_waits(log, tmp_path, text):
    """torch raises at any operation that waits.

    The ragged expert product reads its sizes, so the other one runs.
    """
    device = torch.device("cuda")
    recipe = runs.recipe(text)
    step, state = (
        trainer.make_step(trainer.lay_out(recipe)),
        trainer.init_state(trainer.lay_out(recipe), device),
    )
    dataset = trainer.load_corpus(recipe).dataset
    batches = [trainer.make_batches(recipe, dataset.batch_at(i), device) for i in range(3)]
    state, first = step(state, batches[0], 0.01)
    with use_impl(grouped_matmul="reference"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in (1, 2):
                state, last = step(state, batches[i], 0.01)
                log.push(i, last, 0.01, 100)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    log.flush()
    assert [r["step"] for r in written(tmp_path)] == [1, 2]
    assert written(tmp_path)[1]["train/loss"] == float(last.loss)
    _, on_cpu = trainer.make_step(trainer.lay_out(recipe))(
        trainer.init_state(trainer.lay_out(recipe), torch.device("cpu")),
        trainer.make_batches(recipe, dataset.batch_at(0), torch.device("cpu")),
        0.01,
    )
    assert abs(float(first.loss) - float(on_cpu.loss)) < 1e-4
