"""What a rank holds and sends, against ranks that are there."""

import dataclasses
from collections import Counter

import pytest
import torch

from k31fn import config, kernels, trainer, tree
from k31fn.kernels.registry import record_impls
from k31fn.parallel import Mesh, each_rank, record_collectives
from k31fn.trainer.forecast import collective_volume
from k31fn.trainer.forecast.abstract_rank import run_step
from k31fn.trainer.forecast.collective_volume import volumes
from k31fn.trainer.forecast.rank_weights import rank_weights
from tests import small
from tests.trainer import meshes

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, batch_size=16, micro_batches=4, remat="layer")


def calls_and_bytes(record):
    volume = collective_volume._volume(record)
    return dict(volume.calls), {k: n for k, n in volume.nbytes.items() if n}


def of_threads(made):
    """The records of a step of real ranks, one per rank of the pipeline."""
    dataset = trainer.load_corpus(made).dataset

    def go(axes):
        state, step = (
            trainer.init_state(trainer.lay_out(made, axes), CPU),
            trainer.make_step(trainer.lay_out(made, axes)),
        )
        batches = trainer.make_batches(made, trainer.rows_at(dataset, 0, axes), CPU, axes)
        step(state, batches, 0.01)

    with record_collectives() as record:
        each_rank(go, made.mesh, lambda _: ())
    firsts = [
        r
        for r, c in enumerate(made.mesh.coordinates())
        if not any(v for k, v in c.items() if k != "pp")
    ]
    return [record.ranks[r] for r in firsts]


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        (Mesh(fsdp=2, tp=2, ep=2), config.Pipeline()),
        pytest.param(Mesh(pp=2, cp=2), config.Pipeline(), marks=pytest.mark.slow),
        pytest.param(Mesh(dp=2, fsdp=2), config.Pipeline(), marks=pytest.mark.slow),
        pytest.param(Mesh(pp=2), config.Pipeline("zero_bubble"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_real_rank_sends_what_is_said(recipe, mesh, pipeline):
    """But for the routes: real ones are not balanced, so the bytes of the ragged exchange differ,
    not its calls.
    """
    made = dataclasses.replace(recipe, mesh=mesh, pipeline=pipeline)
    for real, said in zip(of_threads(made), volumes(made), strict=True):
        calls, nbytes = calls_and_bytes(real)
        assert calls == {k: n for k, n in said.calls.items() if n}
        ragged = "ragged_all_to_all"
        assert {k: n for k, n in nbytes.items() if k[0] != ragged} == {
            k: n for k, n in said.nbytes.items() if n and k[0] != ragged
        }


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (Mesh(dp=2, fsdp=2, tp=2, ep=4), {}),
        (Mesh(cp=2, tp=2, ep=2), {}),
        (Mesh(pp=2, fsdp=2), {"pipeline": config.Pipeline("interleaved", num_chunks=2)}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_layers_and_micro_batches_add_up(recipe, mesh, changes):
    """What is put together from small models equals one run of the whole."""
    cfg = small.replace(recipe.model, num_layers=4, full_attention_layers=(1, 3))
    made = dataclasses.replace(recipe, model=cfg, mesh=mesh, **changes)
    for rank, said in enumerate(volumes(made)):
        calls, nbytes = calls_and_bytes(run_step(made, rank))
        assert calls == {k: n for k, n in said.calls.items() if n}
        assert nbytes == {k: n for k, n in said.nbytes.items() if n}


def test_on_one_rank_nothing_is_sent(recipe):
    (volume,) = volumes(recipe)
    assert not +volume.calls


@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, tp=2, ep=2), Mesh(pp=2, fsdp=2)], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_a_rank_holds(recipe, mesh, kind):
    optimizer = dataclasses.replace(recipe.optimizer, kind=kind)
    made = dataclasses.replace(recipe, mesh=mesh, optimizer=optimizer)
    states = each_rank(
        lambda axes: trainer.init_state(trainer.lay_out(made, axes), CPU), mesh, lambda _: ()
    )
    for state, coordinate in zip(states, mesh.coordinates(), strict=True):
        held = rank_weights(made, coordinate.get("pp", 0))
        weights = dict(tree.flatten_with_paths(state.params))
        assert [(x.path, x.part, x.weight) for x in held] == [
            (p, tuple(w.shape), w.nbytes) for p, w in weights.items()
        ]
        of_optimizer = Counter()
        for path, x in tree.flatten_with_paths(state.opt_state):
            of_optimizer[next((w for w in weights if path.endswith(f".{w}")), "")] += x.nbytes
        assert {x.path: x.optimizer for x in held} == {p: of_optimizer[p] for p in weights}
        assert all(x.gradient == x.weight for x in held)


def test_frozen_weights_have_no_gradient(recipe):
    full = dataclasses.replace(recipe.model.sublayers["full_attention"], stage="dense_warmup")
    made = dataclasses.replace(
        recipe,
        model=small.replace(recipe.model, full_attention=full),
        trainable="indexer",
        mesh=Mesh(fsdp=2),
    )
    for x in rank_weights(made):
        assert (x.gradient > 0) == (x.optimizer > 0) == (".indexer." in x.path)


class TestShapesOnly:
    def test_ops_do_not_run_twice(self, recipe):
        made = dataclasses.replace(recipe, mesh=Mesh(tp=2), micro_batches=1)
        with record_impls() as plain:
            expected = run_step(made).events
        with record_impls() as ran, kernels.shapes.shapes_only():
            assert run_step(made).events == expected
        assert plain
        assert not ran

    def test_with_values_they_do(self):
        x = torch.ones(2, 3)
        with record_impls() as ran, kernels.shapes.shapes_only():
            y = kernels.situ.situ_glu(x, x)
        assert sum(ran.values()) == 1
        assert torch.equal(y, kernels.situ.situ_glu(x, x))
