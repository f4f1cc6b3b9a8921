"""Checkpoints: :class:`Checkpointer` saves a tree of tensors in the background and restores it
checked bit by bit.

On several ranks each writes what it owns, and a state saved on one mesh is restored on any other
(:class:`Layout`). Files are written by orbax in a process of each rank's own
(:mod:`k31fn.checkpoint.writer`; what lies where: :mod:`k31fn.checkpoint.files`); the training
process never imports orbax or jax.
"""

from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.layout import Held, Layout
from k31fn.checkpoint.together import CheckpointError, DamagedCheckpointError, NotSavedError

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpointError",
    "Held",
    "Layout",
    "NotSavedError",
]
