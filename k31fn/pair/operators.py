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
from k31fn.autodiff.transforms import vjp
from k31fn.kernels.registry import Op
from k31fn.pair.judge import Probes
from k31fn.pair.sides import Side

__all__ = ["Sample", "compare"]

_Arguments = dict[str, Any]


class Sample:
    """Takes one call of each operator from a probe, another one in each probe."""

    def __init__(self) -> None:
        self._probe = 0
        self._last_counts = Counter[str]()  # calls of each operator in the last probe
        self._counts = Counter[str]()  # so far in this one
        self._calls: dict[str, tuple[Op, _Arguments]] = {}

    def watcher(self, takes: bool) -> Callable[[Op, tuple[Any, ...], dict[str, Any]], None]:
        """A function for :func:`~k31fn.kernels.registry.watch_calls`; it keeps no call unless
        ``takes``.
        """

        def watch(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not takes:
                return
            # probe i takes call i, so over the probes every layer's call has its turn
            if self._counts[op.name] == self._probe % max(1, self._last_counts[op.name]):
                named = inspect.signature(op.reference).bind(*args, **kwargs).arguments
                leaves, structure = tree.flatten(named, allow_none=True)
                # detached: what is kept until the probe ends must not keep the run's graph
                self._calls[op.name] = op, tree.unflatten(structure, [_plain(x) for x in leaves])
            self._counts[op.name] += 1

        return watch

    def taken(
        self, a: Counter[tuple[str, str]], b: Counter[tuple[str, str]]
    ) -> list[tuple[Op, _Arguments]]:
        """The calls of the operators that ran by other implementations in the two; ends the
        probe.
        """
        impls_a = _by_op(a)
        impls_b = _by_op(b)
        calls = [
            call for name, call in self._calls.items() if impls_a.get(name) != impls_b.get(name)
        ]
        self._probe += 1
        self._last_counts = self._counts
        self._counts = Counter()
        self._calls = {}
        return calls


def _by_op(ran: Counter[tuple[str, str]]) -> dict[str, set[str]]:
    """The implementations that ran, by operator."""
    impls: dict[str, set[str]] = {}
    for op, impl in ran:
        impls.setdefault(op, set()).add(impl)
    return impls


def compare(op: Op, named: dict[str, Any], a: Side, b: Side, exact: Side, into: Probes) -> None:
    """Adds the gradients of one call for random cotangents: a probe whose parameters are the
    operator's arguments.
    """
    values, structure = tree.flatten(named, allow_none=True)
    index = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
    if not index:
        return  # an operator of integers alone has no gradient
    labels = {}
    for name, positions in tree.unflatten(structure, range(len(values))).items():
        for i in tree.leaves(positions):
            labels[i] = f"{op.name}({name})"
    cts: list[Tensor] = []
    grads = []
    seed = sum(map(len, into.rows.values()))  # another one in each probe
    for side, dtype in ((a, None), (b, None), (exact, exact.recipe.precision.compute)):

        def call(*leaves: Tensor, side: Side = side) -> list[Tensor]:
            replaced = list(values)
            for i, leaf in zip(index, leaves, strict=True):
                replaced[i] = leaf
            with side.chosen():
                out = tree.leaves(op(**tree.unflatten(structure, replaced)))
            return [x for x in out if x.is_floating_point()]

        # promoted and not cast: what is float32 in a bfloat16 run must not be narrowed
        leaves = []
        for i in index:
            wide = values[i].dtype if dtype is None else _promoted(values[i], dtype)
            leaves.append(values[i].to(wide))
        out, pull = vjp(call, *leaves)
        # drawn once, in the dtype of side a, so that all three pull back the same numbers
        cts = cts or [_drawn(x, seed, i) for i, x in enumerate(out)]
        pulled = pull([c.to(x.dtype) for c, x in zip(cts, out, strict=True)])
        # an argument that is a tree, such as the sources of attn_res, is judged as one
        by_name: dict[str, list[Tensor]] = {}
        for i, grad in zip(index, pulled, strict=True):
            by_name.setdefault(labels[i], []).append(grad.flatten())
        grads.append(dict(zip(by_name, map(torch.cat, by_name.values()), strict=True)))
    into.add(*grads)


def _promoted(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The wider of the two."""
    return torch.promote_types(x.dtype, dtype)


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _drawn(like: Tensor, *seeds: int) -> Tensor:
    # by key: torch's generator belongs to the run, which a probe must not change
    key = random.key(0, device=like.device)
    for seed in seeds:
        key = random.fold_in(key, seed)
    return random.normal(key, tuple(like.shape)).to(like.dtype)
