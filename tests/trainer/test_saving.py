"""What a run's ranks write into its checkpoints together."""

import dataclasses

import pytest
import torch

from k31fn.checkpoint import Checkpointer
from k31fn.parallel import Mesh, each_rank
from k31fn.trainer import saving
from k31fn.trainer.console import View
from k31fn.trainer.ranks import Ranks
from k31fn.trainer.state import init_state
from tests.trainer import meshes


@pytest.mark.usefixtures("direct", "unchecked")
def test_the_base_of_adapters_is_looked_at_once_in_a_run_and_by_one_rank(text, tmp_path, monkeypatch):
    recipe, seen = dataclasses.replace(meshes.recipe(text), mesh=Mesh(fsdp=2), keep=3), []

    def fingerprint(recipe):
        seen.append(recipe)
        return f"number {len(seen)}"

    monkeypatch.setattr(saving, "fingerprint", fingerprint)

    def go(axes, coordinate):
        saves = saving.Saves(recipe, tmp_path, "text", View.silent(), Ranks(axes))
        state = init_state(recipe, torch.device("cpu"), axes)
        for step in (1, 2, 3):
            saves.save(step, state, {})
        saves.close(together=True)

    each_rank(go, recipe.mesh, lambda c: (c,))
    with Checkpointer(tmp_path, read_only=True) as checkpoints:
        found = [checkpoints.metadata(step) for step in checkpoints.steps()]
    assert found == [{"text": "text", "base": "number 1"}] * 3
    assert len(seen) == 1
