"""Norms by part, loads by layer and MFU."""

import dataclasses

import pytest
import torch

from k31fn import device, trainer, tree
from k31fn.config import load
from k31fn.model.flops import flops_per_token
from k31fn.parallel import Mesh
from k31fn.trainer import gradient, part_metrics
from k31fn.trainer.layout import lay_out
from tests import small
from tests.trainer import meshes, runs

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("unchecked")


def one_step(recipe):
    """The numbers by name, the gradients by path and the load, in float64."""
    state, layout = trainer.init_state(trainer.lay_out(recipe), CPU), lay_out(recipe, Mesh().axes())
    batches = trainer.make_batches(recipe, trainer.load_corpus(recipe).dataset.batch_at(0), CPU)
    sums, grads = gradient.make_gradient(layout)(state, batches)
    grads = tree.map(torch.clone, grads)
    _, numbers = trainer.make_step(trainer.lay_out(recipe))(state, batches, 0.01)
    names = part_metrics.label(recipe, 0, CPU).names
    return dict(zip(names, numbers.detail.tolist(), strict=True)), grads, sums.load, numbers


def test_the_norms_of_parts_and_the_loads_of_layers(text):
    found, grads, load, numbers = one_step(runs.recipe(text, compute="float64"))
    by_part = {
        "kda": "layers.0.attn.",
        "full_attention": "layers.1.attn.attn.",
        "indexer": "layers.1.attn.indexer.",
        "embedding": "embedding",
        "head": "head",
        "dense_mlp": "layers.0.ffn.",
        "router": "layers.1.ffn.router",
    }
    for name, start in by_part.items():
        own = torch.cat(
            [g.flatten() for path, g in tree.flatten_with_paths(grads) if path.startswith(start)]
        )
        assert found[f"grad_norm/{name}"] == pytest.approx(float(own.norm()), rel=1e-12), name
    total = sum(value**2 for name, value in found.items() if name.startswith("grad_norm/")) ** 0.5
    assert total == pytest.approx(float(numbers.grad_norm), rel=1e-12)
    assert {name for name in found if name.startswith("moe")} == {"moe/load/1"}
    assert found["moe/load/1"] == float(load[0].max() / load[0].double().mean())
    assert found["moe/load/1"] == float(numbers.load_max_over_mean)


def test_only_what_is_trained_has_a_norm(text):
    found, _, _, _ = one_step(runs.recipe(text, trainable="indexer"))
    assert [name for name in found if name.startswith("grad")] == ["grad_norm/indexer"]


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2), pytest.param(Mesh(pp=2), marks=pytest.mark.slow)], ids=str
)
def test_equal_on_a_mesh(text, mesh):
    """Also that of a rank whose stage has no such part."""
    made = meshes.recipe(text, compute="float64", mesh=mesh, micro_batches=2)
    expected, _ = meshes.on_one_device(made, 1)
    numbers, _, _ = meshes.on_threads(made, 1)
    assert len(expected[0]) == len(trainer.Metrics._fields) - 1 + len(
        part_metrics.label(made, 0, CPU).names
    )
    for rank in numbers:
        torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------------------------------- FLOPs
def test_flops_of_the_full_model():
    """Twice the published 104.2B and 104.4B active parameters, of which 0.02% are in no matrix, and
    attention.
    """
    k3, k31 = (load(runs.REPOSITORY / "configs" / f"{name}.py") for name in ("k3", "k31_pro"))
    heads, kda, keys = 96 * (128 + 64 + 128), 69 * 6 * 96 * 128**2, (4096 + 1) / 2
    for cfg, active, attention in (
        (k3, 104.19e9, 24 * 2 * heads * keys),
        (
            k31,
            104.37e9,
            24 * 2 * (heads * (2048 * 2049 / 2 + 2048 * 2048) / 4096 + 32 * 128 * keys),
        ),
    ):
        forward = flops_per_token(cfg, 4096, "nothing")
        assert forward - attention - kda == pytest.approx(2 * active, rel=3e-4)


def test_what_is_not_trained_costs_less(text):
    cfg = runs.recipe(text).model
    nothing, index, adapters, everything = (
        flops_per_token(cfg, 24, kind) for kind in ("nothing", "indexer", "adapters", "all")
    )
    assert nothing < index < adapters < everything
    assert everything == pytest.approx(3 * nothing)
    warm = small.replace(
        cfg,
        full_attention=dataclasses.replace(cfg.sublayers["full_attention"], stage="dense_warmup"),
    )
    heads = 2 * 2 * (4 + 2 + 4)  # of 2 heads, per key
    keys = 12.5 - (1 + 2 + 3 + 21 * 4) / 24  # of 24 visible ones, 4 at most are attended to
    assert flops_per_token(warm, 24, "nothing") - nothing == pytest.approx(heads * keys)


def test_mfu_is_known_where_a_peak_was_measured(text, monkeypatch):
    recipe = runs.recipe(text)
    assert part_metrics.label(recipe, 0, CPU).utilisation == 0
    monkeypatch.setattr(device, "peak_rates", lambda where: device.PeakRates(1e12, 1e12))
    two = dataclasses.replace(recipe, mesh=Mesh(fsdp=2))
    assert part_metrics.label(two, 0, CPU).utilisation == pytest.approx(
        flops_per_token(recipe.model, 24, "all") / 2e12
    )
