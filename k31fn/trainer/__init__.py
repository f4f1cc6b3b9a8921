"""Training: state, step, loop and command line."""

from k31fn.trainer.adapter_base import check_base
from k31fn.trainer.cli import main
from k31fn.trainer.corpus import Corpus, load_corpus
from k31fn.trainer.evaluation import heldout_loss
from k31fn.trainer.layout import RankLayout, lay_out, make_optimizer, trained_specs
from k31fn.trainer.log import NonFiniteError, PlanError
from k31fn.trainer.ranks.stop import Stop
from k31fn.trainer.run import Outcome, train
from k31fn.trainer.state import (
    TrainState,
    abstract_state,
    checkpoint_layout,
    completed,
    first_state,
    held_by,
    init_state,
    saved,
)
from k31fn.trainer.step import Metrics, make_batches, make_step, rows_at

__all__ = [
    "Corpus",
    "Metrics",
    "NonFiniteError",
    "Outcome",
    "PlanError",
    "RankLayout",
    "Stop",
    "TrainState",
    "abstract_state",
    "check_base",
    "checkpoint_layout",
    "completed",
    "first_state",
    "held_by",
    "heldout_loss",
    "init_state",
    "lay_out",
    "load_corpus",
    "main",
    "make_batches",
    "make_optimizer",
    "make_step",
    "rows_at",
    "saved",
    "train",
    "trained_specs",
]


def __dir__() -> list[str]:
    return __all__
