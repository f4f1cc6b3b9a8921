"""Pipeline parallelism: schedules as data, and what runs them.

    table = schedule("1f1b", num_ranks=4, num_micro_batches=8) print(bubble(timeline(table))) result
    = run(table, [stage], [params], batches, axis=axes.pp, carries=carries)      # on each rank

* :func:`schedule`: a table of actions per rank; :func:`check`, :func:`timeline`, :func:`bubble`
  look at one.
* :func:`run`: performs a rank's row of a table, on real ranks (threads or processes);
  :func:`check_stages`: whether stages fit a schedule that splits the backward.
* :class:`Carry`, :class:`Wire`: what a stage hands on, and which of it must be sent.
* :func:`stage_ranges`: where layers are cut.
"""

from k31fn.parallel.pipeline.actions import Action, Kind, Schedule
from k31fn.parallel.pipeline.carry import Carry, Wire
from k31fn.parallel.pipeline.cuts import stage_ranges
from k31fn.parallel.pipeline.engine import Result, Stage, StageOutput, run
from k31fn.parallel.pipeline.messages import Message, messages
from k31fn.parallel.pipeline.schedules import ScheduleKind, schedule
from k31fn.parallel.pipeline.timeline import DURATIONS, Timed, bubble, check, timeline
from k31fn.parallel.pipeline.work import check_stages

__all__ = [
    "DURATIONS",
    "Action",
    "Carry",
    "Kind",
    "Message",
    "Result",
    "Schedule",
    "ScheduleKind",
    "Stage",
    "StageOutput",
    "Timed",
    "Wire",
    "bubble",
    "check",
    "check_stages",
    "messages",
    "run",
    "schedule",
    "stage_ranges",
    "timeline",
]
