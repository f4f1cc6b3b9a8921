"""What a run's ranks write into its checkpoints together."""

import dataclasses

import pytest
import torch

from k31fn import trainer
from k31fn.checkpoint import Checkpointer, NotSavedError, lock
from k31fn.parallel import Mesh, each_rank
from k31fn.trainer import folder, saving
from k31fn.trainer.console import View
from k31fn.trainer.layout import lay_out
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.ranks.pending_errors import _join_errors
from k31fn.trainer.state import init_state
from tests.trainer import meshes, runs


@pytest.mark.usefixtures("direct", "unchecked")
def test_the_base_of_adapters_is_looked_at_once_in_a_run_and_by_one_rank(
    text, tmp_path, monkeypatch
):
    recipe, seen = dataclasses.replace(meshes.recipe(text), mesh=Mesh(fsdp=2), keep=3), []

    def fingerprint(recipe):
        seen.append(recipe)
        return f"number {len(seen)}"

    monkeypatch.setattr(saving, "fingerprint", fingerprint)

    def go(axes, coordinate):
        saves = saving.Saves(lay_out(recipe, axes), tmp_path, "text", View.silent(), Ranks(axes))
        state = init_state(lay_out(recipe, axes), torch.device("cpu"))
        for step in (1, 2, 3):
            saves.save(step, state, {})
        saves.close(together=True)

    each_rank(go, recipe.mesh, lambda c: (c,))
    with Checkpointer(tmp_path, read_only=True) as checkpoints:
        found = [checkpoints.metadata(step) for step in checkpoints.steps()]
    assert found == [{"text": "text", "base": "number 1"}] * 3
    assert len(seen) == 1


@pytest.mark.usefixtures("direct", "unchecked")
def test_a_run_in_a_folder_that_another_holds_says_that_it_waits(
    text, tmp_path, monkeypatch, capsys
):
    where = folder.new(tmp_path, runs.recipe(text))
    monkeypatch.setattr(lock, "_WAIT_S", 0.05)
    with Checkpointer(where / "checkpoints"):
        assert trainer.main([str(where / "config.json"), "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    held = f"{where}/checkpoints: another process is writing checkpoints here; "
    assert out == f"{held}waiting for its end, 0 s at most\n"
    assert err == f"train.py: {held}end that run, or start one in another folder\n"


def test_a_save_that_fails_again_is_told_once():
    first = NotSavedError("step 3 is not saved: full", "full")
    for another in (
        NotSavedError("step 6 is not saved: full", "full"),
        NotSavedError("step 6: gone", "gone"),
    ):
        assert _join_errors(first, another) is first
    assert first.__notes__ == ["step 6: gone"]
    other = OSError("full")  # of another file: that the step is not saved is new
    _join_errors(other, NotSavedError("step 6 is not saved: full", "full"))
    assert other.__notes__ == ["step 6 is not saved: full"]
