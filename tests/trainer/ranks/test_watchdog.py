"""Who is to blame when a run on several ranks stands, and that all end."""

import contextlib
import signal
import threading
import time

import pytest
import torch.distributed as dist

from k31fn.parallel import Mesh
from k31fn.parallel.backends.processes import CollectiveError, CollectiveProgress
from k31fn.trainer.ranks import watchdog
from k31fn.trainer.ranks.watchdog import Watchdog, _lost

MESH = Mesh(pp=2, fsdp=2)


def state(waiting="", issued=5, failed="", where="a.py:3 in f"):
    return {"waiting": waiting, "issued": issued, "failed": failed, "where": where, "still": 2.0}


class TestLost:
    def test_a_dead_rank(self):
        said = {r: state("psum over ('fsdp',) on rank 0") for r in (0, 1, 3)}
        assert _lost(MESH, said) == [
            "rank 2 at {'pp': 1, 'fsdp': 0} died: it says nothing any more; the others wait in "
            "psum over ('fsdp',) on "
            "rank 0"
        ]

    def test_one_that_waits_for_nobody(self):
        said = {r: state("" if r == 1 else "psum over ('fsdp',)") for r in range(4)}
        assert _lost(MESH, said) == [
            "rank 1 at {'pp': 0, 'fsdp': 1} hangs: no collective for 2.0 s, at a.py:3 in f; the "
            "others wait in psum "
            "over ('fsdp',)"
        ]

    def test_on_a_device_one_that_is_behind_in_its_stage(self):
        said = {0: state(issued=40), 1: state(issued=40), 2: state(issued=9), 3: state(issued=8)}
        (line,) = _lost(MESH, said)
        assert line.startswith("rank 3 at {'pp': 1, 'fsdp': 1} hangs")

    def test_ranks_that_wait_for_each_other(self):
        said = {r: state(f"psum {r}") for r in range(4)}
        assert len(_lost(MESH, said)) == 4

    def test_one_that_failed_has_said_so(self):
        assert _lost(MESH, {0: state("psum"), 1: state(failed="disk full")}) == []


class Ranks:
    """A thread per rank, each with its watch; what they end with."""

    def __init__(self, mesh, timeout, monkeypatch):
        self.mesh, self.timeout, self.store = mesh, timeout, dist.HashStore()
        self.ended, self.progress = {}, [CollectiveProgress() for _ in range(mesh.world_size)]
        monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)

    def run(self, *bodies):
        def go(rank, body):
            watching = Watchdog(
                self.store,
                rank,
                self.mesh,
                self.progress[rank],
                timeout=self.timeout,
                end=lambda status: self.ended.setdefault(rank, status),
            )
            with contextlib.suppress(CollectiveError, MemoryError), watching:
                body(watching, self.progress[rank])

        threads = [threading.Thread(target=go, args=(r, b)) for r, b in enumerate(bodies) if b]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


@pytest.fixture
def two(monkeypatch):
    return Ranks(Mesh(tp=2), 1.0, monkeypatch)


def waits(watching, progress):
    progress.issued, progress.waiting = 3, "psum over ('tp',)"
    watching._thread.join()


def oversleeps(watching, progress):
    progress.issued = 2
    while watching._thread.is_alive():
        time.sleep(0.05)


def test_a_hanging_rank_is_reported_within_the_timeout(two, capsys):
    begin = time.monotonic()
    two.run(waits, oversleeps)
    assert time.monotonic() - begin < 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: rank 1 at {'tp': 1} hangs: no collective for ")
    assert "test_watchdog.py:" in line
    assert "in oversleeps" in line
    assert line.endswith("the others wait in psum over ('tp',)")
    assert two.ended == {0: 1, 1: 1}


def test_a_rank_that_died_is_reported_when_a_collective_breaks(two, capsys):
    two.timeout = 100.0

    def breaks(watching, progress):
        raise CollectiveError("connection closed\nin psum over ('tp',)")

    two.run(breaks, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == "train.py: rank 1 at {'tp': 1} died: it says nothing any more; "
        "the others wait in psum over ('tp',)"
    )
    assert two.ended == {0: 1}


def test_a_rank_that_died_is_reported_where_no_collective_breaks(two, capsys, monkeypatch):
    """As on a device, where the others wait for it without an error; long before the timeout."""
    monkeypatch.setattr(watchdog, "_POLLS", 1000)
    monkeypatch.setattr(watchdog, "_SILENCE_S", 0.5)
    two.timeout = 100.0
    two.run(waits, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: rank 1 at {'tp': 1} died: it says nothing any more")
    assert two.ended == {0: 1}


def test_a_rank_that_has_left_is_not_dead(two, capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "_POLLS", 1000)
    monkeypatch.setattr(watchdog, "_SILENCE_S", 0.2)
    two.timeout = 100.0
    two.run(lambda watching, progress: time.sleep(1.5), lambda watching, progress: None)
    assert two.ended == {}
    assert capsys.readouterr().err == ""


def test_a_rank_that_failed_ends_the_others(two, capsys):
    two.timeout = 100.0

    def fails(watching, progress):
        raise MemoryError("no memory")

    two.run(waits, fails)
    *trace, line = capsys.readouterr().err.splitlines()
    assert line == "train.py: rank 1 at {'tp': 1} failed: MemoryError: no memory"
    assert trace[0] == "Traceback (most recent call last):"
    assert two.ended == {0: 1, 1: 1}


def test_ranks_that_get_on_end_in_peace(two, capsys):
    def works(watching, progress):
        for _ in range(15):
            progress.issued += 1
            time.sleep(0.1)

    two.run(works, works)
    assert two.ended == {}
    assert capsys.readouterr().err == ""


def test_a_burst_of_signals_is_no_silence():
    """Each wakes the thread early: its turns are no seconds in which the other rank said
    nothing.
    """
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    two, progress = Mesh(tp=2), CollectiveProgress()
    try:
        with Watchdog(dist.HashStore(), 0, two, progress, timeout=100.0, end=ended.append):
            for _ in range(30):
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
                time.sleep(0.02)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ended


class FrozenStore:
    """Whose holder does not run: a call of it waits."""

    def __init__(self, store, frozen):
        self.store, self.frozen = store, frozen

    def clone(self):
        return self

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def wait_and_call(*args):
            while self.frozen.is_set():
                time.sleep(0.02)
            return call(*args)

        return wait_and_call


def in_thread(f):
    """Beside the main thread a watch takes no signals, for which pytest's streams have no place."""
    thread = threading.Thread(target=f)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("when", ["while it runs", "at its end"])
def test_a_store_whose_holder_is_frozen_is_reported_after_the_timeout(monkeypatch, capsys, when):
    """The thread that watches waits in a call of the store, and so would an alarm."""
    frozen, ended = threading.Event(), []
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    store = FrozenStore(dist.HashStore(), frozen)

    def end(status):
        ended.append((status, time.monotonic()))
        frozen.clear()  # the process is gone

    began = time.monotonic()

    def watched():
        with Watchdog(store, 1, Mesh(tp=2), CollectiveProgress(), timeout=1.0, end=end) as watching:
            frozen.set()
            while when == "while it runs" and not ended and time.monotonic() - began < 30:
                watching._progress.issued += 1
                time.sleep(0.05)

    in_thread(watched)
    (status, at), *_ = ended
    assert status == 1
    assert 1.0 <= at - began < 10.0  # of a busy machine
    line = capsys.readouterr().err.splitlines()[0]
    assert line == (
        "train.py: rank 1 at {'tp': 1}: the store of the process group has not answered for 1 s: "
        "rank 0 at {'tp': 0} or its torchrun, which held it, hangs"
    )


@pytest.mark.usefixtures("unchecked")
def test_a_store_that_is_only_slow_is_no_frozen_one(monkeypatch):
    frozen, ended = threading.Event(), []
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    store = FrozenStore(dist.HashStore(), frozen)

    def watched():
        with Watchdog(
            store, 0, Mesh(), CollectiveProgress(), timeout=1.0, end=ended.append
        ) as watching:
            began = time.monotonic()
            while time.monotonic() - began < 2.0:
                watching._progress.issued += 1
                frozen.set()
                time.sleep(0.3)
                frozen.clear()
                time.sleep(0.1)

    in_thread(watched)
    assert not ended
