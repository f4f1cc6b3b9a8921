"""The messages of one rank: to be sent, on their way, arrived."""

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
        self.schedule = schedule
        self.wire = wire
        self.axis = axis
        self.device = device
        self.index = own_index(axis)
        # In the order of all ranks, from which this one only leaves out what does not concern it:
        # so no two ranks can wait for each other.
        self._to_issue: deque[Message] = deque()
        for message in messages(schedule):
            if self.index in (self._rank(message.source), self._rank(message.to)):
                self._to_issue.append(message)
        self._outgoing: dict[Message, Sequence[Tensor]] = {}
        self._arriving: dict[Message, list[Callable[[], Tensor]]] = {}
        self._waits_of_sends: deque[Callable[[], None]] = deque()

    def progress(self) -> None:
        """Issues what can be: sends of what was given, and receives, up to the first send whose
        tensors were not given yet.

        Waits for the oldest sends if more than two per rank are on their way: their receivers ask
        for them without waiting for anything that comes later.
        """
        while self._to_issue:
            message = self._to_issue[0]
            source = self._rank(message.source)
            to = self._rank(message.to)
            if source == self.index:
                # Never past it: on one stream of NCCL a receive issued first would block the send
                # that its sender waits for.
                if message not in self._outgoing:
                    break
                for x in self._outgoing.pop(message):
                    self._waits_of_sends.append(send(x, self.axis, to))
            else:
                # A cotangent has the shapes of what it answers: the input of the stage it leaves.
                stage = message.to if message.kind == "forward" else message.source
                waits: list[Callable[[], Tensor]] = []
                for x in self.wire.message(stage):
                    waits.append(
                        recv(x.shape, self.axis, source, dtype=x.dtype, device=self.device)
                    )
                self._arriving[message] = waits
            self._to_issue.popleft()
        # Sends hold their tensors until they are waited for: without a bound, a whole step's.
        while len(self._waits_of_sends) > 2 * self.schedule.num_ranks:
            wait = self._waits_of_sends.popleft()
            wait()

    def give(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Hands a message over: to :meth:`progress`, or to the same rank."""
        if self._rank(message.to) == self.index:
            # The default binds this x: a plain closure would give the last one each time.
            self._arriving[message] = [lambda x=x: x for x in tensors]
        else:
            self._outgoing[message] = tensors

    def take(self, message: Message) -> list[Tensor]:
        """Waits for a message."""
        return [wait() for wait in self._arriving.pop(message)]

    def finish(self) -> None:
        """Issues what is left, and waits for all sends."""
        self.progress()
        assert not self._to_issue
        while self._waits_of_sends:
            wait = self._waits_of_sends.popleft()
            wait()

    def _rank(self, stage: int) -> int:
        return self.schedule.rank_of(stage)
