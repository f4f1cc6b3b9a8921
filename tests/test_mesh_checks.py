"""Meshes that do not fit a recipe are refused, with the nearest values that do."""

import dataclasses

import pytest

from k31fn import config, model, tree
from k31fn.config import mesh_checks
from k31fn.config.mesh_checks import check_mesh, check_split, split_share
from k31fn.parallel import AxisRules, Mesh
from tests import small

MODEL = small.config(vocab_size=24)
SIZES = {"batch_size": 8, "micro_batches": 2, "length": 24}


def refused(mesh, cfg=MODEL, **changes):
    with pytest.raises(ValueError, match=r"mesh\.") as found:
        check_mesh(mesh, cfg, **{**SIZES, **changes})
    return str(found.value)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        Mesh(tp=2),
        Mesh(dp=2, fsdp=2),
        Mesh(cp=4),
        Mesh(pp=4),
        Mesh(pp=2, fsdp=2, tp=2, cp=2),
    ],
    ids=str,
)
def test_what_fits(mesh):
    check_mesh(mesh, MODEL, **SIZES)


def test_heads_widths_and_vocabulary():
    assert refused(Mesh(tp=3)) == (
        "mesh.tp=3 does not divide model.kda.num_heads=2, model.full_attention.attn.num_heads=2, "
        "model.moe.shared_size=10; nearest: 2"
    )
    assert (
        refused(Mesh(tp=2), small.config())
        == "mesh.tp=2 does not divide model.vocab_size=19; nearest: 1"
    )
    dense = small.replace(
        MODEL, dense=dataclasses.replace(MODEL.sublayers["dense"], intermediate_size=23)
    )
    assert "model.dense.intermediate_size=23" in refused(Mesh(tp=2), dense)


def test_experts():
    assert (
        refused(Mesh(fsdp=2, ep=2))
        == "mesh.ep=2 does not divide model.moe.num_experts=5; nearest: 1, 5"
    )
    moe = dataclasses.replace(MODEL.sublayers["moe"], num_experts=4, expert_size=5)
    assert refused(Mesh(tp=2), small.replace(MODEL, moe=moe)) == (
        "mesh.tp without the ranks of mesh.ep=2 does not divide model.moe.expert_size=5; nearest: "
        "1, 5"
    )
    check_mesh(
        Mesh(tp=2, ep=2), small.replace(MODEL, moe=moe), **SIZES
    )  # the experts take all of tp


def test_rows():
    assert refused(Mesh(dp=2, fsdp=3)) == (
        "mesh.dp=2 x mesh.fsdp=3 x micro_batches=2 = 12 does not divide batch_size=8; nearest: "
        "mesh.fsdp 2 or "
        "batch_size 12"
    )
    assert "batch_size 8, 12" in refused(Mesh(dp=2), batch_size=10)


def test_tokens():
    assert (
        refused(Mesh(cp=5)) == "mesh.cp=5 x mesh.tp=1 = 5 does not divide length=24; nearest: "
        "mesh.cp 4, 6, 8 or length 20, 25"
    )
    assert refused(Mesh(cp=12)) == (
        "mesh.cp=12 leaves a rank 2 of length=24 tokens, fewer than the 3 that a convolution of "
        "model.kda.conv_width=4 "
        "looks back; nearest: 8"
    )


def test_stages():
    assert refused(Mesh(pp=5)).endswith(
        "stages are more than model.num_layers=4: a stage has a layer at least; nearest: mesh.pp 4"
    )
    assert refused(Mesh(pp=2), num_chunks=3).endswith("nearest: mesh.pp 1")
    assert refused(Mesh(pp=2), micro_batches=1, num_chunks=2) == (
        "mesh.pp=2 = 2 does not divide micro_batches=1; nearest: mesh.pp 1 or micro_batches 2"
    )
    assert "set mesh.pp=1 or mtp=()" in refused(Mesh(pp=2), small.replace(MODEL, num_mtp_layers=1))


class TestSplit:
    """An ``fsdp`` that splits less than half of the parameters."""

    @pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 24])
    def test_share(self, n):
        specs = tree.leaves(model.specs(MODEL))
        split = sum(s.numel for s in specs if any(size % n == 0 for size in s.shape))
        assert split_share(Mesh(fsdp=n), MODEL) == split / sum(s.numel for s in specs)
        assert split_share(Mesh(dp=n), MODEL) == 1

    def test_experts_that_ep_splits(self):
        """Five over the inner ranks of fsdp; two outer ones split what each has, five cannot."""
        leaves = tree.flatten_with_paths(model.specs(MODEL))
        split = sum(
            s.numel
            for name, s in leaves
            if ".experts." in name or any(size % 10 == 0 for size in s.shape)
        )
        assert split_share(Mesh(fsdp=10, ep=5), MODEL) == split / sum(s.numel for _, s in leaves)
        assert split_share(Mesh(fsdp=25, ep=5), MODEL) == 0

    def test_refused(self):
        with pytest.raises(
            ValueError, match=r"^mesh\.fsdp=3 splits 4\d\.\d% of .*; nearest: mesh\.fsdp 2, 4$"
        ):
            check_split(Mesh(fsdp=3), MODEL)
        with pytest.raises(
            ValueError,
            match=r"^mesh\.fsdp=2 x mesh\.cp=9 = 18 splits 0\.0%.*; nearest: mesh\.fsdp 1$",
        ):
            check_split(Mesh(fsdp=2, cp=9), MODEL)
        moe = dataclasses.replace(MODEL.sublayers["moe"], num_experts=4)
        with pytest.raises(
            ValueError, match=r"^mesh\.fsdp=12 splits .*; nearest: mesh\.fsdp 8, 16$"
        ):
            check_split(
                Mesh(fsdp=12, ep=4), small.replace(MODEL, moe=moe)
            )  # of those that ep divides
        for mesh in (Mesh(cp=9), Mesh(fsdp=2), Mesh(fsdp=16)):
            check_split(mesh, MODEL)


def test_a_recipe_is_checked():
    with pytest.raises(ValueError, match=r"mesh\.tp=3 does not divide model\.kda\.num_heads=2"):
        config.Recipe("x", MODEL, batch_size=8, length=24, mesh=Mesh(tp=3))
    with pytest.raises(
        ValueError, match=r"pipeline\.num_chunks=1: schedule 'interleaved' has 2 or more stages"
    ):
        config.Pipeline("interleaved")


def test_a_weight_that_tp_cannot_divide_is_named():
    """A registered kind may declare one, of which the sizes of its config say nothing."""
    specs = model.specs(MODEL)
    wide = dataclasses.replace(tree.leaves(specs)[0], shape=(16, 15), axes=("hidden", "heads"))
    weights = {"layers.0.mixer.w_x": (wide, 1)}
    with pytest.raises(ValueError, match=r"^layers\.0\.mixer\.w_x: P\(None, 'tp'\): tp = 2 ranks"):
        mesh_checks._share(Mesh(tp=2), weights)

    @dataclasses.dataclass(frozen=True)
    class Coloured(AxisRules):
        colour: tuple[str, ...] = ()

    # declared for rules of its own, and split by others
    unknown = dataclasses.replace(wide, axes=("hidden", "colour"))
    with pytest.raises(ValueError, match=r"w_x: logical axis 'colour' unknown .*, conv$"):
        mesh_checks._share(Mesh(tp=2), {"layers.0.mixer.w_x": (unknown, 1)})
    # the path of the first weight of each declaration, each weight counted once
    distinct = mesh_checks._distinct_weights(MODEL)
    assert set(distinct) <= set(tree.paths(specs))
    assert sum(count for _, count in distinct.values()) == len(tree.leaves(specs))


def test_it_is_plain_data():
    recipe = config.Recipe(
        "x",
        MODEL,
        batch_size=8,
        length=24,
        mesh=Mesh(fsdp=2, tp=2),
        pipeline=config.Pipeline("zero_bubble"),
    )
    data = config.to_dict(recipe)
    assert data["mesh"] == {"pp": 1, "dp": 1, "fsdp": 2, "cp": 1, "tp": 2, "ep": 1}
    assert config.from_dict(config.Recipe, data) == recipe
    del data["mesh"], data["pipeline"]  # a run from before there were meshes
    assert config.from_dict(config.Recipe, data).mesh == Mesh()
