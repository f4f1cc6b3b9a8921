"""The operators that two sides compute differently, each compared alone on arguments that the run
gave it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff import vjp
from k31fn.kernels.registry import Op
from k31fn.pair.judge import Probes
from k31fn.pair.sides import Side

__all__ = ["Sample", "compare"]

_Call = tuple[Op, dict[str, Any]]


class Sample:
    """Takes one call of each operator from a probe, another one in each probe."""

    def __init__(self) -> None:
        self._probe = 0
        self._counts = Counter[str]()  # calls in the last probe
        self._seen = Counter[str]()  # so far in this one
        self._calls: dict[str, _Call] = {}

    def watcher(self, takes: bool) -> Callable[[Op, tuple[Any, ...], dict[str, Any]], None]:
        """For :func:`~k31fn.kernels.registry.watch_calls`."""

        def watch(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not takes:
                return
            if self._seen[op.name] == self._probe % max(1, self._counts[op.name]):
                named = inspect.signature(op.reference).bind(*args, **kwargs).arguments
                leaves, structure = tree.flatten(named, allow_none=True)
                self._calls[op.name] = op, tree.unflatten(structure, [_plain(x) for x in leaves])
            self._seen[op.name] += 1

        return watch

    def taken(self, a: Counter[tuple[str, str]], b: Counter[tuple[str, str]]) -> list[_Call]:
        """The calls of the operators that ran by other implementations in the two; ends the
        probe.
        """
        apart = {
            op for op, _ in {*a, *b} if {n for o, n in a if o == op} != {n for o, n in b if o == op}
        }
        found = [call for name, call in self._calls.items() if name in apart]
        self._probe, self._counts, self._seen, self._calls = (
            self._probe + 1,
            self._seen,
            Counter(),
            {},
        )
        return found


def compare(op: Op, named: dict[str, Any], a: Side, b: Side, exact: Side, into: Probes) -> None:
    """Adds the gradients of one call for random cotangents: a probe whose parameters are the
    operator's arguments.
    """
    values, structure = tree.flatten(named, allow_none=True)
    index = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
    if not index:
        return
    numbers = tree.unflatten(structure, range(len(values)))
    labels = {i: f"{op.name}({name})" for name, part in numbers.items() for i in tree.leaves(part)}
    wide, cts, grads = exact.recipe.precision.compute, [], []
    seed = sum(map(len, into.rows.values()))
    for side, dtype in ((a, None), (b, None), (exact, wide)):

        def call(*leaves: Tensor, side: Side = side) -> list[Tensor]:
            replaced = list(values)
            for i, leaf in zip(index, leaves, strict=True):
                replaced[i] = leaf
            with side.chosen():
                out = tree.leaves(op(**tree.unflatten(structure, replaced)))
            return [x for x in out if x.is_floating_point()]

        given = [
            values[i] if dtype is None else values[i].to(_promoted(values[i], dtype)) for i in index
        ]
        out, pull = vjp(call, *given)
        cts = cts or [_drawn(x, seed, i) for i, x in enumerate(out)]
        found = pull([c.to(x.dtype) for c, x in zip(cts, out, strict=True)])
        by_name: dict[str, list[Tensor]] = {}
        for i, g in zip(index, found, strict=True):
            by_name.setdefault(labels[i], []).append(g.flatten())
        grads.append({name: torch.cat(parts) for name, parts in by_name.items()})
    into.add(*grads)


def _promoted(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The wider of the two."""
    return torch.promote_types(x.dtype, dtype)


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _drawn(like: Tensor, *seeds: int) -> Tensor:
    key = random.key(0, device=like.device)
    for seed in seeds:
        key = random.fold_in(key, seed)
    return random.normal(key, tuple(like.shape)).to(like.dtype)
