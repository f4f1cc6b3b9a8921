"""Training: state, step, loop and command line."""

from k31fn.trainer.adapter_base import check_base
from k31fn.trainer.cli import main
from k31fn.trainer.evaluation import heldout_loss
from k31fn.trainer.layout import Layout, lay_out, make_optimizer, trained_specs
from k31fn.trainer.log import NonFiniteError
from k31fn.trainer.ranks.stop import Stop
from k31fn.trainer.run import Corpus, Outcome, load_corpus, train
from k31fn.trainer.state import (
    TrainState,
    abstract_state,
    completed,
    first_state,
    held_by,
    init_state,
    layout_of,
    saved,
)
from k31fn.trainer.step import Metrics, make_batches, make_step, rows_at

__all__ = [
    "Corpus",
    "Layout",
    "Metrics",
    "NonFiniteError",
    "Outcome",
    "Stop",
    "TrainState",
    "abstract_state",
    "check_base",
    "completed",
    "first_state",
    "held_by",
    "heldout_loss",
    "init_state",
    "lay_out",
    "layout_of",
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
