"""Random harm to runs that are started again and again: whatever happens, the newest complete step
is found, intact, and the run that goes on is the run that nothing disturbed, bit for bit.

The events are drawn from a seed. ``K31FN_TORTURE_EVENTS`` (100), ``K31FN_TORTURE_SEED`` (0) and
``K31FN_TORTURE_MINUTES`` (60) change how many, which, and for how long.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture import events
from tests.torture.victims import Straight, Victim
from tests.trainer import runs

pytest.importorskip("orbax.checkpoint")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4500)]

EVENTS = int(os.environ.get("K31FN_TORTURE_EVENTS", "100"))
SEED = int(os.environ.get("K31FN_TORTURE_SEED", "0"))
MINUTES = float(os.environ.get("K31FN_TORTURE_MINUTES", "60"))
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


def test_torture(tmp_path: Path, small_disk: Path | None, capsys: pytest.CaptureFixture[str]):
    began = time.monotonic()
    text = runs.write_text(tmp_path / "text")
    draw = random.Random(SEED)
    straight: dict[int, Straight] = {}
    victims: dict[str, Victim] = {}
    counts: Counter[str] = Counter()
    completed = number = 0
    while number < EVENTS and time.monotonic() - began < 60 * MINUTES:
        where = draw.choices(["one", "disk", "two"], [6, 2 if small_disk else 0, 3])[0]
        ranks = 2 if where == "two" else 1
        if ranks not in straight:
            (tmp_path / f"of {ranks}").mkdir()
            straight[ranks] = Straight(tmp_path / f"of {ranks}", text, ranks)
        if where not in victims:
            folder = small_disk if where == "disk" and small_disk else tmp_path / f"of {ranks}"
            victims[where] = Victim(folder, straight[ranks], ranks, numbers=number)
        victim = victims[where]
        table = {"one": ON_ONE, "disk": ON_A_DISK, "two": ON_TWO}[where]
        (event,) = draw.choices(list(table), list(table.values()))
        did = event(victim, draw)
        newest = victim.check()
        counts[f"{event.__name__} on {where}"] += 1
        number += 1
        with capsys.disabled():
            minutes = (time.monotonic() - began) / 60
            print(
                f"torture {number}/{EVENTS} seed {SEED}, {minutes:.1f} min: {where}: {did}; step "
                f"{newest}",
                flush=True,
            )
        if victim.complete or draw.random() < 0.1:
            # what is left goes on to its end, where every state has been compared
            if not victim.complete:
                run = victim.start()
                assert run.ends() == [0] * len(run.processes), run.said()
                victim.check()
            assert victim.complete
            completed += 1
            _remove(victims.pop(where))
    with capsys.disabled():
        print(f"torture: {dict(sorted(counts.items()))}, {completed} runs to their end", flush=True)
    assert number == EVENTS, f"{number} of {EVENTS} events in {MINUTES} minutes"


def _remove(victim: Victim) -> None:
    import shutil

    shutil.rmtree(victim.root, ignore_errors=True)
