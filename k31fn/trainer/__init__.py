"""Training: state, step, loop and command line."""

from k31fn.trainer.cli import main
from k31fn.trainer.log import NonFiniteError
from k31fn.trainer.run import Corpus, Outcome, load_corpus, train
from k31fn.trainer.state import TrainState, abstract_state, init_state, make_optimizer, trained_specs
from k31fn.trainer.step import Metrics, heldout_loss, make_batches, make_step
from k31fn.trainer.stop import Stop

__all__ = [
    "Corpus",
    "Metrics",
    "NonFiniteError",
    "Outcome",
    "Stop",
    "TrainState",
    "abstract_state",
    "heldout_loss",
    "init_state",
    "load_corpus",
    "main",
    "make_batches",
    "make_optimizer",
    "make_step",
    "train",
    "trained_specs",
]
