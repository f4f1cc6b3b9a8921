"""Random damage at every door: no traceback, no hang, one line with a reason, and nothing written
where it should not be or left half made.

Drawn from a seed: ``K31FN_FUZZ_SEED`` (0), ``K31FN_FUZZ_MUTATIONS`` (180 of each door), and
``K31FN_FUZZ_COMMANDS`` (50 of each, as processes of their own) change which and how many. A failure
names the door and the number of the mutation; ``K31FN_FUZZ_ONLY=NUMBER`` repeats that one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from k31fn.checkpoint import checkpointer
from k31fn.trainer import cli, run
from tests.checkpoint.direct import Direct
from tests.fuzz.doors import Door, all_doors
from tests.needs import needs
from tests.trainer.runs import REPOSITORY

pytestmark = [
    needs("orbax", "PIL", "pyarrow", "tokenizers", "tiktoken", "matplotlib"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

SEED = int(os.environ.get("K31FN_FUZZ_SEED", "0"))
MUTATIONS = int(os.environ.get("K31FN_FUZZ_MUTATIONS", "180"))
COMMANDS = int(os.environ.get("K31FN_FUZZ_COMMANDS", "50"))
ONLY = os.environ.get("K31FN_FUZZ_ONLY", "")
LONGEST_S = 120  # of a mutation that takes a second or less, on a machine with other work
DOORS = {door.name: door for door in all_doors()}
# What a command imports when it needs it: once for all commands, as they are forks of one process.
LAZY = {
    "k31fn.data.__main__": ["PIL.Image", "pyarrow.parquet", "tokenizers", "tiktoken"],
    "k31fn.plot": ["matplotlib.figure"],
    "k31fn.trainer.cli": ["tyro"],
}
# Before an error's line: a progress bar's, and what a package prints.
MOST_LINES = 3


class Said(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


class Hangs(BaseException):
    """Took too long; no handler of errors catches it."""


@pytest.fixture(autouse=True)
def as_a_user(unchecked: None) -> None:
    """Annotations are not checked, which would raise errors of their own."""


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command line lets through would train for seconds, and a checkpoint's reader is a
    process that takes seconds to start; both are as they are where commands are processes.
    """
    outcome = run.Outcome(0, False, (), ())
    monkeypatch.setattr(cli, "train", lambda *args, **kwargs: outcome)
    monkeypatch.setattr(checkpointer, "WriterSession", Direct)


def places(folder: Path, door: Door) -> tuple[Path, Path, Path, Path]:
    """Folders for the good input, its damaged copy, the output, and to stand in."""
    found = [folder / name for name in ("good", "given", "out", "here")]
    for place in found:
        place.mkdir()
    door.made(found[0])
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("name", DOORS)
def test_mutations(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    door = DOORS[name]
    good, given, out, here = places(tmp_path, door)
    main = importlib.import_module(door.module).main
    monkeypatch.chdir(here)
    good_words = door.words(good, out / "good")
    assert called(main, good_words).status == 0, called(main, good_words)

    def mutate(number: int) -> Said:
        draw = random.Random(f"{SEED} {name} {number}")
        words = [*door.words(given, out / str(number)), *door.spoil(good, given, draw)]
        before = listing(given)
        with told_of(words):
            said = called(main, words)
            judge(said, door)
            check_left(before, given, out / str(number), here)
        return said

    run_all(f"{name}, seed {SEED}", MUTATIONS, mutate, capsys)


@pytest.mark.parametrize("name", DOORS)
def test_command_lines(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    door = DOORS[name]
    good, given, out, here = places(tmp_path, door)
    with server(door.module) as ask:

        def mutate(number: int) -> Said:
            draw = random.Random(f"{SEED} {name} command {number}")
            words = [*door.words(given, out / str(number)), *door.spoil(good, given, draw)]
            if door.module == "k31fn.trainer.cli":
                words += ["--max-minutes", "1e-9"]  # it ends before its first step
            before = listing(given)
            with told_of(words):
                answer = ask(module=door.module, words=words, cwd=str(here))
                assert answer["status"] != -signal.SIGKILL, f"hangs: {answer['seconds']:.0f} s"
                said = Said(answer["status"], answer["out"], answer["err"])
                judge(said, door)
                check_left(before, given, out / str(number), here)
            return said

        run_all(f"{name}, as commands, seed {SEED}", COMMANDS, mutate, capsys)


def run_all(
    what: str, count: int, mutate: Callable[[int], Said], capsys: pytest.CaptureFixture[str]
) -> None:
    """All mutations of a door; fails at the end, with every finding."""
    began = time.monotonic()
    counts, findings = Counter[str](), []
    for number in [int(ONLY)] if ONLY else range(count):
        try:
            counts[f"status {mutate(number).status}"] += 1
        except (Exception, Hangs):
            counts["findings"] += 1
            findings.append(f"mutation {number}: {traceback.format_exc()[-4000:]}")
        if number % 60 == 59 or number == count - 1:
            minutes = (time.monotonic() - began) / 60
            line = f"fuzz {what}: {number + 1}/{count}, {dict(counts)}, {minutes:.1f} min"
            with capsys.disabled():  # not on stdout, which a worker of pytest-xdist does not show
                print(line, file=sys.stderr, flush=True)
    assert not findings, "\n".join([what, *findings])


@contextlib.contextmanager
def told_of(words: list[str]) -> Iterator[None]:
    """Errors name the words."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"words: {words}")
        raise


def called(main: Any, words: list[str]) -> Said:
    """The command in this process, for so long at most."""
    out, err = io.StringIO(), io.StringIO()

    def stop(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Said(status or 0, out.getvalue(), err.getvalue())


def judge(said: Said, door: Door) -> None:
    """One line with a reason, unless it is well; of options, what their parser prints."""
    assert "Traceback" not in said.err, said.err
    assert said.status in (0, 1, 2), said
    if said.status == 0:
        return
    lines = [line for line in said.err.splitlines() if line.strip()]
    by_parser = lines and lines[0].startswith("usage:")
    # `verify` prints what it found, as it was asked to
    if by_parser or (said.status == 1 and said.out and "__main__" in door.module):
        return
    assert lines, f"status {said.status} without a word"
    assert len(lines) <= MOST_LINES, said.err
    start = (
        "train.py: " if "trainer" in door.module else f"{door.module.removesuffix('.__main__')}: "
    )
    assert lines[-1].startswith(start), said.err
    assert len(lines[-1]) > len(start) + 10, "no reason"
    assert len(lines[-1]) < 2000, "a line without an end"
    assert " at 0x" not in lines[-1], "an address in memory"


def check_left(before: list[str], given: Path, out: Path, here: Path) -> None:
    """Nothing beside the output, and nothing half made in it."""
    mine = (".lock", "samples.txt")
    new = [name for name in listing(given) if name not in before and not name.endswith(mine)]
    assert listing(here) == [], "something was written beside the command"
    assert not new, f"written into the input: {new}"
    left = listing(out)
    half = [n for n in left if n.endswith((".new", ".partial", ".tmp")) or ".partial." in n]
    assert not half, f"left half made: {half}"


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@contextlib.contextmanager
def server(module: str) -> Iterator[Any]:
    """Where command lines are run, each in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.commands"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(**request: Any) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        ask(**{"import": [module, *LAZY.get(module, [])]})
        yield ask
        process.stdin.close()
