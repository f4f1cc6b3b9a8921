"""Training on prepared images and text: from files to steps, on one device and on meshes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from k31fn import config, data, metrics, sample, trainer, tree
from k31fn.data.media import PLACEHOLDER
from k31fn.data.prepare import Config, prepare
from k31fn.layers import projector, vision, vision_block
from k31fn.parallel import Mesh, each_rank
from k31fn.trainer.forecast.collective_volume import volumes
from tests.trainer import meshes, runs
from tests.trainer.forecast.test_collective_volume import calls_and_bytes, of_threads
from tests.trainer.test_meshes import check, named

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Forty documents: none, one or two images of one to three colours beside each other, and their
    names.
    """
    from tests.data.pictures import file, pil  # skips without Pillow

    folder = tmp_path_factory.mktemp("images")
    colours, rows = ("red", "green", "blue"), []
    for i in range(40):
        names, text = [], f"{i} " * (1 + i % 3)
        for j in range(i % 3):
            shown = [colours[(i + j + k) % 3] for k in range(1 + (i + j) % 3)]
            image = pil.new("RGB", (28 * len(shown), 28))
            for k, colour in enumerate(shown):
                image.paste(colour, (28 * k, 0, 28 * k + 28, 28))
            names.append(f"{i}-{j}.png")
            (folder / names[-1]).write_bytes(file(image, "PNG"))
            text += PLACEHOLDER + " ".join(shown)
        rows.append({"text": text, "images": names})
    (folder / "all.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    prepare(
        Config(str(folder / "all.jsonl"), "bytes+media", images="images", heldout_fraction=0.2),
        folder / "out",
    )
    return folder / "out"


@pytest.fixture(scope="module")
def recipe(store):
    base = meshes.recipe("unused", compute="float64")
    tower = vision.Config(vision_block.Config(8, 2, 4, 12), 2, table_size=(2, 3))
    onto = projector.Config(tower.output_size, base.model.hidden_size)
    cfg = dataclasses.replace(base.model, vocab_size=264, vision=tower, projector=onto)
    folders = data.Prepared(
        (str(store / "train"),), (str(store / "heldout"),), patches=48, tokenizer="bytes+media"
    )
    return dataclasses.replace(
        base,
        model=cfg,
        data=folders,
        length=96,
        steps=4,
        eval_every=2,
        eval_bytes=20,
        heldout_bytes=10**6,
    )


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(cp=2),
        *(pytest.param(m, marks=pytest.mark.slow) for m in (Mesh(fsdp=2), Mesh(tp=2), Mesh(pp=2))),
    ],
    ids=named,
)
def test_three_steps(recipe, mesh):
    """Losses, norms, parameters and optimiser state are those of one device; the tower among
    them.
    """
    check(recipe, mesh, 3, meshes.on_one_device(recipe, 3))


@pytest.mark.slow
def test_inspect_counts_the_tower(recipe):
    """What a step with images sends, by running it on meta tensors: as many calls and bytes as a
    real rank.
    """
    made = dataclasses.replace(recipe, mesh=Mesh(cp=2), compute="float32", remat="layer")
    (said,), (real,) = volumes(made), of_threads(made)
    calls, nbytes = calls_and_bytes(real)
    assert calls == {k: n for k, n in said.calls.items() if n}
    assert nbytes == {k: n for k, n in said.nbytes.items() if n}
    text = dataclasses.replace(made, data=data.Config(tokenizer="bytes+media"))
    assert sum(volumes(text)[0].calls.values()) < sum(calls.values())


def test_the_tower_learns(recipe):
    before = trainer.init_state(trainer.lay_out(recipe), meshes.CPU).params
    _, state = meshes.on_one_device(recipe, 2)
    assert not torch.equal(state.params.vision.patch, before.vision.patch)
    assert not torch.equal(state.params.vision.blocks[1].w_v, before.vision.blocks[1].w_v)
    assert not torch.equal(state.params.projector.w_out, before.projector.w_out)


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2), *(pytest.param(Mesh(pp=2), marks=pytest.mark.slow),)], ids=named
)
def test_the_heldout_loss_on_a_mesh(recipe, mesh):
    """Rows that the ranks cannot share evenly are filled up with empty ones, which have no
    images.
    """
    scored = trainer.load_corpus(recipe).all
    assert not (scored.rows.labels >= 256).any()
    assert scored.num_bytes == int((scored.rows.labels >= 0).sum())
    assert int((scored.rows.images.slots >= 0).sum()) > 5
    scored = dataclasses.replace(scored, rows=tree.map(lambda x: x[:3], scored.rows))
    one = trainer.heldout_loss(
        trainer.lay_out(recipe), trainer.init_state(trainer.lay_out(recipe), meshes.CPU), scored
    )
    made = dataclasses.replace(recipe, mesh=mesh)

    def on_rank(axes):
        return trainer.heldout_loss(
            trainer.lay_out(made, axes),
            trainer.init_state(trainer.lay_out(made, axes), meshes.CPU),
            scored,
        )

    assert each_rank(on_rank, mesh, lambda _: ()) == pytest.approx([one] * 2, rel=1e-12)


@pytest.mark.slow
def test_a_run_from_the_command_line(recipe, tmp_path, capsys):
    made = dataclasses.replace(recipe, compute="float32")
    path = runs.write_config(tmp_path / "vision.py", made)
    arguments = ["--device", "cpu", "--threads", "1", "--runs", str(tmp_path / "runs")]
    assert trainer.main([path, *arguments]) == 0
    out = capsys.readouterr().out
    run = runs.only_run(tmp_path / "runs")
    records = metrics.read(run / "metrics.jsonl")
    assert sum("train/loss" in r for r in records) == 4
    assert re.search(r"step 3: |held-out loss \d\.\d{4} nats per byte on \d+ bytes\n", out)
    assert "4-gram" not in out
    assert config.load_recipe(run / "config.json") == made
    assert trainer.main([str(run / "config.json"), *arguments]) == 0
    assert "all steps are done" in capsys.readouterr().out
    again, weights, _ = sample.load(run, where=torch.device("cpu"))
    assert again == made
    assert weights.vision.patch.shape == (588, 8)


def test_what_does_not_fit(recipe, store):
    cfg = recipe.data
    with pytest.raises(ValueError, match=r"data\.patches=48: the model has no vision"):
        dataclasses.replace(
            recipe, model=dataclasses.replace(recipe.model, vision=(), projector=())
        )
    with pytest.raises(
        ValueError,
        match=r"mesh\.cp=8 x mesh\.tp=1 x 2 x 2 patches=4 = 32 does not divide data\.patches=48",
    ):
        dataclasses.replace(recipe, mesh=Mesh(cp=8))
    with pytest.raises(
        ValueError, match=r"mesh\.tp=4 does not divide .*vision\.block\.num_heads=2"
    ):
        dataclasses.replace(recipe, mesh=Mesh(tp=4))
    small = dataclasses.replace(recipe.model.vision, patch_size=10)
    with pytest.raises(ValueError, match=r"patches of 588 bytes, model\.vision takes 300"):
        trainer.load_corpus(
            dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vision=small))
        )
    with pytest.raises(ValueError, match=r"prepared with another tokenizer.*'bytes\+media'"):
        trainer.load_corpus(
            dataclasses.replace(recipe, data=dataclasses.replace(cfg, tokenizer="bytes"))
        )
    with pytest.raises(ValueError, match=r"has an image of .* data\.patches=4"):
        trainer.load_corpus(dataclasses.replace(recipe, data=dataclasses.replace(cfg, patches=4)))
    with pytest.raises(ValueError, match=r"data\.heldout=\(\) names no store"):
        dataclasses.replace(cfg, heldout=())
    with pytest.raises(ValueError, match="2 shares for 1 stores"):
        dataclasses.replace(cfg, weights=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"no index\.json"):
        trainer.load_corpus(
            dataclasses.replace(recipe, data=dataclasses.replace(cfg, train=(str(store),)))
        )
