"""Recomputation: a function that keeps its inputs, and runs again in the backward.

Three parts: this transform; :mod:`k31fn.autodiff.replay`, what the second run is told of the first;
:mod:`k31fn.autodiff.keep`, the functions inside that do not run a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from k31fn.autodiff.ambient import Ambient
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.autodiff.replay import call_recorded, pull_replayed, run_recorded

__all__ = ["remat"]


def remat(f: Callable[..., Any], *, keep: Sequence[str] = ()) -> Callable[..., Any]:
    """``f``, keeping only its inputs for the backward, which runs ``f`` again.

    Works under every ``torch.func`` transform, nested, and to any order. Decisions are always kept,
    and the functions inside that :func:`k31fn.autodiff.keep` gave one of the names in ``keep`` do
    not run again (of nested remats, the innermost says what is kept). Kept values travel as
    explicit inputs and outputs, never past the levels of ``torch.func``.

    Args:
        f: a pure function of pytrees of tensors.
        keep: names of functions inside that are not to run again.

    Raises:
        ValueError: ``f`` captured a tensor that is being differentiated; its gradient would
            silently be zero.
    """
    names = frozenset(keep)

    def fwd(given: Any, *args: Any) -> Any:
        out, decisions, kept = run_recorded(f, args, given, names)
        return (out, decisions), (args, decisions, kept, Ambient(args))

    def bwd(needs: Any, residuals: Any, ct: Any) -> tuple[Any, ...]:
        args, decisions, kept, ambient = residuals
        # The first argument of the rule is the decisions, and so is its second result: neither has
        # a gradient.
        of_args = needs[1:]
        of_out = ct[0]
        grads = ambient.run(
            lambda: pull_replayed(f, args, of_out, decisions, kept, names, needs=of_args)
        )
        return (None, *grads)

    name = f"remat({getattr(f, '__name__', type(f).__name__)})"
    rule = custom_vjp(fwd, bwd, needs=True, name=name)

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        return call_recorded(rule, *args)

    return wrapped
