"""``train.py`` in several processes, with a harm that one of them does to itself."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from k31fn import config
from tests.trainer import runs

_HARM = """
import ctypes, os, signal, time
from pathlib import Path
from k31fn import config, data
from k31fn.checkpoint.background_saver import BackgroundSaver


def train():
    harms = [h.split(":") for h in os.environ.get("HARM", "none:0:0").split(",")]
    mine = [(w, step) for w, rank, step in harms if w != "none" and os.environ.get("RANK") == rank]
    for what, step in mine:
        if what.startswith("save-"):
            in_save(what, int(step))
            continue
        read = data.Dataset.batch_at

        def batch_at(self, number, **share):
            if number == int(step):
                harm(what)
            return read(self, number, **share)

        data.Dataset.batch_at = batch_at
    return config.load_recipe(Path(__file__).with_suffix(".json"))


def in_save(what, step):
    copy = BackgroundSaver._copy

    def killed(self, number, *args):
        if number == step and what == "save-before":
            harm("SIGKILL")
        place = copy(self, number, *args)
        if number == step:
            self._session.begin("write", step=step, header=place)
            harm("SIGKILL")
        return place

    BackgroundSaver._copy = killed


def harm(what):
    if what == "hang":
        time.sleep(1000)
    while what == "block":  # in C, as in a device's collective
        ctypes.CDLL(None).sleep(1000)
    if what == "fail":
        raise MemoryError("no memory left")
    os.kill(os.getpid(), getattr(signal, what))
"""


def write_config(path: Path, made: config.Recipe) -> str:
    """A config of the recipe in which ``HARM=SIGKILL:1:4`` kills rank 1 as it reads the rows of
    step 4.

    ``save-before:1:6`` kills it in the save after 6 steps, before its copy is made, ``save-after``
    afterwards.
    """
    runs.write_config(path, made)
    path.write_text(_HARM)
    return str(path)


@contextlib.contextmanager
def processes(
    size: int, *args: str, harm: str = "none:0:0"
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks, as torchrun would start them on one machine, without it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "HARM": harm,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", *args, "--device", "cpu"],
            cwd=runs.REPOSITORY,
            env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def ends(ranks: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str, str]]:
    """Each rank's exit status, standard output and standard error; raises if one does not end in
    time.
    """
    deadline, found = time.monotonic() + timeout, []
    for rank in ranks:
        out, err = rank.communicate(timeout=max(0.0, deadline - time.monotonic()))
        found.append((rank.returncode, out, err))
    return found


def torchrun(size: int, *args: str, harm: str = "none:0:0") -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc_per_node=SIZE train.py ...``, to its end."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    return subprocess.run(
        [*command, f"--nproc_per_node={size}", "train.py", *args, "--device", "cpu"],
        cwd=runs.REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HARM": harm},
        capture_output=True,
        text=True,
        timeout=110,
    )
