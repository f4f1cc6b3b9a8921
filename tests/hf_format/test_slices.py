"""Checkpoints read and written in slices: by ranks of meshes, in shards, quantised, with vision."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31fn import balance, config, hf, model, params, random, tree
from k31fn.hf_format.leaves import read_leaves, write_folder
from k31fn.hf_format.rank_part import ALONE, RankPart, part_of
from k31fn.hf_format.table import VISION, Weights, _entries_of
from k31fn.layers import projector, vision, vision_block
from k31fn.parallel import AxisRules, Mesh, each_rank, partition
from k31fn.parallel.partition import tiles

CONFIGS = Path(__file__).parents[2] / "configs"
CFG: model.Config = config.load(CONFIGS / "tiny.py")
SPECS = model.specs(CFG)
MESHES = [
    Mesh(tp=2),
    Mesh(fsdp=2, ep=2),
    *(
        pytest.param(mesh, marks=pytest.mark.slow)
        for mesh in (Mesh(fsdp=2), Mesh(dp=2, tp=2, ep=2))
    ),
]


def values() -> tuple[Any, balance.State]:
    """Random weights, the norms and decays too, in bfloat16 with float32 islands."""
    drawn = params.init(SPECS, random.key(1))
    moved = tree.map(lambda w: w + torch.randn_like(w), drawn)
    bias = random.normal(random.key(2), (3, CFG.sublayers["moe"].num_experts))
    return moved, balance.State(bias, model.moe_layers(CFG))


WEIGHTS, STATE = values()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "whole"
    hf.export(WEIGHTS, STATE, CFG, path)
    return path


def same(a: Any, b: Any) -> None:
    tree.map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), a, b)


def locals_of(mesh: Mesh, coordinate: dict[str, int]) -> Any:
    """What a rank holds: the tile of each leaf."""
    tile = tiles(SPECS, partition(SPECS, AxisRules(), mesh), mesh, coordinate)
    pairs = zip(tree.flatten_with_paths(SPECS), tree.leaves(WEIGHTS), strict=True)
    return tree.unflatten(
        tree.flatten(SPECS)[1], [w[tile(path, spec)].clone() for (path, spec), w in pairs]
    )


def part(mesh: Mesh, axes: Any, coordinate: dict[str, int]) -> RankPart:
    return part_of(SPECS, partition(SPECS, AxisRules(), mesh), mesh, axes, coordinate)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_read_and_write_their_own_slices(folder: Path, tmp_path: Path, mesh: Mesh):
    """Each gets its tiles; together they write, byte for byte, what one process writes."""

    def both(axes: Any, coordinate: dict[str, int]) -> Any:
        mine = part(mesh, axes, coordinate)
        weights, state = hf.load(folder, CFG, part=mine)
        hf.export(weights, state, CFG, tmp_path / "together", part=mine)
        return weights, state

    for coordinate, (weights, state) in zip(
        mesh.coordinates(), each_rank(both, mesh, lambda c: (c,)), strict=True
    ):
        same(weights, locals_of(mesh, coordinate))
        same(state, STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["together"]
    for file in folder.iterdir():
        assert (tmp_path / "together" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_rank_that_fails_leaves_nothing_and_tells_the_others(tmp_path: Path):
    mesh, heard = Mesh(fsdp=2), []

    def export(axes: Any, coordinate: dict[str, int]) -> None:
        weights = locals_of(mesh, coordinate)
        if coordinate["fsdp"] == 1:
            weights = dataclasses.replace(weights, head=weights.head[:1])
        try:
            hf.export(weights, STATE, CFG, tmp_path / "together", part=part(mesh, axes, coordinate))
        except (ValueError, RuntimeError) as e:
            heard.append((coordinate["fsdp"], type(e), str(e)))

    each_rank(export, mesh, lambda c: (c,))
    (_, kind, text), (_, other_kind, other) = sorted(heard)
    assert kind is RuntimeError
    assert "1 of 2 ranks failed; rank 1: ValueError: params.head has shape" in text
    assert other_kind is ValueError
    assert "params.head has shape [1," in other
    assert not list(tmp_path.iterdir())


def test_only_the_bytes_of_the_slices_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Two ranks together read each byte of a weight that is split once."""
    import k31fn.hf_format.leaves as module

    counted: Counter[int] = Counter()
    real = module.open_source

    class Opened:
        def __init__(self, directory: Path, rank: int):
            self.context, self.rank = real(directory), rank

        def __enter__(self) -> Any:
            source = self.context.__enter__()

            def read(name: str, tile: Any) -> torch.Tensor:
                found = source.read(name, tile)
                counted[self.rank] += found.nbytes
                return found

            return source._replace(read=read)

        def __exit__(self, *error: Any) -> Any:
            return self.context.__exit__(*error)

    mesh = Mesh(fsdp=2)
    for rank, coordinate in enumerate(mesh.coordinates()):
        monkeypatch.setattr(module, "open_source", lambda d, r=rank: Opened(d, r))
        alone = dataclasses.replace(
            ALONE, tile=tiles(SPECS, partition(SPECS, AxisRules(), mesh), mesh, coordinate)
        )
        hf.load(folder, CFG, part=alone)
    whole = sum(w.nbytes for w in tree.leaves(WEIGHTS))
    assert (
        max(counted.values()) < 0.52 * whole
    )  # a half, and the few that no dimension of divides evenly


# ------------------------------------------------------------------------------------------- shards
def test_shards_with_an_index(folder: Path, tmp_path: Path):
    hf.export(WEIGHTS, STATE, CFG, tmp_path / "shards", shard_bytes=300_000)
    files = sorted(p.name for p in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for file in (tmp_path / "shards").glob("*.safetensors"):
        assert file.stat().st_size < 320_000 or len(load_file(file)) == 1
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    one = load_file(folder / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    assert index["weight_map"].keys() == one.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "shards" / file)[name], one[name])
    weights, state = hf.load(tmp_path / "shards", CFG)
    same(weights, WEIGHTS)
    same(state, STATE)


# ---------------------------------------------------------------------------------------- quantised
def test_quantised_experts(tmp_path: Path):
    """What comes back is the nearest that MXFP4 has; a second trip changes no bit of weights or of
    files.
    """
    hf.export(WEIGHTS, STATE, CFG, tmp_path / "first", quantise=True)
    again, state = hf.load(tmp_path / "first", CFG)
    stored = load_file(tmp_path / "first" / "model.safetensors")
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight"
    assert stored[name + "_packed"].shape == (64, 48)
    assert stored[name + "_scale"].shape == (64, 3)
    assert stored[name + "_packed"].dtype == stored[name + "_scale"].dtype == torch.uint8
    assert name not in stored
    for path, before in tree.flatten_with_paths(WEIGHTS):
        after = dict(tree.flatten_with_paths(again))[path]
        assert after.dtype == before.dtype
        if ".experts." in path:
            assert (
                0 < (after.float() - before.float()).norm() / before.float().norm() < 0.2
            )  # 1 bit of mantissa
        else:
            assert torch.equal(after, before), path
    same(state, STATE)
    text = json.loads((tmp_path / "first" / "config.json").read_text())["text_config"][
        "quantization_config"
    ]
    target = text["config_groups"]["group_0"]["targets"][0].removeprefix("re:")
    for key in stored:
        assert bool(re.fullmatch(target, key.removesuffix(".weight_packed"))) == key.endswith(
            "_packed"
        )
    hf.export(again, state, CFG, tmp_path / "second", quantise=True)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_ranks_quantise_what_one_process_does(tmp_path: Path):
    hf.export(WEIGHTS, STATE, CFG, tmp_path / "one", quantise=True)
    mesh = Mesh(fsdp=2, ep=2)

    def export(axes: Any, coordinate: dict[str, int]) -> Any:
        mine = part(mesh, axes, coordinate)
        hf.export(
            locals_of(mesh, coordinate), STATE, CFG, tmp_path / "two", quantise=True, part=mine
        )
        return hf.load(tmp_path / "two", CFG, part=mine)[0]

    each_rank(export, mesh, lambda c: (c,))
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_columns_that_split_a_group(tmp_path: Path):
    """The inner width of 96 over two ranks: w2 has 48 columns each, one and a half groups.

    Read, but not written.
    """
    hf.export(WEIGHTS, STATE, CFG, tmp_path / "one", quantise=True)
    whole, _ = hf.load(tmp_path / "one", CFG)

    def half(path: str, spec: Any) -> tuple[slice, ...]:
        inner = path.endswith("experts.w_down")
        return tuple(
            slice(48, 96) if inner and i == 1 else slice(0, n) for i, n in enumerate(spec.shape)
        )

    mine = dataclasses.replace(ALONE, tile=half)
    weights, _ = hf.load(tmp_path / "one", CFG, part=mine)
    assert torch.equal(
        weights.layers[1].ffn.experts.w_down, whole.layers[1].ffn.experts.w_down[:, 48:]
    )
    with pytest.raises(
        ValueError, match=r"w_down: columns 48 to 96 of 96 are no whole groups of 32"
    ):
        hf.export(weights, STATE, CFG, tmp_path / "two", quantise=True, part=mine)
    assert not (tmp_path / "two").exists()


def test_bad_scales_and_weights_that_are_not_finite(tmp_path: Path):
    hf.export(WEIGHTS, STATE, CFG, tmp_path / "q", quantise=True)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_scale"
    stored[name][3, 1] = 255
    save_file(stored, tmp_path / "q" / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.5\.w2\.weight: MXFP4: 1 of 192 scales are 255"):
        hf.load(tmp_path / "q", CFG)
    broken = tree.map(torch.clone, WEIGHTS)
    broken.head[3, 5] = math.nan
    broken.layers[1].ffn.experts.w_up[2, 0, 0] = math.inf
    hf.export(broken, STATE, CFG, tmp_path / "nan")
    with pytest.raises(ValueError, match="2 with weights that are not finite") as caught:
        hf.load(tmp_path / "nan", CFG)
    assert "lm_head.weight" in str(caught.value)
    assert "layers.1.block_sparse_moe.experts.2.w3.weight" in str(caught.value)


# ------------------------------------------------------------------------------------------- vision
def with_vision(hidden: int, layers: int, tower: vision_block.Config, text: int) -> Weights:
    cfg = vision.Config(tower, layers)
    parts = {
        "vision": vision.specs(cfg),
        "projector": projector.specs(projector.Config(cfg.output_size, text)),
    }
    assert tower.hidden_size == hidden
    return Weights(parts, ())


def test_the_released_names_and_shapes_of_vision():
    """From the published checkpoint."""
    k3 = with_vision(1024, 27, vision_block.Config(1024, 12, 128, 4096), 7168)
    found: dict[str, Counter[Any]] = {}
    for entry in _entries_of(k3, ()):
        for name in entry.names:
            found.setdefault(re.sub(r"\.\d+\.(?!weight)", ".N.", name), Counter())[
                entry.stored_shape
            ] += 1
    block = "vision_tower.encoder.blocks.N."
    expected = {
        "vision_tower.patch_embed.proj.weight": ((1024, 3, 14, 14), 1),
        "vision_tower.patch_embed.pos_emb.weight": ((64, 64, 1024), 1),
        block + "norm0.weight": ((1024,), 27),
        block + "norm1.weight": ((1024,), 27),
        block + "wqkv.weight": ((4608, 1024), 3 * 27),  # three leaves
        block + "wo.weight": ((1024, 1536), 27),
        block + "mlp.fc0.weight": ((4096, 1024), 27),
        block + "mlp.fc1.weight": ((1024, 4096), 27),
        "vision_tower.encoder.final_layernorm.weight": ((1024,), 1),
        "mm_projector.proj.0.weight": ((4096, 4096), 1),
        "mm_projector.proj.2.weight": ((7168, 4096), 1),
        "mm_projector.post_norm.weight": ((7168,), 1),
    }
    assert found == {name: Counter({shape: count}) for name, (shape, count) in expected.items()}
    assert all(name.startswith(VISION) for name in found)


SMALL = with_vision(8, 2, vision_block.Config(8, 2, 4, 12), 6)


def test_vision_weights_lie_where_they_belong(tmp_path: Path):
    declared = SMALL
    drawn = params.init(declared.params, random.key(3))
    drawn = tree.map(lambda w: w + torch.randn_like(w), drawn)
    table = _entries_of(declared, ())
    write_folder(table, tree.leaves(drawn), tmp_path / "v", {})
    stored = load_file(tmp_path / "v" / "model.safetensors")
    tower, block = drawn["vision"], drawn["vision"].blocks[1]
    prefix = "vision_tower.encoder.blocks.1."
    assert torch.equal(
        stored[prefix + "wqkv.weight"], torch.cat([block.w_q.T, block.w_k.T, block.w_v.T])
    )
    assert torch.equal(stored[prefix + "wo.weight"], block.w_o.T)
    assert torch.equal(stored[prefix + "mlp.fc0.weight"], block.w_in.T)
    assert torch.equal(stored[prefix + "mlp.fc1.weight"], block.w_out.T)
    assert torch.equal(stored[prefix + "norm0.weight"], block.attn_norm)
    assert torch.equal(stored[prefix + "norm1.weight"], block.mlp_norm)
    assert torch.equal(stored["vision_tower.patch_embed.pos_emb.weight"], tower.table)
    kernel = stored["vision_tower.patch_embed.proj.weight"]
    pixels = torch.randn(1, 3, 14, 14)
    folded = torch.nn.functional.conv2d(pixels, kernel.float(), stride=14).flatten()
    torch.testing.assert_close(folded, pixels.flatten() @ tower.patch.float())
    assert torch.equal(stored["mm_projector.proj.2.weight"], drawn["projector"].w_out.T)
    for a, b in zip(read_leaves(table, tmp_path / "v"), tree.leaves(drawn), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(tp=2), Mesh(fsdp=2, tp=2)], ids=str)
def test_ranks_read_and_write_vision_in_slices(tmp_path: Path, mesh: Mesh):
    declared, specs = SMALL, SMALL.params
    drawn = tree.map(lambda w: w + torch.randn_like(w), params.init(specs, random.key(3)))
    table, split = _entries_of(declared, ()), partition(specs, AxisRules(), mesh)
    write_folder(table, tree.leaves(drawn), tmp_path / "one", {})

    def both(axes: Any, coordinate: dict[str, int]) -> list[torch.Tensor]:
        mine = part_of(specs, split, mesh, axes, coordinate)
        leaves = read_leaves(table, tmp_path / "one", part=mine)
        write_folder(table, leaves, tmp_path / "two", {}, part=mine)
        return leaves

    for coordinate, leaves in zip(
        mesh.coordinates(), each_rank(both, mesh, lambda c: (c,)), strict=True
    ):
        tile = tiles(specs, split, mesh, coordinate)
        for (path, spec), leaf, whole in zip(
            tree.flatten_with_paths(specs), leaves, tree.leaves(drawn), strict=True
        ):
            assert torch.equal(leaf, whole[tile(path, spec)]), path
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
