"""Checkpoints: :class:`Checkpointer` saves a tree of tensors in the background and restores it
checked bit by bit.

On several ranks each writes what it owns, and a state saved on one mesh is restored on any other
(:class:`StateLayout`). Files are written by orbax in a process of each rank's own
(:mod:`k31fn.checkpoint.writer`); :mod:`k31fn.checkpoint.step_folders` says what lies where. The
training process never imports orbax or jax.
"""

from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.errors import CheckpointError, DamagedCheckpointError, NotSavedError
from k31fn.checkpoint.state_layout import Holders, StateLayout

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpointError",
    "Holders",
    "NotSavedError",
    "StateLayout",
]


def __dir__() -> list[str]:
    return __all__
