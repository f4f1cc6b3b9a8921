"""Several ranks with their writers, killed together or one by one.

Ranks are threads here, writers are processes.
"""

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from k31fn.checkpoint import Checkpointer, CheckpointError, Holders, StateLayout
from k31fn.parallel import Mesh, P, each_rank

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="no orbax-checkpoint"),
    pytest.mark.timeout(300),
]
REPOSITORY = Path(__file__).parents[2]
MESH = Mesh(fsdp=2)
SIZE = 2_000_000


def layout(size=SIZE):
    whole = {
        "x": torch.empty(size, device="meta"),
        "step": torch.empty((), dtype=torch.int64, device="meta"),
    }
    return StateLayout(whole, {"x": Holders(P("fsdp"))}, MESH)


def part(step, size=SIZE):
    """Equal on both ranks, so that any mixture of steps shows."""
    return {"x": torch.full((size // 2,), float(step)), "step": torch.tensor(step)}


def whole(step, size=SIZE):
    return {"x": torch.full((size,), float(step)), "step": torch.tensor(step)}


def check(folder, step, size=SIZE):
    with Checkpointer(folder, read_only=True) as ckpt:
        got = ckpt.restore(step, whole(0, size))
    assert all(torch.equal(got[name], x) for name, x in whole(step, size).items())


@pytest.mark.slow
def test_a_killed_writer_fails_the_save_on_all_ranks_and_is_replaced(tmp_path):
    def go(axes, coordinate):
        said, second = [], coordinate["fsdp"] == 1
        with Checkpointer(tmp_path, axes=axes) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, part(step, 1000), layout=layout(1000))
                if step == 2 and second:
                    os.kill(ckpt._session.writer.pid, signal.SIGKILL)
                try:
                    ckpt.wait()
                except CheckpointError as error:
                    said.append(str(error))
            if second:
                os.kill(ckpt._session.writer.pid, signal.SIGKILL)  # idle: nothing is lost
                ckpt._session.writer._process.wait()
            ckpt.save(4, part(4, 1000), layout=layout(1000))
        return said

    for said in each_rank(go, MESH, lambda c: (c,)):
        (line,) = said
        assert (
            "step 2 is not saved: rank 1 at {'fsdp': 1}: the writer process was killed by SIGKILL"
            in line
        )
        assert "complete steps: [1]" in line
    assert sorted(os.listdir(tmp_path)) == [".lock", "3", "4"]
    check(tmp_path, 4, 1000)


TRAINER = """
import json, sys, threading
from k31fn.checkpoint import Checkpointer
from k31fn.parallel import each_rank
from tests.checkpoint.test_processes import MESH, layout, part


def go(axes, coordinate):
    with Checkpointer(sys.argv[1], keep=3, axes=axes) as ckpt:
        step = ckpt.latest(on_damage=print) or 0
        for _ in range(1000):
            step += 1
            ckpt.save(step, part(step), layout=layout())
            if step % 3:
                ckpt.wait()
            else:
                ckpt.poll()
            sys.stdout.write(json.dumps([step, ckpt._session.writer.pid]) + chr(10))
            sys.stdout.flush()


each_rank(go, MESH, lambda c: (c,))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_moment_on_a_mesh_the_newest_complete_step_is_there(tmp_path, seed):
    """Ten kills: of the ranks alone, or of them and some of their writers.

    No step that was complete is lost.
    """
    draw, newest, cut_short = random.Random(seed), 0, 0
    for _ in range(10):
        command = [sys.executable, "-c", TRAINER, str(tmp_path)]
        writers = set()
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                step, pid = json.loads(line)
                writers.add(pid)
                if len(writers) == 2 and step > newest:
                    break
            time.sleep(draw.uniform(0, 0.5))
            process.kill()
            for pid in draw.sample(sorted(writers), draw.choice([0, 1, 2, 2])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        cut_short += bool(list(tmp_path.glob("*.unfinished")))
        with Checkpointer(tmp_path) as ckpt:  # waits for a writer that lives
            found = ckpt.latest(on_damage=pytest.fail)
        assert found is not None
        assert found >= newest
        check(tmp_path, found)
        newest = found
    assert cut_short, "all kills came between saves: change the delays"
