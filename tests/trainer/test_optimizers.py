"""What the recipe says of the optimiser reaches the step: schedule, norm, state, spikes."""

import dataclasses

import pytest
import torch

from k31fn import config, trainer, tree
from k31fn.parallel import Mesh, each_rank
from k31fn.testing import assert_close_trees
from k31fn.trainer.phases import learning_rate
from tests.trainer import meshes

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, compute="float64")


def with_optimizer(recipe, **changes):
    return dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, **changes))


def test_the_schedule(recipe):
    flat = with_optimizer(
        recipe, schedule="wsd", decay_fraction=0.3, warmup_steps=2, peak_lr=1.0, final_fraction=0.0
    )
    rates = [learning_rate(flat, step) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])
    all_of_it = with_optimizer(flat, decay_fraction=1.0)  # what the warm-up leaves
    assert learning_rate(all_of_it, 2) == pytest.approx(7 / 8)


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2, tp=2), pytest.param(Mesh(pp=2), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "inf", "max_norm": 0.01},
        pytest.param({"ns_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param(
            {"state_dtype": "bfloat16", "offload": True, "kind": "adamw"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_on_a_mesh(recipe, mesh, changes):
    """Clipping by the largest magnitude; Newton-Schulz in float32 and state in bfloat16 round alike
    on any mesh.
    """
    made = with_optimizer(recipe, **changes)
    expected, state = meshes.on_one_device(made, 2)
    _, plain = meshes.on_one_device(recipe, 2)
    metrics, _, whole = meshes.on_threads(dataclasses.replace(made, mesh=mesh), 2)
    narrow = "ns_dtype" in changes or "state_dtype" in changes
    rtol, atol = (1e-4, 1e-5) if narrow else (1e-9, 1e-11)
    torch.testing.assert_close(metrics[0], expected, rtol=rtol, atol=atol)
    assert_close_trees(whole.params, state.params, rtol=rtol, atol=atol)
    with pytest.raises(AssertionError):
        assert_close_trees(state.params, plain.params, rtol=1e-9, atol=1e-11)
    if "state_dtype" in changes:
        assert {x.dtype for x in tree.leaves(state.opt_state.nu)} == {torch.bfloat16}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2)], ids=str)
def test_a_spike_is_skipped_and_counted_on_all_ranks(recipe, mesh):
    """A history of 40 losses far below what the step will have."""
    made = with_optimizer(dataclasses.replace(recipe, mesh=mesh), spike=8.0)

    def go(axes):
        state = trainer.init_state(trainer.lay_out(made, axes), CPU)
        values = 0.01 * torch.rand(
            2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        guard = dataclasses.replace(state.guard, values=1 + values, count=torch.tensor(40))
        state = dataclasses.replace(state, guard=guard)
        before = tree.map(torch.clone, (state.params, state.opt_state, state.balance))
        batches = trainer.make_batches(
            made, trainer.rows_at(trainer.load_corpus(made).dataset, 0, axes), CPU, axes
        )
        step = trainer.make_step(trainer.lay_out(made, axes))
        state, numbers = step(state, batches, 0.01)
        after = state.params, state.opt_state, state.balance
        same = all(
            torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(after), strict=True)
        )
        forgiving = dataclasses.replace(state.guard, count=torch.tensor(5))
        _, taken = step(dataclasses.replace(state, guard=forgiving), batches, 0.01)
        return (
            float(numbers.spike),
            float(numbers.skipped),
            same,
            int(state.guard.in_a_row),
            float(taken.skipped),
        )

    ranks = each_rank(go, mesh, lambda _: ()) if mesh.world_size > 1 else [go(mesh.axes())]
    assert ranks == [(1.0, 1.0, True, 1, 0.0)] * mesh.world_size


def test_without_it_nothing_is_kept(recipe):
    assert trainer.init_state(trainer.lay_out(recipe), CPU).guard == ()
    assert config.Optimizer().spike == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "linear"),
        ("norm", "1"),
        ("ns_dtype", "float16"),
        ("state_dtype", "float16"),
        ("decay_fraction", 1.5),
        ("qk_clip", -1.0),
        ("spike", float("inf")),
    ],
)
def test_errors(field, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}={value!r}"):
        config.Optimizer(**{field: value})
