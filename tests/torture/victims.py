"""Runs to be harmed, beside the run that nothing disturbs: every state of theirs must be one of its
states, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from k31fn import config
from k31fn.checkpoint import Checkpointer
from k31fn.parallel import Mesh
from tests.trainer import meshes, runs

LONGEST_S = 300.0  # that any process may take to end, on a busy machine


def recipe(text: Path, ranks: int) -> config.Recipe:
    """Steps of some tenth of a second, evaluations and checkpoints between them."""
    base = runs.recipe(text) if ranks == 1 else meshes.recipe(text, mesh=Mesh(fsdp=ranks))
    steps = 45 if ranks == 1 else 30
    return dataclasses.replace(
        base, name="victim", steps=steps, eval_every=25, checkpoint_every=3, keep=3
    )


class Straight:
    """A run without harm that keeps the state after every step."""

    def __init__(self, folder: Path, text: Path, ranks: int) -> None:
        self.recipe = recipe(text, ranks)
        every = dataclasses.replace(self.recipe, checkpoint_every=1, keep=1000)
        path = runs.write_config(folder / "straight.py", every)
        started = Started(path, folder / "straight", ranks)
        started.read_to_its_end()
        assert started.ends() == [0] * len(started.processes), started.said()
        self.run = runs.only_run(folder / "straight", "victim")
        self.records = _by_step(self.run)


class Victim:
    """A run in its folder, which is started again and again."""

    def __init__(self, folder: Path, straight: Straight, ranks: int, *, numbers: int) -> None:
        self.straight = straight
        self.ranks = ranks
        self.disk = folder  # where a file system of its own is mounted, if one is
        self.root = folder / f"victim-{ranks}-{numbers}"
        self.root.mkdir()
        self.config = runs.write_config(folder / f"victim{ranks}.py", straight.recipe)
        self.newest = 0
        self.tidied = False  # records were lost with the disk or the folder
        self.ended_well = False  # with status 0, and so with everything saved

    def start(self, launcher: str = "", **options: Any) -> Started:
        """It goes on, or begins."""
        return Started(self.config, self.root, self.ranks, launcher=launcher, **options)

    @property
    def run(self) -> Path:
        """Its folder."""
        return runs.only_run(self.root, "victim")

    def check(self) -> int:
        """The newest complete step, which is intact, no older than before, and of which each bit is
        right.
        """
        if not (self.root / "victim").exists():
            return 0  # it did not come so far
        run = self.run
        assert (run / "config.json").is_file(), f"a folder without config.json: {run}"
        if (run / "checkpoints").is_dir():
            with Checkpointer(run / "checkpoints") as checkpoints:  # waits for writers that live
                newest = checkpoints.latest(on_damage=pytest.fail) or 0
            assert newest >= self.newest, f"step {self.newest} was there, now {newest}"
            if newest:
                same = runs.saved(run, newest) == runs.saved(self.straight.run, newest)
                assert same, f"another state after {newest} steps"
            self.newest = newest
        records = _by_step(run)
        for step, record in records.items():
            assert record == self.straight.records[step], f"another record of step {step}"
        if not self.tidied:
            assert list(records) == list(range(len(records))), f"records of steps {list(records)}"
            assert len(records) >= self.newest
            if self.ended_well:
                assert len(records) == self.newest, "a step that was made is not saved"
        return self.newest

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return self.newest == self.straight.recipe.steps


def _by_step(run: Path) -> dict[int, dict[str, Any]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return {}
    found: dict[int, dict[str, Any]] = {}
    for record in runs.records(run):
        if "train/loss" in record:
            assert record["step"] not in found, f"step {record['step']} is there twice"
            found[record["step"]] = record
    return found


class Started:
    """``train.py`` in one process or more; output is read as it comes."""

    def __init__(
        self, config: str, root: Path, ranks: int, *, launcher: str = "", timeout: float = 60.0
    ) -> None:
        self._root = str(root).encode()
        arguments = ["train.py", config, "--runs", str(root), "--resume", "auto"]
        arguments += ["--device", "cpu", "--timeout", str(timeout)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        several: list[dict[str, str]] = [{}]
        command = [sys.executable]
        if launcher == "torchrun":
            command += ["-m", "torch.distributed.run", "--rdzv-backend=c10d"]
            command += ["--rdzv-endpoint=127.0.0.1:0", f"--nproc_per_node={ranks}"]
        elif ranks > 1:
            several = list(_variables(ranks))
        self.processes = [
            subprocess.Popen(
                [*command, *arguments],
                cwd=runs.REPOSITORY,
                env={**environment, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for variables in several
        ]
        self.main = self.processes[0]
        self._lines: list[str] = []
        self._steps: queue.Queue[bool] = queue.Queue()
        self._stop_reading = threading.Event()
        self._readers: list[threading.Thread] = []
        for process in self.processes:
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                self._read(stream, counts=stream is self.main.stdout)

    def _read(self, stream: IO[str], *, counts: bool) -> None:
        def go() -> None:
            with contextlib.suppress(ValueError):  # it was closed here
                for line in stream:
                    self._lines.append(line)
                    if counts and line.startswith(("step ", "run ")):
                        self._steps.put(line.startswith("step "))
                    if counts and self._stop_reading.is_set():
                        stream.close()
                        return
            if counts:
                self._steps.put(False)

        reader = threading.Thread(target=go, daemon=True)
        reader.start()
        self._readers.append(reader)

    def waits_for_steps(self, number: int) -> bool:
        """Whether so many steps were told of before the run's end."""
        seen = 0
        while seen < number:
            try:
                seen += self._steps.get(timeout=1.0)
            except queue.Empty:
                if all(p.poll() is not None for p in self.processes):
                    return False
            if self.main.poll() is not None and self._steps.empty():
                return False
        return True

    def waits_for_its_folder(self) -> bool:
        """Whether it said which it is before the run's end."""
        while self.main.poll() is None:
            if any(line.startswith("run ") for line in self._lines):
                return True
            time.sleep(0.02)
        return False

    def closes_output(self) -> None:
        """The reader leaves after the next line."""
        self._stop_reading.set()

    def read_to_its_end(self) -> None:
        self.ends(600.0)

    def ends(self, within: float = LONGEST_S) -> list[int]:
        """The statuses; raises if a process does not end in time."""
        deadline = time.monotonic() + within
        for process in self.processes:
            process.wait(max(0.1, deadline - time.monotonic()))
        self._close_streams()
        return [process.returncode for process in self.processes]

    def said(self) -> str:
        return "".join(self._lines)

    def send(self, pid: int, number: int) -> bool:
        """Whether there was such a process of this run: numbers are used again by others."""
        try:
            is_own = self._root in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_own:
                os.kill(pid, number)
        except (OSError, ProcessLookupError):
            return False
        return is_own

    def _running(self) -> set[int]:
        return {p.pid for p in self.processes if p.poll() is None}

    def writers(self) -> list[int]:
        """Processes that write checkpoints for it."""
        found = []
        for pid in _descendants(self._running()):
            with contextlib.suppress(OSError):
                if b"checkpoint import writer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def trainers(self) -> list[int]:
        """Its ranks, without a launcher."""
        found = []
        mine = self._running()
        for pid in sorted(mine | _descendants(mine)):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"train.py" in words and b"torch.distributed.run" not in words:
                    found.append(pid)
        return found

    def clears_up(self, *others: int) -> None:
        """Ends whatever is left of it."""
        for pid in (*others, *self.trainers()):
            self.send(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait(LONGEST_S)
        self._close_streams()

    def _close_streams(self) -> None:
        for reader in self._readers:
            reader.join(5)
        for process in self.processes:
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _variables(ranks: int) -> Iterator[dict[str, str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for rank in range(ranks):
        yield {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }


def _descendants(roots: set[int]) -> set[int]:
    parent = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                parent[int(entry.name)] = int(stat[1])
    found: set[int] = set()
    grown = True
    while grown:
        more = {pid for pid, of in parent.items() if of in roots | found} - found
        grown = bool(more)
        found |= more
    return found
