"""The messages of one rank: made, on their way, arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k31fn.parallel.axis import Axes
from k31fn.parallel.collectives import own_index
from k31fn.parallel.pipeline.actions import Schedule
from k31fn.parallel.pipeline.carry import WireFormat
from k31fn.parallel.pipeline.messages import Message, messages
from k31fn.parallel.point_to_point import recv, send

__all__ = ["Mailbox"]


class Mailbox:
    """Issues a rank's part of the pipeline's messages, in their order.

    Args:
        schedule: whose messages.
        wire: says of which tensors a message is.
        axis: of the pipeline.
        device: on which messages arrive.
    """

    def __init__(
        self, schedule: Schedule, wire: WireFormat, axis: Axes, device: torch.device
    ) -> None:
        self.schedule, self.wire, self.axis, self.device = schedule, wire, axis, device
        self.index = own_index(axis)
        self._todo = deque(
            m for m in messages(schedule) if self.index in (self._rank(m.source), self._rank(m.to))
        )
        self._made: dict[Message, Sequence[Tensor]] = {}
        self._arriving: dict[Message, list[Callable[[], Tensor]]] = {}
        self._sent: deque[Callable[[], None]] = deque()

    def progress(self) -> None:
        """Issues what can be: sends of what was made, and receives, up to the first send that was
        not made yet.

        Waits for the oldest sends if more than two per rank are on their way: their receivers ask
        for them without waiting for anything that comes later.
        """
        while self._todo:
            message = self._todo[0]
            if self._rank(message.source) == self.index:
                if message not in self._made:
                    break
                self._sent.extend(
                    send(x, self.axis, self._rank(message.to)) for x in self._made.pop(message)
                )
            else:
                source = self._rank(message.source)
                likes = self.wire.message(
                    message.to if message.kind == "forward" else message.source
                )
                self._arriving[message] = [
                    recv(x.shape, self.axis, source, dtype=x.dtype, device=self.device)
                    for x in likes
                ]
            self._todo.popleft()
        while len(self._sent) > 2 * self.schedule.num_ranks:
            self._sent.popleft()()

    def give(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Hands a message over: to :meth:`progress`, or to the same rank."""
        if self._rank(message.to) == self.index:
            self._arriving[message] = [lambda x=x: x for x in tensors]
        else:
            self._made[message] = tensors

    def take(self, message: Message) -> list[Tensor]:
        """Waits for a message."""
        return [wait() for wait in self._arriving.pop(message)]

    def finish(self) -> None:
        """Issues what is left, and waits for all sends."""
        self.progress()
        assert not self._todo
        while self._sent:
            self._sent.popleft()()

    def _rank(self, stage: int) -> int:
        return self.schedule.rank_of(stage)
