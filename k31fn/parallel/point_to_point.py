"""Messages from one rank of an axis to another.

    sent = send(x, axes.pp, to=1)                       on rank 0
    arriving = recv((4, 8), axes.pp, source=0, dtype=x.dtype, device=x.device)      on rank 1
    x = arriving()

Both return at once. What two ranks send each other arrives in the order in which it was sent, and
must be asked for in that order. A message has no gradient: who sends it carries the cotangent back,
as :mod:`k31fn.parallel.pipeline` does. On real ranks only: in the simulated mesh all ranks run the
same program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k31fn.parallel.axis import Axes, Channel, active, axis_names
from k31fn.parallel.collective_record import Event, current_records
from k31fn.parallel.collectives import axis_size, own_index

__all__ = ["recv", "send"]


def send(x: Tensor, axis: Axes, to: int) -> Callable[[], None]:
    """Sends ``x``, which must not be changed before the function returned here has been called.

    Args:
        x: what travels.
        axis: along which; ranks elsewhere on it are not concerned.
        to: index of the receiver on ``axis``.

    Raises:
        ValueError: simulated ranks, or an index that is this rank's or outside the axis.
    """
    channel = _channel("send", axis, to)
    names = axis_names(active(axis))
    _note("issue", "send", names, x)
    # Without its graph: a message has no gradient, and the receiver must not hold the sender's.
    finish = channel.send(x.detach(), to)

    def wait() -> None:
        finish()
        _note("wait", "send", names, x)

    return wait


def recv(
    shape: Sequence[int], axis: Axes, source: int, *, dtype: torch.dtype, device: torch.device | str
) -> Callable[[], Tensor]:
    """Asks for the next message of ``source``; the function returned waits for it.

    Args:
        shape: of the message.
        axis: along which.
        source: index of the sender on ``axis``.
        dtype: of the message.
        device: where it is to lie.

    Raises:
        ValueError: as in :func:`send`; on threads also, when waited for, a message of another shape
            or dtype.
    """
    channel = _channel("recv", axis, source)
    names = axis_names(active(axis))
    # Made at once, so that the backend can write while the rank computes.
    into = torch.empty(tuple(shape), dtype=dtype, device=device)
    _note("issue", "recv", names, into)
    finish = channel.recv(into, source)

    def wait() -> Tensor:
        y = finish()
        _note("wait", "recv", names, y)
        return y

    return wait


def _channel(what: str, axis: Axes, other: int) -> Channel:
    index = own_index(axis)
    size = axis_size(axis)
    # A message to itself would wait for itself on a backend that does not buffer.
    if other == index or not 0 <= other < size:
        raise ValueError(
            f"{what}: rank {other} from rank {index} of {size}; name another rank of the axis"
        )
    axes = active(axis)
    assert axes[0].host is not None
    return axes[0].host.channel(axis_names(axes))


def _note(what: str, kind: str, names: tuple[str, ...], x: Tensor) -> None:
    for record in current_records():
        record.events.append(Event(what, kind, names, x.nbytes))
