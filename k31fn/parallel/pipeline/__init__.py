"""Pipeline parallelism: schedules as data, and what runs them.

    table = schedule("1f1b", num_ranks=4, num_micro_batches=8)
    result = run(table, [stage], [params], batches, axis=axes.pp, carries=carries)  # on each rank

* :func:`schedule`: a table of actions per rank; :func:`check` refuses a wrong one, and
  ``bubble(timeline(table))`` is the share of time in which ranks do nothing.
* :func:`run`: performs a rank's row of a table, on real ranks (threads or processes);
  :func:`check_stages`: whether stages fit a schedule that splits the backward.
* :class:`StageCarry`, :class:`WireFormat`: what a stage hands on, and which of it must be sent.
* :func:`stage_ranges`: where layers are cut.
"""

from k31fn.parallel.pipeline.actions import Action, Schedule
from k31fn.parallel.pipeline.carry import StageCarry, WireFormat
from k31fn.parallel.pipeline.cuts import stage_ranges
from k31fn.parallel.pipeline.engine import PipelineResult, Stage, StageOutput, run
from k31fn.parallel.pipeline.schedules import ScheduleKind, schedule
from k31fn.parallel.pipeline.stage_check import check_stages
from k31fn.parallel.pipeline.timeline import bubble, check, timeline

__all__ = [
    "Action",
    "PipelineResult",
    "Schedule",
    "ScheduleKind",
    "Stage",
    "StageCarry",
    "StageOutput",
    "WireFormat",
    "bubble",
    "check",
    "check_stages",
    "run",
    "schedule",
    "stage_ranges",
    "timeline",
]
