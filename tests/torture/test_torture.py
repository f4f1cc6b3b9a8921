"""Random harm to runs that are started again and again: whatever happens, the newest complete step
is found, intact, and the run that goes on is the run that nothing disturbed, bit for bit.

Each event is drawn from the seed, the lane and its number. ``K31FN_TORTURE_EVENTS`` (100, of all
lanes), ``K31FN_TORTURE_SEED`` (0) and ``K31FN_TORTURE_MINUTES`` (60) change how many, which, and
for how long.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from k31fn.checkpoint import checkpointer
from tests.checkpoint.direct import Direct
from tests.needs import needs
from tests.torture import events
from tests.torture.victims import Straight, Victim
from tests.trainer import runs

pytestmark = [needs("orbax"), pytest.mark.slow, pytest.mark.timeout(4500)]

EVENTS = int(os.environ.get("K31FN_TORTURE_EVENTS", "100"))
SEED = int(os.environ.get("K31FN_TORTURE_SEED", "0"))
MINUTES = float(os.environ.get("K31FN_TORTURE_MINUTES", "60"))
# Tests of their own, since an event mostly waits: ranks, and the share of the events.
LANES = [(1, 0.35), (1, 0.35), (2, 0.3)]
# How often each comes, of those on one rank; on two, some events would only repeat these.
ON_ONE = {
    events.kill: 5,
    events.signals: 4,
    events.output: 3,
    events.frozen_writer: 1,
    events.frozen_rank: 2,
    events.folder: 2,
}
ON_A_DISK = {events.full_disk: 3, events.read_only_disk: 2}
ON_TWO = {events.kill: 4, events.signals: 2, events.output: 2, events.frozen_rank: 2}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of its own; None where none can be mounted."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "k31fn-test", str(where)], capture_output=True
    )
    if mounted.returncode:
        yield None
        return
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is checked in this process: the start of a reader costs as much as that of the
    run itself.
    """
    monkeypatch.setattr(checkpointer, "WriterSession", Direct)
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax' notes would hide the progress


@pytest.mark.parametrize("lane", range(len(LANES)))
def test_torture(
    lane: int, tmp_path: Path, small_disk: Path | None, capsys: pytest.CaptureFixture[str]
):
    began = time.monotonic()
    ranks, share = LANES[lane]
    straight = Straight(tmp_path, runs.write_text(tmp_path / "text"), ranks)
    victims: dict[str, Victim] = {}
    counts: Counter[str] = Counter()
    completed = 0

    def told(line: str) -> None:
        minutes = (time.monotonic() - began) / 60
        progress = f"torture, seed {SEED}, lane {lane}, {minutes:.1f} min: {line}"
        with capsys.disabled():  # not on stdout, which a worker of pytest-xdist does not show
            print(progress, file=sys.stderr, flush=True)

    for number in itertools.count():
        done = counts.total()
        if done >= share * EVENTS:
            break
        assert time.monotonic() - began < 60 * MINUTES, f"only {done} events in {MINUTES} minutes"
        draw = random.Random(f"{SEED} {lane} {number}")
        on_disk = ranks == 1 and small_disk is not None and draw.random() < 0.3
        where = "disk" if on_disk else "folder"
        if where not in victims:
            place = small_disk if on_disk else tmp_path
            victims[where] = Victim(place, straight, ranks, numbers=number)
        victim = victims[where]
        table = ON_TWO if ranks == 2 else ON_A_DISK if on_disk else ON_ONE
        (event,) = draw.choices(list(table), list(table.values()))
        did = event(victim, draw)
        newest = victim.check()
        if did:
            counts[f"{event.__name__} ({where})"] += 1
        told(f"{counts.total()}, {where}: {did or 'nothing to harm'}; step {newest}")
        if victim.complete or draw.random() < 0.1:
            # what is left goes on to its end, where every state has been compared
            if not victim.complete:
                run = victim.start()
                assert run.ends() == [0] * len(run.processes), run.said()
                victim.check()
            assert victim.complete
            completed += 1
            shutil.rmtree(victims.pop(where).root)
    told(f"{dict(sorted(counts.items()))}, {completed} runs to their end")
