"""Where a run's folder is while the run goes on: it may be renamed or removed meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from k31fn.trainer import folder as folders

__all__ = ["Place"]


class Place:
    """A run's folder, held by what it is and not by its name.

    Args:
        run: the folder, which exists.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._held = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
        self._config = ""  # of a test's run, which has none
        with contextlib.suppress(OSError):
            self._config = (run / folders.CONFIG).read_text(encoding="utf-8")

    def moved(self) -> str:
        """Where the folder is now; empty: where it was.

        A folder that was removed is made anew, and so is its ``config.json``, without which the run
        could not go on.

        Raises:
            OSError: it cannot be made.
        """
        place = self._find()
        self._restore_config(place)
        return "" if place == self._run and self._is_here(place) else str(place)

    def _find(self) -> Path:
        if self._is_here(self._run):
            return self._run
        with contextlib.suppress(OSError):
            # what Linux says of a descriptor; elsewhere a folder that was renamed counts as removed
            named = Path(os.readlink(f"/proc/self/fd/{self._held}"))
            if self._is_here(named):
                return named
        self._run.mkdir(parents=True, exist_ok=True)
        return self._run

    def _restore_config(self, run: Path) -> None:
        # a removal that met a file being written takes the files and leaves the folder
        if self._config and not (run / folders.CONFIG).exists():
            folders.write(run / folders.CONFIG, self._config)

    def close(self) -> None:
        """Lets go of the folder; a second call does nothing."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _is_here(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._held))
        except OSError:
            return False
