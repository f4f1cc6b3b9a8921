"""Saved on one mesh and restored on another, bit by bit; every rank is a thread, without a process
for its writer.
"""

import contextlib
import importlib.util
import itertools
import os

import numpy as np
import pytest
import torch

from k31fn import tree
from k31fn.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    Holders,
    StateLayout,
    checkpointer,
    lock,
    step_folders,
    stored_blocks,
    writer_process,
)
from k31fn.checkpoint.boxes import Box, cut
from k31fn.parallel import Mesh, P, each_rank
from k31fn.parallel.partition import tile
from tests.checkpoint.direct import Direct

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="no orbax-checkpoint")


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setattr(checkpointer, "WriterSession", Direct)


@pytest.fixture
def small_blocks(monkeypatch):
    """Of 400 bytes: larger tensors have several, cut along different dimensions; and files of few
    blocks.
    """
    monkeypatch.setattr(step_folders, "BLOCK_BYTES", 400)
    monkeypatch.setattr("k31fn.checkpoint.orbax_arrays._FILE_BYTES", 2000)


def state():
    """Every kind of leaf: scalars, odd dtypes, a negative zero and a NaN, one of each stage, one
    that is empty.
    """
    w = torch.arange(768, dtype=torch.float32).reshape(8, 96)
    w[0, 0], w[3, 3] = -0.0, float("nan")
    return {
        "step": torch.tensor(7),
        "w": w,
        "narrow": (torch.arange(64) / 3).to(torch.bfloat16).reshape(4, 16),
        "experts": torch.arange(4 * 8 * 6, dtype=torch.float64).reshape(4, 8, 6).transpose(1, 2),
        "first": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "last": torch.arange(10, 34).reshape(4, 6),
        "none": torch.zeros(0, 5),
        "key": torch.tensor([2**62 + 1, -1]),
    }


HELD = {
    "w": Holders(P(("tp", "fsdp"), "cp")),
    "narrow": Holders(P(None, "fsdp")),
    "experts": Holders(P("ep", None, "efsdp")),
    "first": Holders(P(), stages=(0,)),
    "last": Holders(P("tp"), stages=(1,)),
}


def layout(mesh):
    """Without pipeline stages, all ranks hold what a stage would."""
    held = HELD if mesh.pp > 1 else {name: Holders(h.spec) for name, h in HELD.items()}
    return StateLayout(tree.map(lambda x: x.to("meta"), state()), held, mesh)


def local(mesh, coordinate):
    """What a rank holds: an independent cut of the whole."""
    mine = {}
    for name, x in state().items():
        h = layout(mesh).holders.get(name, Holders())
        if not h.stages or coordinate["pp"] in h.stages:
            mine[name] = x[tile(h.spec, x.shape, mesh, coordinate)]
    return mine


def bits(x):
    return tree.map(
        lambda t: (str(t.dtype), t.contiguous().flatten().view(torch.uint8).tolist()), x
    )


def save(folder, mesh, step=1, **how):
    def go(axes, coordinate):
        with Checkpointer(folder, axes=axes, **how) as ckpt:
            ckpt.prepare(local(mesh, coordinate), layout(mesh))
            ckpt.save(step, local(mesh, coordinate), {"at": step}, layout=layout(mesh))

    each_rank(go, mesh, lambda c: (c,))


def restored(folder, mesh, step=1, on_damage=pytest.fail):
    """What each rank reads, and what it should have read."""

    def go(axes, coordinate):
        like = tree.map(lambda x: x.to("meta"), local(mesh, coordinate))
        with Checkpointer(folder, axes=axes, read_only=True) as ckpt:
            assert ckpt.latest(on_damage=on_damage) == step
            got = ckpt.restore(step, like, layout=layout(mesh))
        return got, local(mesh, coordinate)

    return each_rank(go, mesh, lambda c: (c,))


MESHES = [
    Mesh(),
    Mesh(fsdp=2, tp=2),
    Mesh(fsdp=2, ep=2),
    Mesh(pp=2),
    Mesh(pp=2, tp=2),
    Mesh(dp=2, cp=2),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("saved", [Mesh(fsdp=4), Mesh(), Mesh(pp=2, fsdp=2)], ids=str)
def test_from_any_mesh_to_any_mesh(tmp_path, saved):
    """All leaves bit-equal, dtypes kept; a checkpoint of one rank is read with no word of a
    mesh.
    """
    save(tmp_path, saved)
    assert len(list(tmp_path.glob("1/0/state/ocdbt.process_0/d/*"))) > 2, "several files"
    for mesh in MESHES:
        for got, expected in restored(tmp_path, mesh):
            assert bits(got) == bits(expected), mesh
    with Checkpointer(tmp_path, read_only=True) as ckpt:
        assert bits(ckpt.restore(1, state())) == bits(state())
        assert bits(ckpt.restore(1, {"last": state()["last"]}, partial=True)) == bits(
            {"last": state()["last"]}
        )
        assert ckpt.metadata(1) == {"at": 1}


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=4), Mesh(pp=2, fsdp=2), Mesh(dp=2, tp=2), Mesh(fsdp=2, ep=2)], ids=str
)
def test_each_element_is_written_once_by_a_rank_that_holds_it(mesh):
    """Replicas share the work: of two data-parallel ranks, neither writes all."""
    counts = {name: torch.zeros(x.shape, dtype=torch.int64) for name, x in state().items()}
    writers = set()
    for coordinate, parts in zip(
        mesh.coordinates(),
        each_rank(lambda axes: layout(mesh).parts(axes), mesh, lambda _: ()),
        strict=True,
    ):
        assert {n: tuple(x.shape) for n, x in local(mesh, coordinate).items()} == {
            n: p.box.shape for n, p in parts.items()
        }
        for name, part in parts.items():
            if part.writes:
                counts[name][part.box.inside(Box((0,) * len(part.whole), part.whole))] += 1
                writers.add(tuple(coordinate.values()))
    assert all(bool(c.eq(1).all()) for c in counts.values())
    assert len(writers) == mesh.world_size


def test_a_rank_reads_the_blocks_that_it_wants_and_no_others(tmp_path, monkeypatch):
    """Of a matrix that one rank wrote, a quarter of the rows or of the columns is a quarter of the
    bytes.
    """
    monkeypatch.setattr(step_folders, "BLOCK_BYTES", 4 << 10)
    whole = {"x": torch.arange(128 * 128, dtype=torch.float32).reshape(128, 128)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, whole)
    read = []
    load = stored_blocks.load
    monkeypatch.setattr(
        stored_blocks,
        "load",
        lambda folder, blocks: load(folder, [b for b in blocks if not read.append(b)]),
    )
    for spec in (P("fsdp"), P(None, "fsdp")):
        lay = StateLayout(
            tree.map(lambda x: x.to("meta"), whole), {"x": Holders(spec)}, Mesh(fsdp=4)
        )

        def go(axes, coordinate, lay=lay, spec=spec):
            part = whole["x"][tile(spec, (128, 128), lay.mesh, coordinate)]
            with Checkpointer(tmp_path, axes=axes, read_only=True) as ckpt:
                got = ckpt.restore(1, {"x": part.to("meta")}, layout=lay)
                assert (
                    os.fstat(ckpt._session._buffer.descriptor).st_size < 2 * part.nbytes
                )  # not the whole tensor
            return torch.equal(got["x"], part)

        read.clear()
        assert all(each_rank(go, lay.mesh, lambda c: (c,)))
        assert len(read) == 16
        assert sum(b.box.numel for b in read) == 128 * 128


@contextlib.contextmanager
def flipped(folder, x):
    """A bit of the bytes of a tensor's part is wrong, in whatever file they are."""
    pattern = x.contiguous().view(torch.uint8).numpy().tobytes()
    file = next(f for f in sorted(folder.rglob("*")) if f.is_file() and pattern in f.read_bytes())
    good = file.read_bytes()
    at = good.index(pattern) + len(pattern) // 2
    file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    yield
    if file.exists():  # else its step has been set aside
        file.write_bytes(good)


def test_a_flipped_byte_is_named_whoever_wrote_it(tmp_path):
    """The leaf, the part of it, and the rank; on every rank that restores, also on one that did not
    want it.
    """
    mesh, lines = Mesh(fsdp=2), []
    save(tmp_path, mesh, step=1)
    save(tmp_path, mesh, step=2)
    with (
        flipped(tmp_path / "2", state()["w"][4:]),
        pytest.raises(
            DamagedCheckpointError,
            match=r"rank 1 at \{'fsdp': 1\}: .*2: damaged: 'w' \[4:8, 0:96\], block 'w.0' of 1/st",
        ),
    ):
        restored(tmp_path, mesh, 2, on_damage=None)
    with (
        flipped(tmp_path / "2", state()["w"][:4]),
        pytest.raises(
            DamagedCheckpointError, match=r"damaged: 'w' \[0:4, 0:96\], block 'w.0' of 0/state"
        ),
    ):
        restored(tmp_path, Mesh(), 2, on_damage=None)

    def newest(axes):
        with Checkpointer(tmp_path, axes=axes) as ckpt:
            return ckpt.latest(on_damage=lines.append)

    with flipped(tmp_path / "2", state()["w"][4:]):
        assert each_rank(newest, mesh, lambda _: ()) == [1, 1]
    assert len(lines) == 2  # one of each rank
    assert "'w' [4:8, 0:96]" in lines[0]
    assert "set aside as 2.damaged" in lines[0]


def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path, monkeypatch):
    """Said on every rank, with its place; nothing is left, older steps are there, and the next save
    is made.
    """
    mesh = Mesh(fsdp=2)
    do, full = Direct._do, {"on": False}

    def sometimes_full(self, operation, fields, awaited):
        if operation == "write" and full["on"] and self._setup["rank"] == 1:
            self.answers.append((awaited, writer_process.WriterAnswer("No space left on device")))
        else:
            do(self, operation, fields, awaited)

    monkeypatch.setattr(Direct, "_do", sometimes_full)

    def go(axes, coordinate):
        said = []
        with Checkpointer(tmp_path, axes=axes) as ckpt:
            for step, broken in ((1, False), (2, True), (2, False)):
                full["on"] = broken
                ckpt.save(step, local(mesh, coordinate), layout=layout(mesh))
                try:
                    ckpt.poll()  # as in the loop of training
                except CheckpointError as error:
                    said.append(str(error))
                full["on"] = False
        return said

    for said in each_rank(go, mesh, lambda c: (c,)):
        (line,) = said
        assert (
            "step 2 is not saved: rank 1 at {'fsdp': 1}: No space left on device; complete steps: "
            "[1]" in line
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1", "2"]


def test_parts_that_do_not_make_up_a_tensor_are_not_a_checkpoint(tmp_path, monkeypatch):
    """A part that nobody wrote, or two ranks: the commit fails."""
    for writes, message in ((False, "do not make up"), (True, "do not make up")):
        parts = StateLayout.parts
        monkeypatch.setattr(
            StateLayout,
            "parts",
            lambda self, axes, parts=parts, writes=writes: {
                n: p._replace(writes=writes if n == "key" else p.writes)
                for n, p in parts(self, axes).items()
            },
        )
        with pytest.raises(CheckpointError, match=f"step 1 is not saved: .*{message} 'key'"):
            save(tmp_path, Mesh(fsdp=2))
        monkeypatch.setattr(StateLayout, "parts", parts)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path):
    mesh = Mesh(fsdp=2)
    save(tmp_path, mesh)

    def go(axes, coordinate):
        mine, said = local(mesh, coordinate), []
        with Checkpointer(tmp_path, axes=axes) as ckpt:
            narrow = {**mine, "narrow": mine["narrow"].to(torch.float32)}
            for wrong in ({**mine, "w": mine["w"][1:]}, {**mine, "other": mine["w"]}, narrow):
                with pytest.raises(ValueError, match=r"the layout gives this rank") as error:
                    ckpt.save(2, wrong, layout=layout(mesh))
                said.append(str(error.value))
            with pytest.raises(
                ValueError, match=r"rank 1 at \{'fsdp': 1\}: metadata is not JSON data"
            ):
                ckpt.save(2, mine, {"x": ckpt} if coordinate["fsdp"] else {}, layout=layout(mesh))
            with pytest.raises(ValueError, match="step=1 is complete"):
                ckpt.save(1, mine, layout=layout(mesh))
        return said

    for said in each_rank(go, mesh, lambda c: (c,)):
        assert (
            "'w' is torch.float32 [3, 96], its part of the layout torch.float32 [4, 96]" in said[0]
        )
        assert "gives this rank no 'other'" in said[1]
        assert (
            "'narrow' is torch.float32 [4, 8], its part of the layout torch.bfloat16 [4, 8]"
            in said[2]
        )


def test_without_a_layout_all_ranks_hold_the_same(tmp_path):
    """And share the writing of it."""

    def go(axes):
        with Checkpointer(tmp_path, axes=axes) as ckpt:
            ckpt.save(1, state())
            ckpt.wait()
            return bits(ckpt.restore(1, state()))

    assert each_rank(go, Mesh(dp=2, tp=2), lambda _: ()) == [bits(state())] * 4
    shards = [t["shards"] for t in step_folders.read_manifest(tmp_path, 1)["tensors"].values()]
    assert {s[0]["rank"] for s in shards if s} == {0, 1, 2, 3}


def test_two_runs_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_S", 0.05)
    mesh = Mesh(fsdp=2)
    with Checkpointer(tmp_path), pytest.raises(CheckpointError, match="another process is writing"):
        save(tmp_path, mesh)
    save(tmp_path, mesh)


@pytest.mark.parametrize(
    ("keep", "scores", "stays"),
    [
        (step_folders.Retention(2), {}, [40, 50]),
        (step_folders.Retention(1, every=20), {}, [20, 40, 50]),
        (
            step_folders.Retention(1, best=2),
            {10: 3.0, 20: 1.0, 30: float("nan"), 40: 2.0},
            [20, 40, 50],
        ),
        (
            step_folders.Retention(1, best=1),
            {10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0, 50: 5.0},
            [10, 50],
        ),  # ever worse
        (step_folders.Retention(2, every=30, best=9), {60: 0.0}, [30, 40, 50]),
    ],
)
def test_what_stays(keep, scores, stays):
    assert sorted(step_folders._kept_steps([10, 20, 30, 40, 50], scores, keep)) == stays


def test_retention_with_scores_that_come_after_the_save(tmp_path):
    """As in training: a step's held-out loss is known only once it is saved.

    A worsening one costs no new step.
    """
    scores = {}
    with Checkpointer(tmp_path, keep=1, keep_best=1) as ckpt:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0), (5, 6.0)):
            ckpt.save(step, {"x": torch.tensor(step)}, scores=scores)
            ckpt.wait()
            assert step in ckpt.steps()
            scores[step] = loss
    assert ckpt.steps() == [2, 5]


@pytest.mark.parametrize(
    "box", [Box((), ()), Box((3,), (1,)), Box((0, 5), (7, 33)), Box((1, 2, 3), (5, 1, 40))], ids=str
)
@pytest.mark.parametrize("most", [60, 100, 10_000])
def test_blocks_make_up_a_box(box, most):
    outer = [a + n + 2 for a, n in zip(*box, strict=True)]
    counts = np.zeros(outer, int)
    for piece in cut(box, 4, most):
        assert piece.numel * 4 <= max(most, 4)
        counts[tuple(slice(a, a + n) for a, n in zip(*piece, strict=True))] += 1
    expected = np.zeros(outer, int)
    expected[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] = 1
    assert (counts == expected).all()
    for piece, other in itertools.combinations(cut(box, 4, most), 2):
        assert piece.overlap(other).numel == 0
        assert piece.overlap(box) == piece
