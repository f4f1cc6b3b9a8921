"""What can go wrong with a checkpoint."""

from __future__ import annotations

__all__ = ["CheckpointError", "DamagedCheckpointError", "NotSavedError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Nothing that was complete before has been lost."""


class DamagedCheckpointError(CheckpointError):
    """A complete checkpoint no longer holds what was saved."""


class NotSavedError(CheckpointError):
    """A step was not saved, or what comes after saving it failed.

    Attributes:
        cause: what failed, without the step.
    """

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause
