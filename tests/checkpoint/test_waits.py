"""A writer that is frozen, as by a network's disk: said, and waited for while there is time."""

import importlib.util
import os
import signal
import time

import pytest
import torch

from k31fn.checkpoint import (
    Checkpointer,
    CheckpointError,
    background_saver,
    waits,
    writer_process,
    writer_session,
)
from k31fn.checkpoint.waits import Patience, Wait
from k31fn.parallel import each_rank
from tests.checkpoint.test_one_rank import alive, until
from tests.checkpoint.test_processes import MESH, check, layout, part

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="no orbax-checkpoint")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(waits, "_FIRST_NOTE_S", 0.2)
    monkeypatch.setattr(background_saver, "_LEAST_WAIT_S", 0.5)
    monkeypatch.setattr(background_saver, "_WAIT_FACTOR", 0.0)
    monkeypatch.setattr(writer_session, "_READ_S", 0.5)
    monkeypatch.setattr(writer_process, "_END_S", 0.5)


def state(step):
    return {"x": torch.full((1000,), float(step))}


def freeze(ckpt):
    os.kill(ckpt._session.writer.pid, signal.SIGSTOP)
    return ckpt._session.writer.pid


def thaw_and_end(pid):
    os.kill(pid, signal.SIGCONT)
    assert until(lambda: not alive(pid))


def test_notes_come_after_twice_as_long_each_time(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waits.time, "sleep", lambda s: now.__setitem__(0, now[0] + 0.05))
    wait = Wait(Patience(said.append), lambda: "waits for a save")
    for _ in range(100):
        wait.pause()
    seconds = [line.removeprefix("waits for a save, since ") for line in said]
    assert seconds == ["0 s", "0 s", "1 s", "2 s", "3 s"]


@pytest.mark.slow
def test_a_frozen_writer_is_told_of_and_left_once_the_run_is_to_end(tmp_path):
    """It goes on by itself: what it was asked to save is complete when it wakes up."""
    said, frozen = [], []

    def hurried():
        # a signal came long ago, as soon as the wait for a frozen writer has been told of
        return 100.0 if said and frozen else 0.0

    ckpt = Checkpointer(tmp_path, on_wait=said.append, hurried_s=hurried)
    ckpt.save(1, state(1))
    ckpt.wait()
    said.clear()
    frozen.append(True)
    pid = freeze(ckpt)
    ckpt.save(2, state(2))
    with pytest.raises(
        CheckpointError,
        match=r"step 2 is not known to be saved: its writer has not answered for \d s and is left "
        r"to go on alone; complete steps before it: \[1\]",
    ):
        ckpt.wait()
    assert "waits for the save of step 2 (complete steps: [1]), since 0 s" in said[0]
    # its memory is not written over: it may still read from there
    with pytest.raises(CheckpointError, match=r"step 3 is not saved: its writer has not answered"):
        ckpt.save(3, state(3))
    began = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began < 2
    thaw_and_end(pid)
    with Checkpointer(tmp_path) as again:
        assert again.latest(on_damage=pytest.fail) == 2
        assert torch.equal(again.restore(2, state(0))["x"], state(2)["x"])


def test_a_writer_that_is_frozen_with_nothing_to_do_holds_up_no_end(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state(1))
    ckpt.wait()
    pid = freeze(ckpt)
    began = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began < 3
    thaw_and_end(pid)


@pytest.mark.slow
def test_a_read_that_does_not_come_is_broken_off_by_a_run_that_is_to_end(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
    said = []
    ckpt = Checkpointer(tmp_path, on_wait=said.append, hurried_s=lambda: 100.0 if said else 0.0)
    ckpt.prepare(state(0))
    pid = freeze(ckpt)
    with pytest.raises(CheckpointError, match=r"1: the checkpoint writer has not answered for"):
        ckpt.restore(1, state(0))
    assert "waits to read, since" in said[0]
    ckpt.close()
    thaw_and_end(pid)


@pytest.mark.slow
def test_on_several_ranks_all_leave_it_together(tmp_path):
    """Only the second rank's writer is frozen, and only that rank has a signal."""
    pids = []

    def go(axes, coordinate):
        second = coordinate["fsdp"] == 1
        ckpt = Checkpointer(tmp_path, axes=axes, hurried_s=lambda: 100.0 if second else 0.0)
        ckpt.save(1, part(1, 1000), layout=layout(1000))
        ckpt.wait()
        if second:
            pids.append(freeze(ckpt))
        ckpt.save(2, part(2, 1000), layout=layout(1000))
        with pytest.raises(CheckpointError, match=r"step 2 is not known to be saved") as caught:
            ckpt.wait()
        ckpt.close()
        return str(caught.value)

    said = each_rank(go, MESH, lambda c: (c,))
    assert said[0] == said[1]
    thaw_and_end(pids[0])
    with Checkpointer(tmp_path) as ckpt:  # waits for the writers, of which the first commits
        newest = ckpt.latest(on_damage=pytest.fail)
    check(tmp_path, newest, 1000)
    assert newest in (1, 2)
