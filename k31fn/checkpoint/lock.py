"""The lock on a run's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from k31fn.checkpoint.errors import CheckpointError

__all__ = ["lock"]

_WAIT_S = 30.0  # longer than the writer of a killed run waits for parts (`writer._WILL_S`)


def lock(directory: Path, on_wait: Callable[[str], object]) -> int:
    """A descriptor that holds the directory's lock as long as this process or its writer has it
    open.

    Args:
        directory: which.
        on_wait: is told at once if another process holds it, and how long that one has to let go of
            it.

    Raises:
        CheckpointError: another process holds it, and goes on holding it.
        OSError: the directory cannot be written.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _WAIT_S
    busy = f"{directory}: another process is writing checkpoints here"
    waits = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:  # perhaps the writer of a run that was killed, at its last save
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(
                    f"{busy}; end that run, or start one in another folder"
                ) from None
            if not waits:
                on_wait(f"{busy}; waiting for its end, {_WAIT_S:.0f} s at most")
            waits = True
            time.sleep(0.1)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                # a file system without locks; the lock only guards against a second run by mistake
                return descriptor
            os.close(descriptor)
            raise
