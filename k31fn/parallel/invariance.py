"""The check, for tests, that what must be equal on all ranks of an axis is."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch
from torch import Tensor

from k31fn.parallel.axis import Channel

__all__ = ["check_invariance", "compare_ranks", "is_checked"]

_CHECK: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "k31fn_check_invariance", default=False
)


@contextlib.contextmanager
def check_invariance(on: bool = True) -> Iterator[None]:
    """Compares, on real ranks, what must be equal on all ranks of an axis; the simulated mesh
    always checks exactly.

    Compared are the cotangents that the transpose of ``psum`` gets, and outputs of ``shard_map``
    over axes that their specs do not name. Each costs a collective, which no record counts: for
    tests.
    """
    token = _CHECK.set(on)
    try:
        yield
    finally:
        _CHECK.reset(token)


def is_checked() -> bool:
    """Says whether :func:`check_invariance` is on."""
    return _CHECK.get()


def compare_ranks(channel: Channel, x: Tensor, complaint: str) -> None:
    """Raises on every rank if ``x`` is not equal on all of them, up to rounding.

    Raises:
        ValueError: ``complaint``, with the largest difference.
    """
    # A NaN is equal to no NaN: ranks that agree on one would seem to differ.
    wide = torch.nan_to_num(x.detach().to(torch.promote_types(x.dtype, torch.float32)))
    if not wide.numel():
        return
    # max(x) and max(-x) = -min(x) in one collective: their sum is how far the ranks are apart.
    # By the channel, not by pmax: no record counts a check.
    wait = channel.start("pmax", torch.stack([wide, -wide]), {})
    largest, negated_smallest = wait()
    spread = float((largest + negated_smallest).amax())
    size = float(torch.maximum(largest.abs(), negated_smallest.abs()).amax())
    # Half of the digits: sums in unlike orders differ in the last ones, a forgotten pvary in all.
    if spread > torch.finfo(wide.dtype).eps ** 0.5 * size:
        raise ValueError(f"{complaint} (ranks differ by {spread:.3g})")
