"""What a damaged folder says: verify and load, which read the same headers."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31fn import balance, config, hf, model, params, random
from k31fn.hf import verify
from k31fn.hf.__main__ import main
from k31fn.hf_format.files import _read_header

CFG: model.Config = config.load(Path(__file__).parents[2] / "configs" / "tiny.py")
INDEX = "model.safetensors.index.json"
LAYER = "language_model.model.layers."


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "shards"
    state = balance.init(model.moe_layers(CFG), CFG.sublayers["moe"].num_experts)
    hf.export(
        params.init(model.specs(CFG), random.key(1)),
        state,
        CFG,
        path,
        shard_bytes=700_000,
        quantise=True,
    )
    return path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "copy")
    return tmp_path / "copy"


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def change(folder: Path, name: str, f: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = shard_of(folder, name)
    tensors = load_file(file)
    f(tensors)
    save_file(tensors, file)


def test_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]):
    report = verify(folder)
    count = (
        params.count(model.specs(CFG)) + 3 * CFG.sublayers["moe"].num_experts + 3 * 126
    )  # the balance; A_log's 126 zeros
    assert report == (
        len(list(folder.glob("*.safetensors"))),
        report.num_tensors,
        count,
        3 * 3 * 8,
        "",
    )
    assert main(["verify", str(folder)]) == 0
    assert "fits its config" in capsys.readouterr().out


HEAD, NORM = "language_model.lm_head.weight", "language_model.model.norm.weight"
EXPERT = f"{LAYER}1.block_sparse_moe.experts.3.w1.weight"


def truncated(folder: Path) -> None:
    file = shard_of(folder, HEAD)
    file.write_bytes(file.read_bytes()[:-2])


def cut_in_the_header(folder: Path) -> None:
    file = shard_of(folder, HEAD)
    file.write_bytes(file.read_bytes()[:100])


def garbage(folder: Path) -> None:
    shard_of(folder, HEAD).write_bytes(b"\x10\0\0\0\0\0\0\0" + b"x" * 40)


def header(folder: Path, **fields: object) -> None:
    """Says other things of a tensor; the header keeps its length."""
    file = shard_of(folder, NORM)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:end])
    tensors[NORM] |= fields
    text = json.dumps(tensors, separators=(",", ":")).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def a_shape_below_zero(folder: Path) -> None:
    header(folder, shape=[-8, -16])  # whose product is the right number


def a_shape_with_a_fraction(folder: Path) -> None:
    header(folder, shape=[128.0])


def a_place_that_is_text(folder: Path) -> None:
    header(folder, data_offsets=["0", "256"])


def a_tensor_twice(folder: Path) -> None:
    file = shard_of(folder, NORM)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = data[8:end].rstrip()
    again = text[:-1] + b"," + json.dumps(NORM).encode() + b":{}}"
    file.write_bytes(len(again).to_bytes(8, "little") + again + data[end:])


def missing_shard(folder: Path) -> None:
    shard_of(folder, HEAD).unlink()


def swapped_shards(folder: Path) -> None:
    a, b = sorted(folder.glob("*.safetensors"))[:2]
    data = a.read_bytes(), b.read_bytes()
    a.write_bytes(data[1])
    b.write_bytes(data[0])


def an_index_that_lies(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][HEAD] = next(
        f for f in index["weight_map"].values() if f != index["weight_map"][HEAD]
    )
    (folder / INDEX).write_text(json.dumps(index))


def a_wrong_total(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] -= 2
    (folder / INDEX).write_text(json.dumps(index))


def renamed(folder: Path) -> None:
    def f(tensors: dict[str, torch.Tensor]) -> None:
        tensors["language_model.head.weight"] = tensors.pop(HEAD)

    change(folder, HEAD, f)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace(f'"{HEAD}"', '"language_model.head.weight"'))


def swapped_tensors(folder: Path) -> None:
    """The kind that headers show: two weights of other shapes."""
    gate, down = f"{LAYER}0.mlp.gate_proj.weight", f"{LAYER}0.mlp.down_proj.weight"
    one, other = (load_file(shard_of(folder, name))[name] for name in (gate, down))
    change(folder, gate, lambda tensors: tensors.update({gate: other}))
    change(folder, down, lambda tensors: tensors.update({down: one}))


def wrong_dtype(folder: Path) -> None:
    change(folder, HEAD, lambda t: t.update({HEAD: torch.zeros_like(t[HEAD], dtype=torch.int16)}))


def a_narrow_decay(folder: Path) -> None:
    name = f"{LAYER}0.self_attn.A_log"
    change(folder, name, lambda t: t.update({name: t[name].bfloat16()}))
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] -= 256
    (folder / INDEX).write_text(json.dumps(index))


def no_scale(folder: Path) -> None:
    change(folder, EXPERT + "_scale", lambda t: t.update({"extra": t.pop(EXPERT + "_scale")}))
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace(f'"{EXPERT}_scale"', '"extra"'))


DAMAGES = {
    truncated: "is not a complete safetensors file: its header promises",
    cut_in_the_header: "end inside its header",
    garbage: "its header is not valid",
    a_shape_below_zero: r"norm\.weight' has shape \[-8, -16\] at .* not whole numbers of 0 or more",
    a_shape_with_a_fraction: r"norm\.weight' has shape \[128\.0\] at",
    a_place_that_is_text: "at \\['0', '256'\\], not whole numbers",
    a_tensor_twice: r"language_model\.model\.norm\.weight is given twice",
    missing_shard: r"model-0000\d-of-0000\d\.safetensors does not exist",
    swapped_shards: r"model-00001-of-0000\d\.safetensors does not hold what "
    r"model\.safetensors\.index\.json lists",
    an_index_that_lies: r"lacks \['language_model\.lm_head\.weight.*'\], has \[\] more",
    a_wrong_total: "says total_size=",
    renamed: r"1 missing:\n  language_model\.lm_head\.weight\n"
    r"1 not of this model:\n  language_model\.head\.weight",
    swapped_tensors: r"2 of another shape:\n  .*mlp\.\w+_proj\.weight: \[\d+, \d+\], wanted",
    wrong_dtype: r"1 of another dtype:\n  language_model\.lm_head\.weight: "
    r"I16, wanted BF16/F16/F32/F64",
    a_narrow_decay: r"1 of another dtype:\n  .*0\.self_attn\.A_log: BF16, wanted F32/F64",
    no_scale: r"1 missing:\n  .*experts\.3\.w1\.weight_scale\n1 not of this model:\n  extra",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named(
    folder: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
):
    damage(folder)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        hf.load(folder, CFG)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        raise ValueError(verify(folder).problems)
    assert main(["verify", str(folder)]) == 1
    assert "fits its config" not in capsys.readouterr().out


def test_several_faults_in_one_list(folder: Path):
    files = sorted(folder.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-2])
    (folder / "config.json").write_text("{}")
    problems = verify(folder).problems
    for text in (
        f"{files[0].name} does not exist",
        f"{files[1].name} is not a complete",
        "has no text_config",
    ):
        assert text in problems


def test_headers_that_overlap_or_leave_holes(tmp_path: Path):
    def write(begin: int, end: int, size: int = 8) -> Path:
        header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        header["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
        return tmp_path / "x.safetensors"

    assert list(_read_header(write(4, 8))) == ["a", "b"]
    for begin, end, size in ((2, 6, 6), (6, 10, 10), (4, 12, 12), (4, 6, 6)):
        with pytest.raises(
            ValueError, match="the header gives b and 0 others a wrong place or length"
        ):
            _read_header(write(begin, end, size))
    with pytest.raises(ValueError, match="promises 8 bytes of tensors, it has 9"):
        _read_header(write(4, 8, 9))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "it is a list, not an object"),
        ({"a": 3}, "'a' has dtype None, not one of BOOL, U8"),
        ({"a": {"dtype": ["F32"]}}, r"'a' has dtype \['F32'\], not one of"),
        ({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}, "'a' has shape 3 at"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, r"'a' has .* at \[0\]"),
    ],
)
def test_a_header_that_is_no_header(tmp_path: Path, header: Any, message: str):
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=f"its header is not valid: {message}"):
        _read_header(tmp_path / "x.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_index_of_k31_size(tmp_path: Path):
    """All 96 shards with full headers, as sparse files: verified, and one expert and one row of the
    rest read.
    """
    import dataclasses

    from k31fn import tree
    from k31fn.hf_format.config import describe
    from k31fn.hf_format.file_writer import create, lay_out, write_json
    from k31fn.hf_format.files import DTYPES
    from k31fn.hf_format.leaves import read_leaves
    from k31fn.hf_format.problems import PACKED, SCALE
    from k31fn.hf_format.rank_part import ALONE
    from k31fn.hf_format.table import entries

    cfg = config.load(Path(__file__).parents[2] / "configs" / "k31_pro.py")
    table, tensors = entries(cfg), {}
    for entry in table:
        shape = entry.stored_shape
        for name in entry.names:
            if entry.quantisable:
                tensors[name + PACKED] = (shape[0], shape[1] // 2), torch.uint8
                tensors[name + SCALE] = (shape[0], shape[1] // 32), torch.uint8
            else:
                tensors[name] = shape, torch.float32 if entry.row.wide else torch.bfloat16
    create(tmp_path / "k31", lay_out(tensors, 15_600_000_000))
    described = describe(cfg, torch.bfloat16, quantised=True)
    write_json(tmp_path / "k31" / "config.json", described)
    report = verify(tmp_path / "k31")
    assert report.problems == ""
    assert report.num_files == pytest.approx(96, abs=6)
    assert report.num_weights == params.count(model.specs(cfg)) + 92 * 896 + 69 * 32
    part = dataclasses.replace(ALONE, tile=lambda _, spec: tuple(slice(0, 1) for _ in spec.shape))
    leaves = read_leaves(table, tmp_path / "k31", part=part)
    assert len(leaves) == len(tree.leaves(model.specs(cfg))) + 1
    assert DTYPES["BF16"] in {leaf.dtype for leaf in leaves}


def test_names_give_a_terminal_no_orders(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A tensor whose name would erase the screen."""
    tensors = {"a\x1b[2Jb": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "a\\x1b[2Jb" in said
    assert "\x1b" not in said
