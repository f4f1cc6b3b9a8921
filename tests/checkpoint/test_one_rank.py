"""Checkpoints: bit-exact values, and nothing lost or silently wrong when a disk, a bit or a process
fails.
"""

import contextlib
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from k31fn import tree
from k31fn.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, lock

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="no orbax-checkpoint")
REPOSITORY = Path(__file__).parents[2]


@tree.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any


class Moments(NamedTuple):
    mu: Tensor
    nu: Tensor


def make_state(seed: float = 0.0) -> State:
    """Every kind of node and of supported dtype, 0-d, empty, strided, with a gradient, and bits of
    a NaN.
    """
    bits = torch.arange(48, dtype=torch.uint8) + 1
    quiet = torch.tensor([0x7FC00001, 0x7F800002, -1], dtype=torch.int32).view(
        torch.float32
    )  # NaNs with a payload
    dtypes = [f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)]
    dtypes += [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
    ]
    return State(
        step=torch.tensor(7 + int(seed)),
        params={
            "layers": [
                {"w_q": torch.randn(6, 4) + seed, "b/é %": torch.randn(5, requires_grad=True)}
            ],
            "strided": torch.randn(4, 6).t()[1:],
            "nan": quiet,
            "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
            "absent": (),
            **{d: bits.view(getattr(torch, d)) for d in dtypes},
            "bool": torch.tensor([True, False]),
        },
        opt_state=(Moments(torch.randn(3, 2, dtype=torch.float64), torch.tensor(float("-inf"))),),
    )


def abstract(state: Any) -> Any:
    return tree.map(lambda x: torch.empty_like(x, device="meta"), state)


def raw(x: Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(a: Any, b: Any) -> None:
    assert tree.paths(a) == tree.paths(b)
    for (path, x), y in zip(tree.flatten_with_paths(a), tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert raw(x) == raw(y), path


class Shared(NamedTuple):
    """One checkpointer for many tests: its writer takes seconds to start.

    Each test uses steps of its own.
    """

    ckpt: Checkpointer
    steps: "Iterator[int]"

    def saved(self, state: Any, metadata: dict[str, Any] | None = None) -> int:
        step = next(self.steps)
        self.ckpt.save(step, state, metadata)
        self.ckpt.wait()
        return step


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with Checkpointer(tmp_path_factory.mktemp("shared"), keep=1000) as ckpt:
        yield Shared(ckpt, count(1))


def writer_pid(ckpt: Checkpointer) -> int:
    assert ckpt._session.writer is not None
    return ckpt._session.writer.pid


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def no_room(pid: int) -> Iterator[None]:
    """The process can write no file of more than 100 bytes inside the block; an error like that of
    a full disk.
    """
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that its parent has not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def flip_bit(file: Path, pattern: bytes | None = None, offset: int = 0, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[offset if pattern is None else data.index(pattern)] ^= 1 << bit
    file.write_bytes(data)


def file_with(folder: Path, pattern: bytes) -> Path:
    return next(f for f in sorted(folder.rglob("*")) if f.is_file() and pattern in f.read_bytes())


# ------------------------------------------------------------------------------------------- values


def test_state_and_metadata_come_back_bit_for_bit(shared: Shared) -> None:
    state = make_state()
    metadata = {"config": {"name": "tiny", "lr": 5e-3}, "list": [1, None, "é"]}
    step = shared.saved(state, metadata)
    assert step in shared.ckpt.steps()
    assert shared.ckpt.metadata(step) == metadata
    for like in (state, abstract(state)):
        restored = shared.ckpt.restore(step, like)
        assert_same_bits(restored, state)
        assert type(restored.opt_state[0]) is Moments
        assert not restored.params["layers"][0]["b/é %"].requires_grad


def test_save_copies_and_returns_before_anything_is_written(shared: Shared) -> None:
    state = {"x": torch.arange(1000.0), "y": torch.ones(3, dtype=torch.bfloat16)}
    expected = tree.map(torch.clone, state)
    step = shared.saved(state)
    later = next(shared.steps)
    with stopped(writer_pid(shared.ckpt)):
        shared.ckpt.save(later, state)  # would hang here if it waited for the writer
        for x in state.values():
            x.zero_()
        assert shared.ckpt.latest() == step
    shared.ckpt.wait()
    assert shared.ckpt.latest() == later
    assert_same_bits(shared.ckpt.restore(later, state), expected)


def test_the_writer_writes_from_the_shared_memory_and_copies_nothing(shared: Shared) -> None:
    state = {"x": torch.ones(24 << 20)}
    shared.ckpt.prepare(state)
    shared.saved({"x": torch.ones(1)})
    process = Path(f"/proc/{writer_pid(shared.ckpt)}")

    def kilobytes(name: str) -> int:
        return int(
            next(
                s for s in (process / "status").read_text().splitlines() if s.startswith(name)
            ).split()[1]
        )

    (process / "clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS:")
    shared.saved(state)
    assert kilobytes("VmHWM:") - before < 0.5 * state["x"].nbytes / 1024


def test_preparing_waits_for_a_save_under_way(shared: Shared) -> None:
    state = {"x": torch.arange(1000.0)}
    step = next(shared.steps)
    shared.ckpt.save(step, state)
    shared.ckpt.prepare({"y": torch.zeros(7)})  # its header would lie amid the copy
    assert shared.ckpt.latest() == step
    assert_same_bits(shared.ckpt.restore(step, state), state)


def test_the_next_save_waits_for_the_one_before(shared: Shared) -> None:
    steps = [next(shared.steps) for _ in range(3)]
    for step in steps:
        shared.ckpt.save(step, {"x": torch.full((100,), step)})
    shared.ckpt.wait()
    for step in steps:
        assert (
            shared.ckpt.restore(step, {"x": torch.zeros(100, dtype=torch.int64)})["x"]
            .eq(step)
            .all()
        )


def test_all_differences_are_listed_in_one_error(shared: Shared) -> None:
    saved = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1), "d": torch.zeros(1)}
    step = shared.saved(saved)
    like = {
        "a": torch.zeros(3, 2),
        "b": torch.zeros(4).bfloat16(),
        "c": torch.zeros(1),
        "e": torch.zeros(1),
    }
    with pytest.raises(ValueError, match="differs from the state to restore") as error:
        shared.ckpt.restore(step, like)
    text = str(error.value)
    assert "'e' is not in it; 'd' is only in it" in text
    assert "'a' is float32 [2, 3], expected float32 [3, 2]" in text
    assert "'b' is float32 [4], expected bfloat16 [4]" in text
    assert "'c'" not in text


def test_partial_restore_takes_what_it_asks_for(shared: Shared) -> None:
    state = make_state()
    step = shared.saved(state)
    like = {"params": {"layers": abstract(state.params["layers"])}}
    with pytest.raises(ValueError, match=r"'opt_state.* is only in it"):
        shared.ckpt.restore(step, like)
    restored = shared.ckpt.restore(step, like, partial=True)
    assert_same_bits(restored, {"params": {"layers": state.params["layers"]}})
    with pytest.raises(ValueError, match=r"'params\.missing' is not in it"):
        shared.ckpt.restore(step, {"params": {"missing": torch.zeros(1)}}, partial=True)


def test_bad_arguments_are_refused_and_nothing_is_written(shared: Shared) -> None:
    x = torch.zeros(2)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((-1, {"x": x}), "step=-1"),
        ((900, {}), "state has no tensors"),
        ((900, {"x": x, "n": 3}), "'n' is a int"),
        ((900, {"x": None}), "'x' is None"),
        ((900, {"x": x.to(torch.complex64)}), "'x' is torch.complex64"),
        ((900, {"x": x.to("meta")}), "'x' is a meta tensor"),
        ((900, {"a.b": x, "a": {"b": x}}), "two leaves of one path: a.b"),
        ((900, {"x": x}, {"loss": float("nan")}), "metadata is not JSON data"),
        ((900, {"x": x}, {"x": x}), "metadata is not JSON data"),
    ]
    before = sorted(os.listdir(shared.ckpt.directory))
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            shared.ckpt.save(*arguments)
    shared.ckpt.wait()
    assert sorted(os.listdir(shared.ckpt.directory)) == before
    with pytest.raises(ValueError, match="step=900 is not complete"):
        shared.ckpt.restore(900, {"x": x})
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpointer(shared.ckpt.directory, keep=0)
    with pytest.raises(ValueError, match="is a file"):
        Checkpointer(__file__)


def test_a_complete_step_is_not_overwritten(shared: Shared) -> None:
    step = shared.saved({"x": torch.ones(2)})
    with pytest.raises(ValueError, match=f"step={step} is complete"):
        shared.ckpt.save(step, {"x": torch.zeros(2)})
    assert shared.ckpt.restore(step, {"x": torch.zeros(2)})["x"].eq(1).all()


def test_a_second_writer_says_that_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once and before it waits: the first one lets go when it hears of it, or the second is
    refused.
    """
    said: list[str] = []
    monkeypatch.setattr(lock, "_WAIT_S", 0.35)
    held = f"{tmp_path}: another process is writing checkpoints here"
    with (
        Checkpointer(tmp_path, on_wait=said.append),
        pytest.raises(
            CheckpointError, match=rf"^{held}; end that run, or start one in another folder$"
        ),
    ):
        Checkpointer(tmp_path, on_wait=said.append)
    assert said == [f"{held}; waiting for its end, 0 s at most"]
    first = Checkpointer(tmp_path)
    Checkpointer(tmp_path, on_wait=lambda text: first.close()).close()


@pytest.mark.slow
def test_only_one_process_writes_but_others_may_read(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = shared.saved({"x": torch.ones(2)})
    monkeypatch.setattr(lock, "_WAIT_S", 0.05)
    with pytest.raises(CheckpointError, match="another process is writing"):
        Checkpointer(shared.ckpt.directory)
    with Checkpointer(shared.ckpt.directory, read_only=True) as reader:
        assert reader.latest() == step
        assert reader.restore(step, {"x": torch.zeros(2)})["x"].eq(1).all()
        with pytest.raises(ValueError, match="read_only=True"):
            reader.save(step + 1, {"x": torch.zeros(2)})
    with Checkpointer(shared.ckpt.directory / "absent", read_only=True) as reader:
        assert reader.latest() is None
    assert not reader.directory.exists()


# ------------------------------------------------------------------------------------------- damage


def test_a_flipped_bit_is_named_and_an_older_step_is_only_taken_when_asked(shared: Shared) -> None:
    state = {"layers.0.w": torch.randn(500), "other": torch.randn(500)}
    older, damaged = shared.saved(state), shared.saved(state)
    pattern = raw(state["layers.0.w"])
    flip_bit(file_with(shared.ckpt.directory / str(damaged), pattern), pattern)
    with pytest.raises(
        DamagedCheckpointError,
        match=rf"{damaged}: damaged: 'layers.0.w' \[0:500\], block 'layers.0.w.0' of 0/state$",
    ):
        shared.ckpt.restore(damaged, state)
    assert shared.ckpt.latest() == damaged  # never another step in silence
    lines: list[str] = []
    assert shared.ckpt.latest(on_damage=lines.append) == older
    (line,) = lines
    assert "'layers.0.w'" in line
    assert f"set aside as {damaged}.damaged" in line
    assert shared.ckpt.latest() == older
    shared.ckpt.save(damaged, state)  # training gets there again
    shared.ckpt.wait()
    assert_same_bits(shared.ckpt.restore(damaged, state), state)


def test_a_damaged_manifest_is_an_error(shared: Shared) -> None:
    step = shared.saved({"x": torch.ones(2)}, {"loss": 1.25})
    manifest = shared.ckpt.directory / str(step) / "manifest.json"
    for pattern in (b"1.25", b'"step"', b"{"):
        good = manifest.read_bytes()
        flip_bit(manifest, pattern)
        for call in (
            shared.ckpt.latest,
            lambda: shared.ckpt.metadata(step),
            lambda: shared.ckpt.restore(step, {"x": torch.ones(2)}),
        ):
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
                call()
        manifest.write_bytes(good)
    assert shared.ckpt.metadata(step) == {"loss": 1.25}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_flipped_bit_or_cut_file_gives_wrong_values(tmp_path: Path) -> None:
    """Anywhere in any file: an error, or the very values (bits that nothing reads)."""
    state, metadata = (
        {f"w{i}": torch.randn(20, 40) for i in range(8)} | {"step": torch.tensor(7)},
        {"m": [1, 2.5]},
    )
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state, metadata)
    draw = random.Random(0)
    outcomes = {True: 0, False: 0}

    def check(reader: Checkpointer) -> None:
        try:
            restored = reader.restore(1, abstract(state))
            assert reader.metadata(1) == metadata
            assert_same_bits(restored, state)
            outcomes[True] += 1
        except DamagedCheckpointError:
            outcomes[False] += 1

    with Checkpointer(tmp_path, read_only=True) as reader:
        for file in (
            f for f in sorted((tmp_path / "1").rglob("*")) if f.is_file() and f.stat().st_size
        ):
            data = file.read_bytes()
            for offset in {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(12))}:
                flip_bit(file, offset=offset, bit=draw.randrange(8))
                check(reader)
                file.write_bytes(data)
            for part in (data[: len(data) // 2], b""):
                file.write_bytes(part)
                check(reader)
            file.unlink()
            check(reader)
            file.write_bytes(data)
        reader.restore(1, state)
    assert outcomes[False] > 50


# ----------------------------------------------------------------------------------------- failures


def test_a_failed_write_is_reported_once_and_the_step_can_be_saved_again(shared: Shared) -> None:
    state = {"x": torch.randn(1000)}
    step = shared.saved(state)
    failing = next(shared.steps)
    for report in (shared.ckpt.wait, lambda: shared.ckpt.save(failing + 1, state)):
        with no_room(writer_pid(shared.ckpt)):
            shared.ckpt.save(failing, state)
            with pytest.raises(
                CheckpointError, match=f"step {failing} is not saved: .*File too large"
            ):
                report()
        shared.ckpt.wait()  # said once
        assert shared.ckpt.latest() == step
        assert not list(shared.ckpt.directory.glob("*.unfinished"))
    shared.ckpt.save(failing, state)
    shared.ckpt.wait()
    assert_same_bits(shared.ckpt.restore(failing, state), state)


@pytest.mark.slow
def test_leaving_the_block_reports_a_failed_write_and_a_killed_writer(tmp_path: Path) -> None:
    state = {"x": torch.randn(1000)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        with stopped(writer_pid(ckpt)):
            ckpt.save(2, state)
            os.kill(writer_pid(ckpt), signal.SIGKILL)
        with pytest.raises(
            CheckpointError, match="step 2 is not saved: the writer process was killed by SIGKILL"
        ):
            ckpt.wait()
        assert ckpt.latest() == 1
        ckpt.save(2, state)  # a new writer
        ckpt.wait()
        assert_same_bits(ckpt.restore(2, state), state)
        os.kill(writer_pid(ckpt), signal.SIGKILL)  # idle: nothing is lost

    def lose_a_save(error: Exception | None = None) -> None:
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(3, state)
            os.kill(writer_pid(ckpt), signal.SIGKILL)
            if error:
                raise error

    with pytest.raises(CheckpointError, match="step 3 is not saved"):
        lose_a_save()
    with pytest.raises(
        KeyError, match="mine"
    ) as error:  # the first error stays the one that is seen
        lose_a_save(KeyError("mine"))
    assert any("step 3 is not saved" in note for note in error.value.__notes__)
    with Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.latest() == 2


def test_retention_signals_and_what_a_killed_writer_left(tmp_path: Path) -> None:
    for leftover in ("7.a1b2c3d4.unfinished", "1.removed"):
        (tmp_path / leftover / "state").mkdir(parents=True)
    for other in ("7.damaged", "notes", "010"):
        (tmp_path / other).mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    with Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (3, 5, 7):
            ckpt.save(step, {"x": torch.full((2,), step)})
            os.kill(writer_pid(ckpt), signal.SIGINT)  # a terminal's Ctrl-C, a cluster's SIGTERM
            ckpt.wait()
            os.kill(writer_pid(ckpt), signal.SIGTERM)
        assert ckpt.steps() == [5, 7]
        ckpt.save(
            4, {"x": torch.zeros(2)}
        )  # older than what is kept: what was just saved is not what goes
        ckpt.wait()
        assert ckpt.steps() == [4, 5, 7]
        pid = writer_pid(ckpt)
    ckpt.close()  # a second time: nothing
    for call in (
        lambda: ckpt.save(8, {"x": torch.zeros(2)}),
        lambda: ckpt.latest(on_damage=pytest.fail),
    ):
        with pytest.raises(ValueError, match="is closed"):
            call()
    assert not alive(pid)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert sorted(os.listdir(tmp_path)) == [".lock", "010", "4", "5", "7", "7.damaged", "notes"]


TRAINER = """
import json, os, signal, sys
import torch
from k31fn.checkpoint import Checkpointer

state = {"x": torch.arange(float(sys.argv[2]))}
ckpt = Checkpointer(sys.argv[1])
ckpt.save(1, state, {"at": 1})
ckpt.wait()
assert ckpt.restore(1, state)["x"].equal(state["x"])
banned = ("jax", "jaxlib", "orbax", "tensorstore", "pickle5")
jax = sorted(m for m in sys.modules if m.partition(".")[0] in banned)
if sys.argv[3:] == ["stop"]:
    os.kill(ckpt._session.writer.pid, signal.SIGSTOP)
ckpt.save(2, state)
print(json.dumps({"writer": ckpt._session.writer.pid, "jax": jax}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_trainer(directory: Path, size: int, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-c", TRAINER, str(directory), str(size), *options]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert result.returncode == -signal.SIGKILL, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_killed_training_process_leaves_its_last_save_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(os.listdir("/dev/shm"))
    said = run_trainer(tmp_path, 1_000_000, "stop")
    assert said["jax"] == []  # the training process had imported none of it
    monkeypatch.setattr(lock, "_WAIT_S", 0.05)
    try:
        with pytest.raises(CheckpointError, match="another process is writing"):
            Checkpointer(tmp_path)  # its writer, stopped at step 2, holds the lock
    finally:
        os.kill(said["writer"], signal.SIGCONT)
    monkeypatch.undo()
    with Checkpointer(tmp_path) as ckpt:  # waits for the writer, which finishes and exits
        assert until(lambda: not alive(said["writer"]), 1.0)
        assert ckpt.steps() == [1, 2]
        assert ckpt.restore(2, {"x": torch.zeros(1_000_000)})["x"].equal(torch.arange(1e6))
    assert set(os.listdir("/dev/shm")) <= before
    assert sorted(os.listdir(tmp_path)) == [".lock", "1", "2"]


READ_WITH_ORBAX = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
import orbax.checkpoint as ocp

with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    print(np.asarray(reader.restore(sys.argv[1] + "/12/0/state")["a.b.0"]).tobytes().hex())
"""


@pytest.mark.slow
def test_orbax_alone_reads_it_and_does_not_notice_a_flipped_bit(tmp_path: Path) -> None:
    x = torch.randn(500)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(12, {"a": {"b": x}})

    def orbax() -> str:
        command = [sys.executable, "-W", "ignore", "-c", READ_WITH_ORBAX, str(tmp_path)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=100
        ).stdout.strip()

    assert orbax() == raw(x).hex()
    flip_bit(file_with(tmp_path, raw(x)), raw(x))
    assert orbax() != raw(x).hex()  # wrong values and no error: the checksum is ours to make
    with Checkpointer(tmp_path) as ckpt, pytest.raises(DamagedCheckpointError, match=r"'a\.b'"):
        ckpt.restore(12, {"a": {"b": x}})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this machine lets a test mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "k31fn-test", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_or_read_only_disk_is_reported_and_the_newest_step_stays(small_disk: Path) -> None:
    small, large = {"x": torch.randn(1000)}, {"x": torch.randn(2_000_000)}
    with Checkpointer(small_disk) as ckpt:
        ckpt.save(1, small)
        ckpt.save(2, large)
        with pytest.raises(
            CheckpointError, match=r"step 2 is not saved: .*No space left .*complete steps: \[1\]"
        ):
            ckpt.wait()
        ckpt.save(2, small)  # what the failed try took is free again
        ckpt.wait()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"Read-only file system: .*\.lock"):
        Checkpointer(small_disk)
    with Checkpointer(small_disk, read_only=True) as reader:
        assert_same_bits(reader.restore(2, small), small)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["writer", "trainer"])
def test_killed_at_any_moment_the_newest_complete_step_is_there(
    tmp_path: Path, victim: str
) -> None:
    draw = random.Random(0)
    seen = set()
    cut_short = 0
    for attempt in range(14):
        folder = tmp_path / str(attempt)
        state = {f"w{i}": torch.full((200_000,), float(i)) for i in range(20)}
        if victim == "trainer":
            pid = run_trainer(folder, 3_000_000)["writer"]
            time.sleep(10 ** draw.uniform(-2.5, 0.2))  # a save takes 0.05 to 1 s, by machine
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a cluster kills both
            state = {"x": torch.arange(3_000_000.0)}
        else:
            with contextlib.suppress(CheckpointError), Checkpointer(folder) as ckpt:
                ckpt.save(1, state)
                ckpt.wait()
                ckpt.save(2, state)
                time.sleep(10 ** draw.uniform(-2.5, 0.2))  # a save takes 0.05 to 1 s, by machine
                os.kill(writer_pid(ckpt), signal.SIGKILL)
        cut_short += bool(list(folder.glob("2.*.unfinished")))
        with Checkpointer(folder) as ckpt:
            newest = ckpt.latest(on_damage=pytest.fail)
            assert newest in (1, 2)
            seen.add(newest)
            assert_same_bits(ckpt.restore(newest, state), state)
            ckpt.save(3, state)
        assert ckpt.latest() == 3
    assert seen == {1, 2}
    assert cut_short, "all kills came before or after the write: change the delays"
