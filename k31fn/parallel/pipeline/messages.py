"""The messages between the ranks of a pipeline, and their order."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from k31fn.parallel.pipeline.actions import Action, Schedule
from k31fn.parallel.pipeline.timeline import timeline

__all__ = ["Message", "messages"]


class Message(NamedTuple):
    """The tensors that cross between two ranks at once.

    Attributes:
        kind: the input of a stage, or the cotangent of its output.
        micro_batch: of which.
        source: the stage that sends it.
        to: the stage that takes it, ``source`` + 1 or - 1.
    """

    kind: Literal["forward", "backward"]
    micro_batch: int
    source: int
    to: int

    @classmethod
    def sent_by(cls, action: Action, schedule: Schedule) -> Message | None:
        """The message to another stage that an action gives."""
        i = action.micro_batch
        s = action.stage
        match action.kind:
            case "forward":
                return cls("forward", i, s, s + 1) if s + 1 < schedule.num_stages else None
            case "backward" | "backward_input":
                # Of a split backward the input's part sends, at once; nobody needs the weight's.
                return cls("backward", i, s, s - 1) if s else None
            case "backward_weight":
                return None

    @classmethod
    def taken_by(cls, action: Action, schedule: Schedule) -> Message | None:
        """The message from another stage that an action needs."""
        i = action.micro_batch
        s = action.stage
        match action.kind:
            case "forward":
                return cls("forward", i, s - 1, s) if s else None
            case "backward" | "backward_input":
                return cls("backward", i, s + 1, s) if s + 1 < schedule.num_stages else None
            case "backward_weight":
                return None


# Cached as the check of a schedule is: each step asks again.
@functools.lru_cache(maxsize=16)
def messages(schedule: Schedule) -> tuple[Message, ...]:
    """Everything that travels between ranks, in an order in which every rank can issue its part of
    it.

    The order is that of the ends of the actions that send, on a timeline. So what a sender needs
    for a message comes before it in the order, and if all ranks issue their sends and receives in
    it, the first message that has not arrived can always be produced and taken, however little a
    send or a receive buffers: also where each blocks the ones behind it, as on one stream of NCCL.
    """
    if schedule.num_ranks == 1:
        return ()  # its stages hand over to each other
    by_end: list[tuple[float, int, Message]] = []
    for rank, row in enumerate(timeline(schedule)):
        for action, _, end in row:
            message = Message.sent_by(action, schedule)
            if message is not None:
                by_end.append((end, rank, message))
    # The rank breaks ties: every rank sorts for itself, and all must find the same order.
    return tuple(message for *_, message in sorted(by_end))
