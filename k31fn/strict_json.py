"""JSON, read strictly and within bounds: one reader for configs, indexes, manifests, tokenizers,
headers and records.

Python's own reader takes more than JSON and stops at less: of a field that is given twice it keeps
the last one, it takes NaN, turns 1e999 into infinity, and a thousand brackets end its stack. Here
each of these is a ``ValueError`` that names the file, the line and the field.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k31fn import regular_files

__all__ = ["load_object", "parse"]

DEPTH = 100
"""Objects and lists inside each other; deeper text is refused. Configs have some ten."""

# Bytes of a file; a config has some thousands.
_MOST = 64 << 20


class _Fault:
    """Stands where a value would, until the field that it is in is known."""

    def __init__(self, rule: str):
        self.rule = rule


class _Hooks:
    """What Python's reader asks about objects and numbers; ``found``: whether one is a fault."""

    def __init__(self, not_finite: bool):
        self.found = False
        self._not_finite = not_finite

    def fields(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            # The last one would win, in silence; which one was meant nobody knows.
            value[counts.most_common(1)[0][0]] = self._fault("is given twice")
        return value

    def constant(self, text: str) -> Any:
        return float(text) if self._not_finite else self._fault(f"is {text}, which JSON has not")

    def number(self, text: str) -> Any:
        value = float(text)
        if math.isfinite(value):
            return value
        return self._fault(f"is {text[:30]}, too large for a number")

    def _fault(self, rule: str) -> _Fault:
        self.found = True
        return _Fault(rule)


def load_object(file: Path, *, most: int = _MOST, not_finite: bool = False) -> dict[str, Any]:
    """The object that a file holds.

    Args:
        file: a regular file.
        most: bytes that such a file can have.
        not_finite: whether NaN and infinities may stand for numbers, as programs write them.

    Raises:
        ValueError: there is no such file, it is too long, or not one object in strict JSON; names
            the file.
    """
    data = parse(regular_files.read(file, most=most), str(file), not_finite=not_finite)
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(data).__name__}")
    return data


def parse(data: bytes | str, where: str, *, not_finite: bool = False) -> Any:
    """The value that JSON text stands for.

    Args:
        data: the text, or its UTF-8.
        where: file, or file and line, for errors.
        not_finite: as of :func:`load_object`.

    Raises:
        ValueError: it is not strict JSON, or more than :data:`DEPTH` deep; begins with ``where``.
    """
    hooks = _Hooks(not_finite)
    try:
        # "-sig": programs on Windows write a mark before the text, which is no part of it
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=hooks.fields,
            parse_constant=hooks.constant,
            parse_float=hooks.number,
        )
    except RecursionError:
        raise _too_deep(where) from None
    except json.JSONDecodeError as e:
        place = f"column {e.colno}" if e.lineno == 1 else f"line {e.lineno}, column {e.colno}"
        raise ValueError(f"{where} is not JSON: {e.msg} at {place}") from e
    except ValueError as e:  # of UTF-8, or an integer of thousands of digits
        raise ValueError(f"{where} is not JSON in UTF-8: {e}") from e
    # Most text has too few brackets to be deep, and counting them takes no time.
    if text.count("[") + text.count("{") > DEPTH:
        _check_depth(value, where)
    if hooks.found:
        at, rule = next(_faults("", value))
        raise ValueError(f"{where}: {at or 'the value'} {rule}")
    return value


def _check_depth(value: Any, where: str) -> None:
    level = [value]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += outer.values()
            elif isinstance(outer, list):
                inner += outer
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep(where)


def _faults(at: str, value: Any) -> Iterator[tuple[str, str]]:
    """The places of faults and their rules; of a value that is not too deep."""
    if isinstance(value, _Fault):
        yield at, value.rule
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _faults(f"{at}.{key}" if at else key, part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _faults(f"{at}[{number}]", part)


def _too_deep(where: str) -> ValueError:
    return ValueError(f"{where}: objects and lists are nested more than {DEPTH} deep")
