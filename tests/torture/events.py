"""What befalls a run: each harms a run that was just started, and says what it did.

They return when all processes are gone or may go on alone; what must hold then is checked by
:meth:`tests.torture.victims.Victim.check`. What returns "" found nothing left to harm.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.torture.victims import LONGEST_S, Started, Victim

Event = Callable[[Victim, random.Random], str]
# For other ranks: longer than the first one waits for a writer that outlived the run before.
_PATIENCE_S = 35.0
OVER = (0, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)


def _started(victim: Victim, draw: random.Random, **options: object) -> Started:
    """After a few steps, at any moment of the next."""
    run = victim.start(**options)
    run.waits_for_steps(draw.randint(0, 4))
    time.sleep(draw.uniform(0.0, 0.6))
    return run


def _launcher(victim: Victim, draw: random.Random) -> str:
    return draw.choice(["", "torchrun"]) if victim.ranks > 1 else ""


def _ends(victim: Victim, run: Started, **within: float) -> list[int]:
    statuses = run.ends(**within)
    victim.ended_well = not any(statuses)
    return statuses


def _check_saved(victim: Victim, run: Started, statuses: list[int], *others: int) -> None:
    """What listened to a signal ended saved, or said that its writer, which took too long, was left
    to save alone; what a later signal ended had nothing left to do.
    """
    left_alone = "is left to go on alone" in run.said()
    right = (*OVER, *others, *([1] if left_alone else []))
    assert all(s in right for s in statuses), (statuses, run.said())
    listened = "step " in run.said() and len(run.processes) == victim.ranks  # no launcher's status
    if listened and all(s in OVER for s in statuses):
        victim.ended_well = True


def kill(victim: Victim, draw: random.Random) -> str:
    """SIGKILL to a rank, a writer, the launcher, or some of them at once."""
    run = _started(victim, draw, launcher=_launcher(victim, draw), timeout=_PATIENCE_S)
    ranks, writers = run.trainers(), run.writers()
    launcher = [p.pid for p in run.processes if p.pid not in ranks]
    chosen = draw.choice(["ranks", "rank", "writers", "all", "launcher"])
    hit = {
        "ranks": ranks,
        "rank": draw.sample(ranks, min(1, len(ranks))),
        "writers": draw.sample(writers, draw.randint(min(1, len(writers)), len(writers))),
        "all": [*ranks, *writers],
        "launcher": launcher or ranks,
    }[chosen]
    killed = sum(run.send(pid, signal.SIGKILL) for pid in hit)
    statuses = _ends(victim, run)
    run.clears_up(*ranks)  # also those that a killed launcher left
    return f"killed {chosen}: {killed} processes, statuses {statuses}" if killed else ""


def signals(victim: Victim, draw: random.Random) -> str:
    """A burst of SIGTERM, SIGHUP or SIGINT: saved after the step, as after one."""
    launcher = _launcher(victim, draw)
    run = _started(victim, draw, launcher=launcher)
    number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    count = draw.randint(1, 30)
    begun = bool(victim.newest) or "run " in run.said()
    sent = 0
    for _ in range(count):
        if not run.send(run.main.pid, number):
            break
        sent += 1
        time.sleep(draw.uniform(0.0, 0.03))
    for process in run.processes[1:]:
        run.send(process.pid, number)
    statuses = _ends(victim, run)
    # before a run listens there is nothing of it to save; a second Ctrl-C may break off
    if begun and number != signal.SIGINT and "step " in run.said():
        # torchrun is ended by a signal itself: its status and traceback are its own
        _check_saved(victim, run, statuses, *([1] if launcher else []))
        assert launcher or "Traceback" not in run.said(), run.said()
    run.clears_up()
    return f"{sent} x {signal.Signals(number).name}, statuses {statuses}" if sent else ""


def output(victim: Victim, draw: random.Random) -> str:
    """The reader of the output leaves: the run goes on, until a signal ends it."""
    run = _started(victim, draw, launcher=_launcher(victim, draw))
    run.closes_output()
    time.sleep(draw.uniform(0.5, 2.0))
    alive = [p for p in run.processes if p.poll() is None]
    for process in alive:
        run.send(process.pid, signal.SIGTERM)
    statuses = _ends(victim, run)
    _check_saved(victim, run, statuses)
    assert "Traceback" not in run.said(), run.said()
    return f"output gone, {len(alive)} went on, statuses {statuses}" if alive else ""


def frozen_writer(victim: Victim, draw: random.Random) -> str:
    """A writer stands still, as on a disk that hangs; SIGTERM ends the run all the same."""
    run = _started(victim, draw)
    writers = run.writers()
    for pid in writers:
        run.send(pid, signal.SIGSTOP)
    time.sleep(draw.uniform(0.0, 1.0))
    for process in run.processes:
        run.send(process.pid, signal.SIGTERM)
    began = time.monotonic()
    statuses = _ends(victim, run, within=60.0 + LONGEST_S / 2)
    took = time.monotonic() - began
    for pid in writers:
        run.send(pid, signal.SIGCONT)
    run.clears_up()
    if not writers:
        return ""
    return f"{len(writers)} writers frozen, ended {took:.0f} s after SIGTERM, statuses {statuses}"


def frozen_rank(victim: Victim, draw: random.Random) -> str:
    """A rank stands still: on one rank for a while, on several until the others end."""
    run = _started(victim, draw, timeout=_PATIENCE_S)
    frozen = draw.choice(run.trainers() or [run.main.pid])
    stopped = run.send(frozen, signal.SIGSTOP)
    if victim.ranks == 1:
        time.sleep(draw.uniform(0.2, 1.5))
        run.send(frozen, signal.SIGCONT)
        run.send(frozen, signal.SIGTERM)
        statuses = _ends(victim, run)
        run.clears_up()
        return f"frozen and awake again, statuses {statuses}" if stopped else ""
    others = [p for p in run.processes if p.pid != frozen]
    statuses = []
    for process in others:
        statuses.append(process.wait(LONGEST_S))
    run.clears_up()
    if not stopped:
        return ""
    assert all(statuses), f"a rank ended well without the other: {run.said()}"
    return f"a rank frozen, the others ended with {statuses}"


def folder(victim: Victim, draw: random.Random) -> str:
    """The run's folder is renamed, or all of it removed, while it runs."""
    run = _started(victim, draw)
    # before it has found its folder it would rightly begin another one
    if not run.waits_for_its_folder():
        run.clears_up()
        return ""
    place = victim.run
    victim.tidied = True
    elsewhere = victim.root / "renamed"
    renamed = draw.random() < 0.7
    if renamed:
        place.rename(elsewhere)
    else:
        shutil.rmtree(place, ignore_errors=True)
        victim.newest = 0
    statuses = _ends(victim, run)
    run.clears_up()
    if renamed:
        # what was written to a name that is gone would be a second, half a run
        assert not list((victim.root / "victim").iterdir()), run.said()
        elsewhere.rename(place)
    return f"folder {'renamed' if renamed else 'removed'}, statuses {statuses}"


def full_disk(victim: Victim, draw: random.Random) -> str:
    """No room for a while; the run ends, and goes on when there is some."""
    run = _started(victim, draw)
    victim.tidied = True
    filler = victim.root / "filler"
    left = draw.choice([0, 4096, 60_000])
    # the run writes meanwhile: what is left is only near what was drawn
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while _room(victim.root) > left:
            file.write(bytes(min(4096, max(1, _room(victim.root) - left))))
    time.sleep(draw.uniform(0.5, 2.0))
    for process in run.processes:
        run.send(process.pid, signal.SIGTERM)
    statuses = _ends(victim, run)
    run.clears_up()
    filler.unlink()
    return f"disk full, statuses {statuses}"


def read_only_disk(victim: Victim, draw: random.Random) -> str:
    """A start on a file system that takes nothing, as after an error of its disk: refused."""
    writable = not _remount(victim.disk, "ro")
    run = _started(victim, draw)
    if writable:
        for process in run.processes:
            run.send(process.pid, signal.SIGTERM)
    statuses = _ends(victim, run)
    run.clears_up()
    _remount(victim.disk, "rw")
    if not writable:
        assert statuses in ([1], [2]), statuses
        assert "Traceback" not in run.said(), run.said()
        assert "Read-only file system" in run.said(), run.said()
    return f"disk read-only ({'busy' if writable else 'done'}), statuses {statuses}"


def _room(where: Path) -> int:
    state = os.statvfs(where)
    return state.f_bavail * state.f_frsize


def _remount(where: Path, mode: str) -> bool:
    done = subprocess.run(["mount", "-o", f"remount,{mode}", str(where)], capture_output=True)
    return done.returncode == 0
