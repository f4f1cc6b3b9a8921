"""The schedules: 1F1B, interleaved 1F1B and zero bubble.

| kind | idle time of a rank | residual sets alive on a rank |
|---|---|---|
| ``1f1b`` | ``(p - 1) (F + B)`` | ``p - rank`` |
| ``interleaved`` | ``(p - 1) (F + B)`` of a chunk | ``(v - 1) p + 2 (p - rank) - 1`` |
| ``zero_bubble`` | ``(p - 1) (F + I - W)`` | ``p`` |

with ``p`` ranks, ``v`` chunks per rank (each with its own residual sets), and the durations of a
forward F and of a backward B = I (input) + W (weight). The last holds for at least ``p``
micro-batches.

Sources: PipeDream-flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473; ZB-H1 of Qi et al. 2024,
arXiv 2401.10241.
"""

from __future__ import annotations

from typing import Literal, get_args

from k31fn.parallel.pipeline.actions import Action, Schedule

__all__ = ["ScheduleKind", "schedule"]

ScheduleKind = Literal["1f1b", "interleaved", "zero_bubble"]


def schedule(kind: str, num_ranks: int, num_micro_batches: int, *, num_chunks: int = 1) -> Schedule:
    """The table of actions.

    Args:
        kind: a :data:`ScheduleKind`.
        num_ranks: ranks of the pipeline.
        num_micro_batches: micro-batches of a step.
        num_chunks: stages per rank; more than one only when interleaved.

    Raises:
        ValueError: an unknown kind, a size below 1, chunks without interleaving or interleaving
            without chunks, or interleaved micro-batches that are no multiple of the ranks; names
            the nearest valid values.
    """
    if kind not in get_args(ScheduleKind):
        raise ValueError(
            f"schedule={kind!r} unknown; use one of {', '.join(get_args(ScheduleKind))}"
        )
    sizes = {
        "num_ranks": num_ranks,
        "num_micro_batches": num_micro_batches,
        "num_chunks": num_chunks,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"schedule: {name}={size} must be at least 1")
    if kind != "interleaved" and num_chunks > 1:
        raise ValueError(
            f"schedule={kind!r} has one stage per rank, got num_chunks={num_chunks}; use "
            "'interleaved'"
        )
    # Two names of one table would be two keys of whatever is cached or measured by kind.
    if kind == "interleaved" and num_chunks == 1:
        raise ValueError(
            "schedule='interleaved' with num_chunks=1 is '1f1b'; use that, or num_chunks=2 or more"
        )
    # Micro-batches go round in groups of the ranks; a group that is not full would leave holes.
    if kind == "interleaved" and num_micro_batches % num_ranks:
        below = num_micro_batches // num_ranks * num_ranks
        above = below + num_ranks
        near = f"{below}, {above}" if below else f"{above}"
        raise ValueError(
            f"num_micro_batches={num_micro_batches} is no multiple of the pipeline's {num_ranks} "
            f"ranks, as schedule='interleaved' needs; nearest: {near}"
        )
    row_of = {
        "1f1b": _one_forward_one_backward,
        "interleaved": _interleaved,
        "zero_bubble": _zero_bubble,
    }[kind]
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        rows.append(row_of(rank, num_ranks, num_chunks, num_micro_batches))
    return Schedule(num_ranks, num_chunks, num_micro_batches, tuple(rows))


def _one_forward_one_backward(
    rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> tuple[Action, ...]:
    forwards = [Action("forward", i, rank) for i in range(num_micro_batches)]
    backwards = [Action("backward", i, rank) for i in range(num_micro_batches)]
    # As many ahead as there are ranks behind: the first cotangent then arrives just in time.
    return _alternate(forwards, backwards, num_ranks - 1 - rank)


def _interleaved(
    rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> tuple[Action, ...]:
    """A row in which micro-batches go in groups of ``num_ranks``: all of a group through chunk 0,
    then through chunk 1, ...
    """
    forwards: list[Action] = []
    backwards: list[Action] = []
    for n in range(num_micro_batches * num_chunks):
        group, within_group = divmod(n, num_ranks * num_chunks)
        chunk, i = divmod(within_group, num_ranks)
        micro_batch = group * num_ranks + i
        forwards.append(Action("forward", micro_batch, chunk * num_ranks + rank))
        # The backward meets the chunks in the opposite order.
        last_first = num_chunks - 1 - chunk
        backwards.append(Action("backward", micro_batch, last_first * num_ranks + rank))
    # Twice the ranks behind: a micro-batch has passed them on its way out and back before its
    # cotangent comes; and all the chunks of a group but the last.
    ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks
    return _alternate(forwards, backwards, ahead)


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """A row of ``ahead`` forwards, then one forward and one backward in turn, then the backwards
    that are left.
    """
    row = forwards[:ahead]
    for i, action in enumerate(forwards[ahead:]):
        row += [action, backwards[i]]
    return tuple(row + backwards[max(0, len(forwards) - ahead) :])


def _zero_bubble(
    rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> tuple[Action, ...]:
    """A row of 1F1B in which rank ``r`` puts off ``r`` weight passes, to fill the time in which it
    would wait at the end.

    A rank that is fewer forwards ahead than the first one puts off as many more weight passes, so
    all hold as many residual sets.
    """
    ahead = num_ranks - 1 - rank
    row = [Action("forward", i, rank) for i in range(min(ahead, num_micro_batches))]
    for i in range(num_micro_batches):
        if i + ahead < num_micro_batches:
            row.append(Action("forward", i + ahead, rank))
        row.append(Action("backward_input", i, rank))
        if i >= rank:
            # The oldest first: its residuals are freed soonest.
            row.append(Action("backward_weight", i - rank, rank))
    done = max(0, num_micro_batches - rank)
    row += [Action("backward_weight", i, rank) for i in range(done, num_micro_batches)]
    return tuple(row)
