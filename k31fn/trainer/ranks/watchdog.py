"""Finding the rank that a run on several ranks was lost by, and ending the others.

A thread of each rank looks at three things. Does this rank get on: has it issued a collective
lately? Does the next rank's thread live: with a device's collectives nobody learns of a death from
the connection. And has a rank raised the alarm, because of one of these, because a collective of
its failed, or because it failed itself? Then every rank that lives says where it is, within seconds
and whatever its main thread does; one of them reports which rank died or hangs, and all end with
status 1. What is on disk is whole at any moment, so nothing need be tidied up. What each rank was
doing is written beside the run (:mod:`k31fn.trainer.ranks.failure_report`).

Signals come to this thread too, by a pipe that the interpreter's handler writes to: a main thread
that waits in a collective acts on none. ``torchrun`` sends SIGTERM to the ranks that are left when
one died, and SIGKILL 30 s after it: from a signal on a silent rank counts as dead much sooner, and
a rank that does not get on says where it stands. If something holds the interpreter, so that not
even this thread runs, all stacks go to standard error instead. A second thread looks whether the
first one waits for the store: the rank that holds it may be the one that hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from k31fn.parallel.backends.processes import CollectiveError, CollectiveProgress
from k31fn.parallel.mesh import Mesh
from k31fn.trainer.ranks import failure_report

__all__ = ["Watchdog"]

_POLLS = 20  # looks in the time after which a rank counts as hanging
_SILENCE_S = 10.0  # after which a rank counts as dead
_SILENCE_SIGNALLED_S = 4.0  # the same once a signal has come; torchrun, 30 s after it, kills
_STUCK_SIGNALLED_S = (
    15.0  # without a collective since a signal, after which a rank says where it stands
)
_STARVED_S = 18.0  # without a turn for the thread, after which the stacks are dumped
_GRACE_S = 3.0  # for a rank to say where it is, once the alarm is raised
_CPU = torch.device("cpu")


class Watchdog:
    """Watches this rank and listens for the others while its block runs. An error that leaves the
    block ends them all.

    Args:
        store: shared by the ranks.
        rank: number of this one.
        mesh: of the run.
        progress: of this rank's collectives.
        timeout: seconds without a collective after which a rank does not get on.
        device: of this rank.
        end: ends the process; the status is its argument.

    Attributes:
        folder: where each rank writes what it was doing if the run is lost; None: nowhere.
        times: of the steps of this rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        mesh: Mesh,
        progress: CollectiveProgress,
        *,
        timeout: float,
        device: torch.device = _CPU,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        # a connection of its own: the main thread may be waiting on the other
        self._store = dist.PrefixStore("watch", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._rank = rank
        self._mesh = mesh
        self._progress = progress
        self._timeout = timeout
        self._end = end
        self._device = device
        self.times = failure_report.StepTimes()
        self.folder: Path | None = None
        self._pipe: tuple[int, int] | None = None  # for signals: its ends to read and to write
        self._signal_name = ""  # of one that came and was not answered yet
        self._signalled_at = 0.0
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._collective_error = ""  # what a collective of this rank said
        self._own_error = ""  # how this rank failed by itself
        self._answered = False
        self._last_beat = -1  # of the next rank
        self._silent_s = 0.0  # for how long it has said nothing
        # a daemon: a thread that waits for a store that is gone must not keep the process
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._calls: set[object] = set()  # of the store, those under way
        self._guard = threading.Thread(target=self._guard_store, name="guard", daemon=True)
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            # the interpreter's handler writes there, and must never wait
            os.set_blocking(self._pipe[1], False)
            self._previous = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread.start()
        self._guard.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self._over.is_set():
            self._end_with(error)
        self.close()

    def close(self) -> None:
        """Stops watching: from here on ranks may end, if they all do."""
        listened = self._thread.ident is not None and not self._over.is_set()
        self._over.set()
        if listened:
            if self._pipe is not None:
                signal.set_wakeup_fd(self._previous)
                os.write(self._pipe[1], b"\0")  # so that the thread looks
            self._thread.join()
            for end in self._pipe or ():
                os.close(end)
            # so that the rank before does not take the silence for a death; the first rank, which
            # may hold the store, may have ended
            with contextlib.suppress(RuntimeError), self._asking():
                self._store.set(f"left {self._rank}", "")
        self._closed.set()

    def _end_with(self, error: BaseException) -> None:
        """Ends all ranks: this one failed, or a collective of it, for which the rank that is to
        blame is found.
        """
        if isinstance(error, CollectiveError):
            self._collective_error = str(error)
        else:
            self._own_error = f"{type(error).__name__}: {error}"
            where = f"rank {self._rank} at {self._mesh.coordinate(self._rank)}"
            stack = ""
            if not isinstance(error, KeyboardInterrupt):  # who interrupts asks for no stack
                stack = "".join(traceback.format_exception(error))
            print(
                f"{stack}train.py: {where} failed: {self._own_error}", file=sys.stderr, flush=True
            )
        self._call(lambda: self._store.add("alarm", 1))
        # the thread answers as on the other ranks, and ends the process: this does not return
        self._thread.join()

    def _listen(self) -> None:
        pause = min(1.0, self._timeout / _POLLS)
        issued = -1
        since = time.monotonic()  # the last time that this rank got on
        while True:
            began = time.monotonic()
            if self._sleep(pause):
                break
            # each signal of a burst ends a sleep early, and would count as a whole pause
            slept = min(pause, time.monotonic() - began)
            if self._progress.issued != issued:
                issued = self._progress.issued
                since = time.monotonic()
            # a ring: each rank looks after the next one, so the store is asked little
            raised = self._next_died(slept) or time.monotonic() - since > self._timeout
            if raised:
                self._call(lambda: self._store.add("alarm", 1))
            if raised or self._call(lambda: self._store.add("alarm", 0)):
                self._answer(time.monotonic() - since)
                return
            stuck_s = time.monotonic() - max(since, self._signalled_at)
            if self._signal_name and stuck_s > _STUCK_SIGNALLED_S:
                self._stand()
        if self._pipe is not None:
            faulthandler.cancel_dump_traceback_later()

    def _sleep(self, pause: float) -> bool:
        """Waits so long, or for a signal; whether the watch is over."""
        if self._pipe is None:
            return self._over.wait(pause)
        # set anew in each turn: it fires if something holds the interpreter, and this thread too
        faulthandler.dump_traceback_later(_STARVED_S + pause)
        if select.select([self._pipe[0]], [], [], pause)[0]:
            numbers = os.read(self._pipe[0], 64).replace(b"\0", b"")  # 0: close() woke it
            if numbers and not self._signal_name:
                self._signal_name = signal.Signals(numbers[0]).name
                self._signalled_at = time.monotonic()
        return self._over.is_set()

    def _next_died(self, slept: float) -> bool:
        """Says that this rank lives, and whether the next one has said nothing for long.

        Counted in sleeps of this thread, not on a clock: a machine that stood still has nobody
        dead.
        """
        other = (self._rank + 1) % self._mesh.world_size
        self._call(lambda: self._store.add(f"beats {self._rank}", 1))
        heard = self._call(lambda: self._store.add(f"beats {other}", 0))
        self._silent_s = self._silent_s + slept if heard == self._last_beat else 0.0
        self._last_beat = heard
        limit = min(_SILENCE_S, _SILENCE_SIGNALLED_S) if self._signal_name else _SILENCE_S
        return self._silent_s > limit and not self._call(
            lambda: self._store.check([f"left {other}"])
        )

    def _stand(self) -> None:
        """Says where this rank stands though a signal asked it to end, once for each signal."""
        frame = sys._current_frames().get(self._main)
        why = (
            f"{self._signal_name} came {time.monotonic() - self._signalled_at:.0f} s ago, and no "
            "collective since"
        )
        waiting = f", waits in {self._progress.waiting}" if self._progress.waiting else ""
        where = f"rank {self._rank} at {self._mesh.coordinate(self._rank)}"
        print(
            f"train.py: {where}: {why}: at {_position(frame)}{waiting}", file=sys.stderr, flush=True
        )
        self._write_record(why)
        self._signal_name = ""

    def _write_record(self, why: str) -> bool:
        """Writes what this rank does beside the run; whether it could."""
        state = (self._rank, self._mesh, self._progress, self.times, self._device)
        return self.folder is not None and failure_report.write(
            self.folder, failure_report.describe(why, *state)
        )

    def _answer(self, still: float) -> None:
        """Says where this rank is, and, for the first rank that gets so far, what the others
        said.
        """
        frame = sys._current_frames().get(self._main)
        written = self._write_record(self._own_error or self._collective_error or "a rank was lost")
        answer = {
            "failed": self._own_error,
            "waiting": self._collective_error or self._progress.waiting,
            "issued": self._progress.issued,
            "where": _position(frame),
            "still": round(still, 1),
        }
        self._call(lambda: self._store.set(f"rank {self._rank}", json.dumps(answer)))
        self._answered = True
        # those that say nothing until then are taken for dead
        deadline = time.monotonic() + _GRACE_S
        said = self._said()
        while len(said) < self._mesh.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            said = self._said()
        # the first to count is the one that reports; which one is all the same
        if self._call(lambda: self._store.add("reporter", 1)) == 1:
            beside = f"; what the ranks did: {self.folder}" if written else ""
            for line in _lost(self._mesh, said):
                print(f"train.py: {line}{beside}", file=sys.stderr, flush=True)
            self._call(lambda: self._store.set("reported", ""))
        # Until it is printed nobody ends: the store, or torchrun, would go with the first one.
        while time.monotonic() < deadline + 1:
            if self._call(lambda: self._store.check(["reported"])):
                break
            time.sleep(0.05)
        sys.stdout.flush()
        self._end(1)

    def _said(self) -> dict[int, dict[str, Any]]:
        """What ranks have said so far, by rank."""
        said = {}
        for rank in range(self._mesh.world_size):
            name = f"rank {rank}"
            # get() would wait for a rank that says nothing
            if self._call(functools.partial(self._store.check, [name])):
                said[rank] = json.loads(self._store.get(name))
        return said

    def _call(self, ask: Callable[[], Any]) -> Any:
        """What the store says. Without it, whoever held it is gone, and this rank ends."""
        try:
            with self._asking():
                return ask()
        except RuntimeError:
            if not self._answered:  # else the others know, and have ended already
                self._report_store("is gone", "died")
            self._end(1)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """A call of the store, which the guard sees."""
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def _guard_store(self) -> None:
        """Ends this rank if the store does not answer: a call of it waits as long as its holder
        is frozen.
        """
        pause = min(1.0, self._timeout / _POLLS)
        seen: set[object] = set()
        silent_s = 0.0
        # counted in pauses, as the silence of a rank is
        while not self._closed.wait(pause):
            calls = self._calls.copy()
            silent_s = silent_s + pause if calls & seen else 0.0
            seen = calls
            if silent_s > self._timeout:
                self._report_store(f"has not answered for {silent_s:.0f} s", "hangs")
                self._end(1)
                return

    def _report_store(self, what: str, holder: str) -> None:
        where = f"rank {self._rank} at {self._mesh.coordinate(self._rank)}"
        said = (
            f"the store of the process group {what}: rank 0 at {self._mesh.coordinate(0)} or its "
            f"torchrun, which held it, {holder}"
        )
        beside = f"; what this rank did: {self.folder}" if self._write_record(said) else ""
        print(f"train.py: {where}: {said}{beside}", file=sys.stderr, flush=True)


def _lost(mesh: Mesh, said: dict[int, dict[str, Any]]) -> list[str]:
    """What to report, from where the ranks that live say they are.

    A rank that failed has reported itself. One that says nothing died. Of ranks that all live,
    those hang that wait for no other; on a device, whose collectives nobody waits for, those that
    issued fewer than others of their stage.
    """
    if any(state["failed"] for state in said.values()):
        return []
    names = {r: f"rank {r} at {mesh.coordinate(r)}" for r in range(mesh.world_size)}
    waiting = sorted({state["waiting"] for state in said.values() if state["waiting"]})
    meanwhile = (
        f"; the others wait in {waiting[0].splitlines()[-1].removeprefix('in ')}" if waiting else ""
    )
    dead = [r for r in names if r not in said]
    if dead:
        return [f"{names[r]} died: it says nothing any more{meanwhile}" for r in dead]
    hanging = [r for r, state in said.items() if not state["waiting"]]
    # On a device all wait or none does, as far as the host knows: then it is who is behind.
    if not waiting or not hanging:
        hanging = [r for r in said if _behind(r, mesh, said)] or list(said)
    return [
        f"{names[r]} hangs: no collective for {said[r]['still']} s, at "
        f"{said[r]['where']}{meanwhile}"
        for r in hanging
    ]


def _behind(rank: int, mesh: Mesh, said: dict[int, dict[str, Any]]) -> bool:
    """Whether another rank of the same pipeline stage has issued more collectives."""
    # stages issue different numbers of collectives, so only ranks of one stage compare
    stage = mesh.coordinate(rank).get("pp")
    peers = [r for r in said if mesh.coordinate(r).get("pp") == stage]
    return said[rank]["issued"] < max(said[r]["issued"] for r in peers)


def _position(frame: FrameType | None) -> str:
    """Where a thread is, innermost first, without the places of installed packages."""
    places = []
    while frame is not None and len(places) < 3:
        code = frame.f_code
        # where the project's own code stands, not torch's or the interpreter's
        if "site-packages" not in code.co_filename and not code.co_filename.startswith("<"):
            places.append(f"{os.path.relpath(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", from ".join(places) or "no Python code"
