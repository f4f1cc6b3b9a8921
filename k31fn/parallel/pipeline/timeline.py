"""A schedule in time: when each action runs, if all take as long as is said."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from k31fn.parallel.pipeline.actions import Action, Kind, Schedule

__all__ = ["DURATIONS", "Timed", "bubble", "check", "dependencies", "timeline"]

DURATIONS: dict[Kind, float] = {
    "forward": 1.0,
    "backward": 2.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
}
"""Every product of a forward has two in the backward: one for its input, one for its weight."""


class Timed(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


def dependencies(action: Action, schedule: Schedule) -> list[tuple[Action, ...]]:
    """What must have ended before: of each tuple one of the actions, those that the schedule
    has.
    """
    i, s, last = action.micro_batch, action.stage, schedule.num_stages - 1
    match action.kind:
        case "forward":
            return [(Action("forward", i, s - 1),)] if s else []
        case "backward" | "backward_input":
            after = (
                [(Action("backward", i, s + 1), Action("backward_input", i, s + 1))]
                if s < last
                else []
            )
            return [(Action("forward", i, s),), *after]
        case "backward_weight":
            return [(Action("backward_input", i, s),)]


def timeline(
    schedule: Schedule, durations: Mapping[Kind, float] = DURATIONS, *, transfer: float | int = 0.0
) -> tuple[tuple[Timed, ...], ...]:
    """The actions of each rank in time: each starts when its rank is free and what it needs is
    there.

    Args:
        schedule: the table.
        durations: of an action, by kind.
        transfer: from the end of an action until another rank has what it gave.

    Raises:
        ValueError: the ranks wait for each other for ever; names where each stands.
    """
    ends: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in schedule.rows]

    def ready(action: Action) -> float | None:
        times = [0.0]
        for some in dependencies(action, schedule):
            done = [ends[a] + transfer * (a.stage != action.stage) for a in some if a in ends]
            if not done:
                return None
            times += done
        return max(times)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(rows[rank]) < len(row):
                action = row[len(rows[rank])]
                at = ready(action)
                if at is None:
                    break
                start = max(at, rows[rank][-1].end if rows[rank] else 0.0)
                ends[action] = start + durations[action.kind]
                rows[rank].append(Timed(action, start, ends[action]))
                moved = True
    stuck = {r: row[len(rows[r])] for r, row in enumerate(schedule.rows) if len(rows[r]) < len(row)}
    if stuck:
        where = "; ".join(f"rank {r} at {action}" for r, action in stuck.items())
        raise ValueError(f"schedule: its ranks wait for each other for ever: {where}")
    return tuple(map(tuple, rows))


def bubble(timed: tuple[tuple[Timed, ...], ...]) -> float:
    """The share of the ranks' time in which they do nothing."""
    busy = sum(t.end - t.start for row in timed for t in row)
    return 1 - busy / (len(timed) * max(t.end for row in timed for t in row))


@functools.lru_cache(maxsize=16)
def check(schedule: Schedule) -> None:
    """Refuses a table that is no schedule.

    Raises:
        ValueError: an action on a rank that does not hold its stage, one that is missing, done
            twice or unknown, or ranks that wait for each other for ever.
    """
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action in seen:
                raise ValueError(f"schedule: {action} is done twice; each action once")
            known = (
                0 <= action.stage < schedule.num_stages
                and 0 <= action.micro_batch < schedule.num_micro_batches
            )
            if not known or schedule.rank_of(action.stage) != rank:
                raise ValueError(
                    f"schedule: rank {rank} has {action}; its stages are {schedule.stages_of(rank)}"
                )
            seen.add(action)
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_micro_batches):
            kinds = {a.kind for a in _of(i, stage) if a in seen}
            if kinds not in (
                {"forward", "backward"},
                {"forward", "backward_input", "backward_weight"},
            ):
                raise ValueError(
                    f"schedule: stage {stage} has {sorted(kinds)} of micro-batch {i}; needed is a "
                    "forward, and either "
                    "a backward or both of its parts"
                )
    timeline(schedule)


def _of(micro_batch: int, stage: int) -> list[Action]:
    return [Action(kind, micro_batch, stage) for kind in DURATIONS]
