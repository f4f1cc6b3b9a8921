"""A manifest with the right checksum and the wrong content is damage, and names of steps that are
taken.
"""

import copy
import importlib.util
import json
import math
import os

import pytest
import torch

from k31fn.checkpoint import Checkpointer, CheckpointError, checkpointer, step_folders
from k31fn.checkpoint.boxes import Box, cut, num_blocks
from k31fn.checkpoint.manifests import check_content
from tests.checkpoint.direct import Direct

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="no orbax-checkpoint")


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setattr(checkpointer, "WriterSession", Direct)


def state(value):
    return {"w": torch.full((4, 6), float(value)), "step": torch.tensor(value)}


@pytest.fixture
def saved(tmp_path):
    with Checkpointer(tmp_path, keep=9) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), {"text": "a"})
    return tmp_path


def rewrite(folder, step, change):
    """Another manifest, with the checksum of what it says."""
    file = folder / str(step) / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["sha256"]
    change(manifest)
    manifest["sha256"] = step_folders._digest(manifest)
    file.write_bytes(step_folders._dump(manifest))


def shard(manifest):
    return manifest["tensors"]["w"]["shards"][0]


CHANGES = {
    "no tensors": lambda m: m.pop("tensors"),
    "tensors is a list": lambda m: m.update(tensors=[]),
    "a tensor is a number": lambda m: m["tensors"].update(w=3),
    "metadata is text": lambda m: m.update(metadata="a"),
    "no step": lambda m: m.pop("step"),
    "another step": lambda m: m.update(step=1),
    "blocks of 0 bytes": lambda m: m.update(block_bytes=0),
    "blocks of a byte": lambda m: m.update(block_bytes=1),
    "shape has text": lambda m: m["tensors"]["w"].update(shape=["4", 6]),
    "another shape": lambda m: m["tensors"]["w"].update(shape=[4, 7]),
    "a shape of 2**80": lambda m: m["tensors"]["w"].update(shape=[1 << 80, 6]),
    "a shape as long as a book": lambda m: m["tensors"]["w"].update(shape=[1] * 1000),
    "a dtype is a list": lambda m: m["tensors"]["w"].update(dtype=[]),
    "no shards": lambda m: m["tensors"]["w"].update(shards=[]),
    "a shard twice": lambda m: m["tensors"]["w"]["shards"].append(shard(m)),
    "a shard of a folder elsewhere": lambda m: shard(m).update(rank="../../2/0"),
    "a shard outside": lambda m: shard(m).update(start=[1, 0]),
    "a checksum too many": lambda m: shard(m)["sha256"].append("00"),
    "checksums are numbers": lambda m: shard(m).update(sha256=[1]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_wrong_content_counts_as_damage_and_the_older_step_is_taken(saved, what):
    rewrite(saved, 2, CHANGES[what])
    with Checkpointer(saved, read_only=True) as reader:
        for call in (reader.latest, lambda: reader.restore(2, state(0))):
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                call()
    said = []
    with Checkpointer(saved) as ckpt:
        assert ckpt.latest(on_damage=said.append) == 1
        assert torch.equal(ckpt.restore(1, state(0))["w"], state(1)["w"])
    (line,) = said
    assert line.endswith("set aside as 2.damaged")


def test_a_manifest_that_says_what_it_must_is_taken(saved):
    manifest = step_folders.read_manifest(saved, 2)
    check_content(manifest)
    moved = copy.deepcopy(manifest)
    entry = moved["tensors"]["w"]
    top, bottom = ({**entry["shards"][0], "rank": r, "shape": [2, 6]} for r in (0, 1))
    entry["shards"] = [{**top, "start": [0, 0]}, {**bottom, "start": [2, 0]}]
    check_content(moved)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (100, 33), (3, 1, 50)])
def test_blocks_are_counted_as_they_are_cut(shape):
    for most in (1, 8, 100, 4000):
        blocks = list(cut(Box((0,) * len(shape), shape), 4, most))
        assert num_blocks(shape, 4, most) == len(blocks)
        assert sum(block.numel for block in blocks) == math.prod(shape)


class TestNames:
    def test_an_empty_folder_is_no_step(self, saved):
        (saved / "20").mkdir()
        with Checkpointer(saved, keep=9) as ckpt:
            assert ckpt.steps() == [1, 2]
            assert ckpt.latest() == 2
            ckpt.save(20, state(20))
            ckpt.wait()
            assert ckpt.latest(on_damage=pytest.fail) == 20

    def test_a_folder_that_is_no_checkpoint_is_in_the_way(self, saved):
        (saved / "20").mkdir()
        (saved / "20" / "notes.txt").write_text("mine")
        with Checkpointer(saved, keep=9) as ckpt:
            with pytest.raises(ValueError, match=r"step=20: .*/20 is in the way, a folder without"):
                ckpt.save(20, state(20))
            ckpt.save(21, state(21))
        assert (saved / "20" / "notes.txt").read_text() == "mine"

    def test_a_file_of_a_step_s_name_is_no_step(self, saved):
        (saved / "20").write_text("mine")
        with Checkpointer(saved, keep=9) as ckpt:
            ckpt.save(20, state(20))
            with pytest.raises(CheckpointError, match=r"step 20 is not saved: NotADirectoryError"):
                ckpt.wait()
            assert ckpt.steps() == [1, 2]

    def test_a_name_taken_while_a_step_is_written_is_not_told_as_saved(self, saved, monkeypatch):
        commit = step_folders.commit

        def late(directory, step, *args):
            (directory / str(step)).mkdir()
            (directory / str(step) / "x").touch()
            commit(directory, step, *args)

        monkeypatch.setattr(step_folders, "commit", late)
        with Checkpointer(saved, keep=9) as ckpt:
            ckpt.save(20, state(20))
            with pytest.raises(
                CheckpointError, match=r"step 20 is not saved: OSError: .*not empty"
            ):
                ckpt.wait()

    def test_a_step_whose_elders_cannot_be_deleted_is_told_as_saved(self, saved, monkeypatch):
        def fail(*args):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(step_folders, "retire", fail)
        with Checkpointer(saved, keep=9) as ckpt:
            ckpt.save(3, state(3))
            with pytest.raises(
                CheckpointError, match=r"step 3 is saved, but cleaning up .* failed"
            ):
                ckpt.wait()
            assert ckpt.latest(on_damage=pytest.fail) == 3


def test_a_folder_of_checkpoints_that_was_moved_away_comes_not_back(saved):
    with Checkpointer(saved, keep=9) as ckpt:
        ckpt.save(3, state(3))
        ckpt.wait()
        os.rename(saved, saved.parent / "moved")
        ckpt.save(4, state(4))
        with pytest.raises(CheckpointError, match=r"step 4 is not saved: FileNotFoundError"):
            ckpt.wait()
        assert not saved.exists()
    assert step_folders.complete_steps(saved.parent / "moved") == [1, 2, 3]
