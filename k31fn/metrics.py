"""The record of a run: ``metrics.jsonl``, one JSON object a line, and the line that a terminal
shows.

A record is a dict with ``step`` and any of the names below or others. One line is one record, so a
file that is still being written can be read, and a run that was killed has lost at most the line it
was writing.

==========================  ==========================================================
``step``                    index of the step, from 0
``train/loss``              nats per token (bytes, with the byte tokenizer)
``train/indexer_kl``        nats per query
``heldout/loss``            on the held-out split, after that step
``grad_norm``               before clipping
``lr``                      of that step
``tokens_per_second``       of all ranks
``mfu``                     of the devices' measured peak (:mod:`k31fn.model.flops`); not on a CPU
``phase``                   number of the run's phase, if it has phases
``skipped``                 1 if the step changed nothing
``spike``                   1 if that was since its loss or norm stood out; else absent
``non_finite``              path of the first leaf whose gradient was not finite; else absent
``max_logit``               the largest attention logit, with QK-Clip
``grad_norm/PART``          of the part of the model (:mod:`k31fn.model.parts`)
``moe/load/LAYER``          of that layer
``moe/load_max_over_mean``  the busiest expert's tokens over the mean; 1 is balanced
``moe/replicas``            with MoonEP, experts of other ranks on the rank that has most
==========================  ==========================================================
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k31fn import regular_files, strict_json

__all__ = ["append", "oldest_first", "read", "rewind", "step_line"]


def __dir__() -> list[str]:
    return __all__


# JSON has no such numbers; as text every reader takes the line, and a diverged loss stays visible.
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_AS_NUMBER = {text: float(text) for text in _NOT_FINITE.values()}

# Bytes of a file: a run of a million steps with the load of a hundred layers has some gigabytes.
_MOST = 8 << 30

_COLUMNS = (("loss", "train/loss"), ("kl", "train/indexer_kl"), ("grad", "grad_norm"), ("lr", "lr"))


def oldest_first(runs: Iterable[Path]) -> list[Path]:
    """Run folders, which are named after the time that they began, in that order."""

    def numbers(run: Path) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", run.name)]

    # by numbers, not as text, in which 10 comes before 9; not by time stamps, which copying changes
    return sorted(runs, key=numbers)


def append(path: str | Path, record: Mapping[str, Any]) -> None:
    """Adds a record at the end of the file, all of it or nothing.

    Args:
        path: the file; made if it is missing.
        record: ``step`` (an int of at least 0) and numbers or text by name.

    Raises:
        ValueError: no step, or a value that is neither a number nor text.
        OSError: the file cannot be written, such as on a full disk.
    """
    step = record.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(f"metrics record has step={step!r}; it needs an int of at least 0")
    encoded = {name: _encode(name, value) for name, value in record.items()}
    line = json.dumps(encoded).encode() + b"\n"
    # Unbuffered and in one write: a reader sees whole lines, and a full disk is told here.
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            written = file.write(line)
            if written < len(line):
                file.write(line[written:])  # says why it was cut short
        except OSError as error:
            file.truncate(before)  # half a line would spoil the next one
            raise OSError(error.errno, error.strerror, str(path)) from error


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, in order. A last line without its end, torn when a run was killed, is
    left out.

    Raises:
        ValueError: there is no such file, or a line is not a record; names the line.
    """
    records = []
    for _, record in _lines(Path(path)):
        records.append(record)
    return records


def rewind(path: str | Path, step: int) -> None:
    """Removes the records of steps ``>= step``, and a torn last line, before a run is resumed at
    ``step``.

    Atomic: a new file takes the old one's place. Does nothing if there is no file.

    Raises:
        ValueError: a line is not a record; names the line.
    """
    path = Path(path)
    if not path.exists():
        return
    earlier = [line for line, record in _lines(path) if record["step"] < step]
    temporary = path.with_name(f"{path.name}.rewound")
    with open(temporary, "wb") as file:
        file.writelines(earlier)
        file.flush()
        os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file
    os.replace(temporary, path)


def step_line(record: Mapping[str, Any], num_steps: int | None = None) -> str:
    """A record as one line of fixed width: lines of one run stand in columns.

    ``step  120/1000  loss  1.8432  kl  0.0123  grad  0.5120  lr  0.0049   4,213 tok/s  load
    1.3200``; values that the record lacks are left out.
    """
    total = "" if num_steps is None else f"/{num_steps}"
    parts = [f"step {record['step']:>{max(len(total) - 1, 5)}}{total}"]
    for label, name in _COLUMNS:
        if name in record:
            parts.append(f"{label} {_number(record[name])}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:>9,.0f} tok/s")
    if "mfu" in record:
        parts.append(f"mfu {record['mfu']:>6.1%}")
    if "moe/load_max_over_mean" in record:
        parts.append(f"load {_number(record['moe/load_max_over_mean'])}")
    return "  ".join(parts)


def _number(value: float) -> str:
    """In seven characters; a negative number with an exponent takes eight."""
    if math.isfinite(value) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    for decimals in (4, 3, 2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= 7:
            return text.rjust(7)
    return f"{value:.1e}".rjust(7)


def _encode(name: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[str(float(value))]
    if isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"metrics {name}={value!r} ({type(value).__name__}) must be a number or text; take "
        "float() of a tensor"
    )


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each whole line and its record."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file; a run writes its metrics there")
    # after the last end of a line there is nothing, or what a killed run did not finish
    *lines, _torn = regular_files.read(path, most=_MOST).split(b"\n")
    result = []
    for number, line in enumerate(lines, 1):
        result.append((line + b"\n", _parse(path, number, line)))
    return result


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    why = "an object with a step is needed"
    try:
        record = strict_json.parse(line, "it")
    except ValueError as error:
        record = None
        why = str(error)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError(f"{path}:{number}: not a metrics record: {line[:80]!r}; {why}")
    for name, value in record.items():
        if isinstance(value, str):
            record[name] = _AS_NUMBER.get(value, value)
    return record
