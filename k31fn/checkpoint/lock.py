"""The lock on a run's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from k31fn.checkpoint.together import CheckpointError

__all__ = ["lock"]

_WAIT_S = 30.0


def lock(directory: Path) -> int:
    """A descriptor that holds the directory's lock as long as this process or its writer has it open.

    Raises:
        CheckpointError: another process holds it, and goes on holding it.
        OSError: the directory cannot be written.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:  # perhaps the writer of a run that was killed, at its last save
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(f"{directory}: another process is writing checkpoints here") from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return descriptor  # a file system without locks; the lock only guards against a second run by mistake
            os.close(descriptor)
            raise
