"""Checkpoints: :class:`Checkpointer` saves a tree of tensors in the background and restores it checked bit by bit.

Files are written by orbax in a process of its own (:mod:`k31fn.checkpoint.writer`, which also describes the folder);
the training process never imports orbax or jax. On several ranks the first one saves for all (:func:`collect`,
:func:`distribute`).
"""

from k31fn.checkpoint.checkpointer import Checkpointer, CheckpointError, DamagedCheckpointError
from k31fn.checkpoint.ranks import Held, collect, distribute

__all__ = ["CheckpointError", "Checkpointer", "DamagedCheckpointError", "Held", "collect", "distribute"]
