"""Bytes that a step is predicted to need, against those that it takes."""

import dataclasses

import pytest
import torch

from k31fn import config, lora, trainer, tree
from k31fn.layers import latent_moe
from k31fn.parallel import Mesh
from k31fn.testing import live_bytes
from k31fn.trainer.forecast import memory
from k31fn.trainer.forecast.shape_cache import ShapeCache
from k31fn.trainer.gradient import make_gradient
from tests import small
from tests.trainer import runs

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")


def recipe(text, **changes):
    """A dense layer, one of Gated DSA and two of KDA with experts."""
    moe = latent_moe.Config(
        16, latent_size=32, expert_size=64, shared_size=64, num_experts=8, top_k=2
    )
    cfg = small.config(vocab_size=257, num_layers=4, full_attention_layers=(2,), moe=moe)
    how = {"remat": "layer", "optimizer": config.Optimizer(kind="adamw", peak_lr=1e-3)}
    return dataclasses.replace(runs.recipe(text), model=cfg, **how, **changes)


def measured(made):
    """Bytes of the state, and the most that a gradient makes on the CPU besides."""
    state = trainer.init_state(trainer.lay_out(made), CPU)
    gradient = make_gradient(trainer.lay_out(made, Mesh().axes()))
    rows = trainer.rows_at(trainer.load_corpus(made).dataset, 0)
    batches = trainer.make_batches(made, rows, CPU)
    with live_bytes() as live:
        gradient(state, batches)
    return state, live.peak


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("batch", "length"), [(4, 32), (2, 128)])
def test_a_step_of_adapters(text, batch, length):
    """Weights and state to the byte; what a step makes within 2%."""
    made = recipe(text, lora=lora.Config(rank=2, held="fp8"), batch_size=batch, length=length)
    state, peak = measured(made)
    found = memory.predict(made)
    kinds = {
        path: "frozen" in spec.tags
        for path, spec in tree.flatten_with_paths(trainer.trained_specs(made))
    }
    weights = dict(tree.flatten_with_paths(state.params))
    assert found.frozen == sum(x.nbytes for path, x in weights.items() if kinds[path])
    assert (
        found.trained
        == found.gradients
        == sum(x.nbytes for path, x in weights.items() if not kinds[path])
    )
    assert found.optimizer == sum(x.nbytes for x in tree.leaves(state.opt_state) if x.ndim)
    assert found.gathered == 0
    assert found.gradients + found.activations == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deep_model(text):
    """What is added by layer, against the whole model on meta tensors: of adapters what is kept,
    else gradients.
    """
    kinds = {"num_layers": 12, "full_attention_layers": (3, 7, 11)}
    for changes in ({"lora": lora.Config(rank=2, held="fp8")}, {}):
        made = recipe(text, **changes)
        made = dataclasses.replace(made, model=small.replace(made.model, **kinds))
        found, whole = memory.predict(made), memory._peak_of(made, ShapeCache())
        assert found.gradients + found.activations == pytest.approx(whole, rel=0.12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_grows_with_what(text):
    """Activations grow with tokens; over fsdp a rank holds a part of what is frozen, and two layers
    gathered.
    """
    made = recipe(text, lora=lora.Config(rank=2, held="fp8"), length=32)
    one, longer = (memory.predict(dataclasses.replace(made, length=n)) for n in (32, 64))
    assert 1.7 < longer.activations / one.activations < 4.1
    spread = memory.predict(dataclasses.replace(made, mesh=Mesh(fsdp=4), batch_size=16))
    assert 0 < spread.gathered < one.frozen
    assert spread.frozen < 0.3 * one.frozen


def test_a_pipeline_is_refused(text):
    with pytest.raises(ValueError, match=r"stages of a pipeline are not predicted"):
        memory.predict(recipe(text, mesh=Mesh(pp=2)))
