"""Numbers of a config that no computation could take: refused before any work.

Of every config alike, also of a kind of layer that a recipe registers: any float is finite and in
the range of float32, any integer is one that some loop or some memory can have. A field says where
it is otherwise, ``field(default=..., metadata={"most": 1 << 40})`` or ``{"infinite": True}``.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["check_numbers", "divisors", "nearest"]

_MOST = (1 << 31) - 1  # what indices of kernels hold
# A square beyond it is infinite in float32, and a number below the other one is 0 there.
_LARGEST = 1e18
_SMALLEST = 1e-37


def check_numbers(config: Any, at: str = "") -> None:
    """Refuses a number anywhere inside of a config.

    Args:
        config: a dataclass, or what a field of one may hold.
        at: its path, for the message.

    Raises:
        ValueError: names the field, its value and the rule.
    """
    _check(config, at, {})


def _check(value: Any, at: str, rules: Mapping[str, Any]) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        most = rules.get("most", _MOST)
        if abs(value) > most:
            raise ValueError(f"{at}={value} must be at most {most}")
    elif isinstance(value, float):
        _check_float(value, at, rules)
    elif isinstance(value, tuple):
        for number, part in enumerate(value):
            _check(part, f"{at}[{number}]", rules)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            _check(part, f"{at}.{name}" if at else str(name), {})
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # a flat field's own fields stand beside it on the command line
            name = "" if field.metadata.get("flat") else field.name
            path = f"{at}.{name}" if at and name else at or name
            _check(getattr(value, field.name), path, field.metadata)


def _check_float(value: float, at: str, rules: Mapping[str, Any]) -> None:
    if math.isinf(value) and rules.get("infinite"):
        return
    if not math.isfinite(value):
        raise ValueError(f"{at}={value} must be finite")
    if value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise ValueError(
            f"{at}={value} must be 0 or of a size from {_SMALLEST} to {_LARGEST}, whose squares "
            "float32 has"
        )


def divisors(n: int) -> list[int]:
    """Those of ``n``, ascending."""
    below = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return below + [n // d for d in reversed(below) if d * d != n]


def nearest(value: int, valid: list[int], num_above: int = 2) -> str:
    """The nearest of the ascending valid values below, and some above."""
    first_above = bisect.bisect_right(valid, value)
    below = valid[: bisect.bisect_left(valid, value)]
    return ", ".join(map(str, below[-1:] + valid[first_above : first_above + num_above]))
