"""A schedule in time: when each action runs, if all take as long as is said."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from k31fn.parallel.pipeline.actions import Action, Kind, Schedule

__all__ = ["DURATIONS", "bubble", "check", "timeline"]

DURATIONS: dict[Kind, float] = {
    "forward": 1.0,
    "backward": 2.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
}
"""Every product of a forward has two in the backward: one for its input, one for its weight."""


class _Timed(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


def _dependencies(action: Action, schedule: Schedule) -> list[tuple[Action, ...]]:
    """The actions that must have ended before: of each tuple one, whichever the schedule has."""
    i = action.micro_batch
    s = action.stage
    match action.kind:
        case "forward":
            return [(Action("forward", i, s - 1),)] if s else []
        case "backward" | "backward_input":
            needed: list[tuple[Action, ...]] = [(Action("forward", i, s),)]
            if s + 1 < schedule.num_stages:
                # A stage may split its backward or not: either gives the cotangent.
                needed.append((Action("backward", i, s + 1), Action("backward_input", i, s + 1)))
            return needed
        case "backward_weight":
            return [(Action("backward_input", i, s),)]


def timeline(
    schedule: Schedule, durations: Mapping[Kind, float] = DURATIONS, *, transfer: float | int = 0.0
) -> tuple[tuple[_Timed, ...], ...]:
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
    rows: list[list[_Timed]] = [[] for _ in schedule.rows]

    def ready(action: Action) -> float | None:
        """The time at which what the action needs is there; None: nobody knows yet."""
        time = 0.0
        for alternatives in _dependencies(action, schedule):
            done = [a for a in alternatives if a in ends]
            if not done:
                return None
            for a in done:
                arrival = ends[a] + (transfer if a.stage != action.stage else 0.0)
                time = max(time, arrival)
        return time

    # Rounds over the ranks, each going as far as it can: a round in which none moves is the end,
    # or a schedule that cannot go on.
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
                rows[rank].append(_Timed(action, start, ends[action]))
                moved = True
    stuck: list[str] = []
    for rank, row in enumerate(schedule.rows):
        if len(rows[rank]) < len(row):
            stuck.append(f"rank {rank} at {row[len(rows[rank])]}")
    if stuck:
        raise ValueError(f"schedule: its ranks wait for each other for ever: {'; '.join(stuck)}")
    return tuple(map(tuple, rows))


def bubble(timed: tuple[tuple[_Timed, ...], ...]) -> float:
    """The share of the ranks' time in which they do nothing."""
    busy = 0.0
    end = 0.0
    for row in timed:
        for action in row:
            busy += action.end - action.start
            end = max(end, action.end)
    # Of the whole step: a rank that waits at its end waits too.
    return 1 - busy / (len(timed) * end)


# Cached, for a step checks its schedule each time; a run has few of them.
@functools.lru_cache(maxsize=16)
def check(schedule: Schedule) -> None:
    """Refuses a table that is no schedule.

    Raises:
        ValueError: an action on a rank that does not hold its stage, one that is missing, done
            twice or unknown, or ranks that wait for each other for ever.
    """
    actions: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action in actions:
                raise ValueError(f"schedule: {action} is done twice; each action once")
            known_stage = 0 <= action.stage < schedule.num_stages
            known = known_stage and 0 <= action.micro_batch < schedule.num_micro_batches
            if not known or schedule.rank_of(action.stage) != rank:
                raise ValueError(
                    f"schedule: rank {rank} has {action}; its stages are {schedule.stages_of(rank)}"
                )
            actions.add(action)
    complete = ({"forward", "backward"}, {"forward", "backward_input", "backward_weight"})
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_micro_batches):
            kinds = {kind for kind in DURATIONS if Action(kind, i, stage) in actions}
            if kinds not in complete:
                raise ValueError(
                    f"schedule: stage {stage} has {sorted(kinds)} of micro-batch {i}; needed is a "
                    "forward, and either a backward or both of its parts"
                )
    timeline(schedule)  # refuses ranks that wait for each other
