"""What is damaged in a store is found when it is opened or first read, and named."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k31fn.data import ByteTokenizer, Prepared, checked_array, media, open_prepared, open_store
from k31fn.data.__main__ import main
from k31fn.data.prepare import Config, prepare
from k31fn.data.verify import verify
from tests.data.pictures import png

TOKENIZER = ByteTokenizer(media=True)


def make(root: Path, count: int) -> Path:
    """A store of documents of a thousand bytes, and three images."""
    (root / "a.png").write_bytes(png(56, 28))
    place = media.PLACEHOLDER
    rows: list[dict[str, Any]] = [{"text": f"{i:03} " + "x" * 996} for i in range(count)]
    rows[5] |= {"text": f"see {place} and {place}.", "images": ["a.png", "a.png"]}
    rows[9] |= {"text": f"see {place}.", "images": "a.png"}
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config(str(root / "a.jsonl"), "bytes+media", images="images", heldout_fraction=0.0)
    prepare(cfg, root / "out")
    return root / "out"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {count: make(tmp_path_factory.mktemp("store"), count) for count in (12, 800)}


@pytest.fixture
def store(originals: dict[int, Path], tmp_path: Path) -> Path:
    """A copy of twelve documents; the shard is ``out/shard-000000/train``."""
    shutil.copytree(originals[12], tmp_path / "out")
    return tmp_path / "out" / "train"


@pytest.fixture
def large(originals: dict[int, Path], tmp_path: Path) -> Path:
    """A copy of 800 documents, whose tokens are two blocks."""
    shutil.copytree(originals[800], tmp_path / "out")
    return tmp_path / "out" / "train"


def shard_of(store: Path) -> Path:
    return store.parent / "shard-000000" / "train"


def as_of_earlier_versions(store: Path) -> None:
    """Without checksums."""
    index = json.loads((store / "index.json").read_text())
    for entry in index["shards"]:
        entry.pop("checksums")
    index.pop("tokenizer")
    (store / "index.json").write_text(json.dumps(index))
    (shard_of(store) / "checksums.json").unlink()


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def put(file: Path, place: Any, value: int) -> None:
    values = np.load(file)
    values[place] = value
    np.save(file, values)


def train(store: Path, steps: int = 300) -> int:
    """Reads rows as a run does; gives the number of steps before one that fails."""
    cfg = Prepared((str(store),), (str(store),), patches=32, tokenizer="bytes+media")
    rows = open_prepared(cfg, TOKENIZER, length=1024, batch_size=4)
    for step in range(steps):
        try:
            rows.batch_at(step)
        except ValueError:
            return step
    return steps


# ------------------------------------------------------------------------------------- flipped bits
@pytest.mark.parametrize("name", ["tokens", "offsets", "images", "grids", "spans", "patches"])
def test_a_flipped_bit_is_never_given_away(store: Path, name: str):
    file = shard_of(store) / f"{name}.npy"
    opened = open_store(store)
    whole = [opened.read(i) for i in range(opened.num_documents)]
    size = file.stat().st_size
    flip(file, size - 3)
    assert size == file.stat().st_size
    opened = open_store(store)
    said = []
    for i, before in enumerate(whole):
        try:
            opened.images_of(i)
            after = opened.read(i)
        except ValueError as e:
            said.append(str(e))
            continue
        for a, b in zip(before[:3:2], after[:3:2], strict=True):
            assert np.array_equal(a, b), i
        assert before.grids == after.grids
        assert all(map(np.array_equal, before.patches, after.patches))
    assert said
    place = (
        rf"shard-000000/train/{name}\.npy is damaged, bytes [\d,]+ to [\d,]+ of its array: its ch"
    )
    assert all(re.search(place, line) for line in said)
    # And all of it by one command.
    found = verify(store.parent)
    assert len(found.problems) == 1
    assert re.search(place, found.problems[0])


def test_a_run_stops_before_the_step_that_would_use_it(large: Path):
    """The first block is whole: documents in it are read until one of the other block is met."""
    file = shard_of(large) / "tokens.npy"
    assert train(large, 20) == 20
    flip(file, file.stat().st_size - 4, bit=1)  # "x" becomes "z"
    steps = train(large)
    assert steps < 20
    as_of_earlier_versions(large)  # and without the check it would have been learnt
    assert train(large, 20) == 20


def test_a_block_is_looked_at_once(large: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def crc(data: Any) -> int:
        seen.append(len(data))
        return zlib.crc32(data)

    opened = open_store(large)
    assert not seen
    monkeypatch.setattr(checked_array, "zlib", type("zlib", (), {"crc32": staticmethod(crc)}))
    shard = opened.shards[0]
    total = 2 * len(shard["tokens"])
    assert total > checked_array.BLOCK
    _ = shard["tokens"][10:20]
    assert seen == [checked_array.BLOCK]
    _ = shard["tokens"][15:1000]
    _ = shard["tokens"][10:10]
    assert seen == [checked_array.BLOCK]
    _ = shard["tokens"][checked_array.BLOCK // 2 - 1 : checked_array.BLOCK // 2 + 1]
    assert seen == [checked_array.BLOCK, total - checked_array.BLOCK]
    for i in range(800):
        opened.read(i)
    assert sum(seen[:2]) == total
    assert len(seen) == 2 + 6  # and one block of each other array


def test_a_checksum_that_is_damaged_itself(store: Path):
    flip(shard_of(store) / "checksums.json", 20)
    with pytest.raises(
        ValueError, match=r"checksums\.json is damaged: its checksum is not that of"
    ):
        open_store(store).read(0)
    (shard_of(store) / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"cannot read '.*checksums\.json': No such file"):
        open_store(store).read(0)


# ------------------------------------------------------------------------ without checksums: rules
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("name", "place", "value", "rule"),
    [
        ("tokens", 500, 300, "token 300 is past the vocabulary of 261"),
        ("tokens", -1, 65_535, "token 65535 is past the vocabulary of 261"),
        ("offsets", 3, 10**9, "do not ascend from 0 to 1"),
        ("offsets", -1, 10**15, "do not ascend from 0 to 1"),
        ("offsets", 0, -5, "do not ascend from 0 to 1"),
        ("offsets", 0, 1, "documents go from 1 to 1"),
        ("images", 6, 99, "do not ascend from 0 to 3, the grids"),
        ("patch_offsets", 1, 3, "have places .* and \\[3, 13\\] patches"),
        ("patch_offsets", 1, -3, "do not ascend from 0 to 24, the patches"),
        ("grids", (0, 1), 0, "a value is below 1"),
        ("grids", (0, 1), 40, "sizes \\[\\[1, 40, 4\\]"),
        ("spans", (0, 0), -1, "a value is below 0"),
        ("spans", (1, 0), 2, "the images of its document 5 have places"),
        ("spans", (1, 1), 10**6, "the images of its document 5 have places"),
    ],
)
@pytest.mark.timeout(30)
def test_values_that_cannot_be_right(
    store: Path, earlier: bool, name: str, place: Any, value: int, rule: str
):
    """Also of a store that somebody wrote, with checksums that fit."""
    file = shard_of(store) / f"{name}.npy"
    if name == "tokens":
        # In place: NumPy would write another header.
        values = np.load(file, mmap_mode="r+")
        values[place] = value
        values.flush()
    else:
        put(file, place, value)
    if earlier:
        as_of_earlier_versions(store)
    else:
        known = json.loads((shard_of(store) / "checksums.json").read_text())
        known[name] = checked_array.sums(np.load(file))
        text = json.dumps(known).encode()
        (shard_of(store) / "checksums.json").write_bytes(text)
        index = json.loads((store / "index.json").read_text())
        index["shards"][0]["checksums"] = zlib.crc32(text)
        (store / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"shard-000000/train.* is damaged.*{rule}"):
        train_all(store)
    assert any(re.search(rule, line) for line in verify(store).problems)


def train_all(store: Path) -> None:
    cfg = Prepared((str(store),), (str(store),), patches=32, tokenizer="bytes+media")
    rows = open_prepared(cfg, TOKENIZER, length=1024, batch_size=1)
    for step in range(rows.num_rows):
        rows.batch_at(step)


def test_a_store_of_an_earlier_version_is_read_and_called_unchecked(
    store: Path, capsys: pytest.CaptureFixture[str]
):
    expected = [open_store(store).read(i).tokens.tolist() for i in (0, 5, 11)]
    assert open_store(store).unchecked == 0
    as_of_earlier_versions(store)
    opened = open_store(store)
    assert opened.unchecked == 1
    assert [opened.read(i).tokens.tolist() for i in (0, 5, 11)] == expected
    assert train(store, 5) == 5
    assert main(["verify", str(store)]) == 0
    assert "1 shards of an earlier version have no checksums: unchecked" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ opening
Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda i: i["shards"][0].update(name="../../b/train"),
            r"shard '\.\./\.\./b/train' is outsi",
        ),
        (lambda i: i["shards"][0].update(name="/etc"), "shard '/etc' is outside"),
        (lambda i: i["shards"][0].update(name="../link/train"), "shard '../link/train' is outside"),
        (lambda i: i["shards"][0].update(name=7), r"shards\[0\] must be an object with a name"),
        (lambda i: i["shards"][0].update(name="../absent"), "is missing or damaged: cannot read"),
        (
            lambda i: i["shards"][0].update(documents=-1),
            r"shards\[0\]\.documents=-1 must be a whole",
        ),
        (lambda i: i["shards"][0].update(tokens=2.5), r"shards\[0\]\.tokens=2\.5 must be a whole"),
        (
            lambda i: i["shards"][0].pop("images"),
            r"shards\[0\]\.images=None must be a whole number",
        ),
        (lambda i: i["shards"][0].update(checksums="a"), r"checksums='a' must be a whole number"),
        (lambda i: i.update(shards={}), r"shards='\{\}' must be a list"),
        (lambda i: i.update(vocab_size="261"), "vocab_size='261' must be a whole number from 1"),
        (lambda i: i.update(end_token=261), "end_token=261 must be a whole number from 0 to 260"),
        (lambda i: i.update(media_token=-2), "media_token=-2 must be a whole number from -1"),
        (lambda i: i.update(patch_width=True), "patch_width=True must be a whole number from 1"),
        (
            lambda i: i.update(patch_width=589),
            r"patches\.npy holds uint8 of shape \[24, 588\], not",
        ),
        (lambda i: i.pop("prepared"), "prepared='None' must be a dict"),
        (lambda i: i.update(answers=1), "answers='1' must be a bool"),
    ],
)
def test_an_index_that_is_none(store: Path, tmp_path: Path, change: Change, message: str):
    shutil.copytree(store.parent / "shard-000000", tmp_path / "b")
    (store.parent / "link").symlink_to(tmp_path / "b")
    index = json.loads((store / "index.json").read_text())
    change(index)
    (store / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        open_store(store)


def test_a_store_behind_a_link(store: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").symlink_to(store)
    assert open_store(tmp_path / "other" / "mine").num_documents == 12


def pickled(file: Path) -> None:
    np.save(file, np.array([{}], object), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-2]), r"tokens\.npy has [\d,]+ bytes; its header"),
        (
            lambda f: f.write_bytes(f.read_bytes() + b"xx"),
            r"tokens\.npy has [\d,]+ bytes; its heade",
        ),
        (lambda f: f.write_bytes(b""), r"tokens\.npy is not an array of NumPy"),
        (
            lambda f: f.write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70_000),
            "is not an array of",
        ),
        (
            lambda f: np.save(f, np.zeros(3, "<i8")),
            r"tokens\.npy holds int64 of shape \[3\], not <u2",
        ),
        (lambda f: np.save(f, np.zeros(3, ">u2")), r"tokens\.npy holds >u2 of shape"),
        (lambda f: np.save(f, np.zeros((3, 1), "<u2")), r"holds uint16 of shape \[3, 1\]"),
        (pickled, r"tokens\.npy holds object of shape"),
        (lambda f: (f.unlink(), os.mkfifo(f)), r"tokens\.npy': it is a named pipe"),
        (lambda f: (f.unlink(), f.symlink_to("/dev/zero")), r"tokens\.npy': it is a device"),
        (Path.unlink, r"tokens\.npy': No such file"),
    ],
)
@pytest.mark.timeout(20)
def test_an_array_that_is_none(store: Path, damage: Callable[[Path], Any], message: str):
    damage(shard_of(store) / "tokens.npy")
    with pytest.raises(ValueError, match=rf"shard .*train is missing or damaged: .*{message}"):
        open_store(store)


# ------------------------------------------------------------------------------------------- verify
def test_the_command_says_what_is_damaged(large: Path, capsys: pytest.CaptureFixture[str]):
    out = str(large.parent)
    assert main(["verify", out]) == 0
    assert "bytes, as it was written" in capsys.readouterr().out
    for at in (-3, 200):  # in both blocks
        flip(shard_of(large) / "tokens.npy", at)
    flip(shard_of(large) / "patches.npy", -1)
    assert main(["verify", out]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [re.search(r"(\w+)\.npy is damaged, bytes ([\d,]+)", line)[0] for line in said[:-1]] == [
        "tokens.npy is damaged, bytes 0",
        "tokens.npy is damaged, bytes 1,048,576",
        "patches.npy is damaged, bytes 0",
    ]
    assert said[-1].endswith("bytes, damaged")
    assert main(["verify", str(large.parent.parent)]) == 2
    assert "has no index.json and no store in it" in capsys.readouterr().err
    # After preparing, too: what is there already is kept and looked at.
    source = json.loads((large.parent / "plan.json").read_text())["config"]["source"]
    call = ["prepare", source, out, "--tokenizer", "bytes+media", "--images", "images"]
    assert main([*call, "--heldout", "0", "--verify"]) == 1
    assert "tokens.npy is damaged" in capsys.readouterr().out
