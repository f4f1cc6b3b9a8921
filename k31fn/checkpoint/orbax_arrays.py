"""Arrays in orbax checkpoints, each of its own process; only the writer imports this."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.type_handlers import NumpyHandler, create_type_handler_registry

__all__ = ["digests", "restore", "save", "write"]

# orbax starts another file at this size, and flushes one while it writes the next.
_FILE_BYTES = 128 << 20
# Nobody else changes the arrays while they are written; a copy would cost as much memory again, and
# half of the time.
_BORROW = create_type_handler_registry((np.ndarray, NumpyHandler(deepcopy_host_arrays=False)))


def digests(arrays: Iterable[np.ndarray]) -> list[str]:
    """SHA-256 of the bytes of each array.

    In threads: hashlib lets go of the GIL, so several cores work.
    """
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, arrays))


def save(path: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """Writes arrays as :func:`write` does, and gives their digests, taken meanwhile."""
    with ThreadPoolExecutor() as pool:
        pending = pool.map(_digest, arrays.values())
        # A rank may own nothing, and orbax refuses an empty tree.
        if arrays:
            write(path, arrays)
        return list(pending)


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays, none of them empty, which must stay as they are until it returns."""
    with _checkpointer() as checkpointer:
        checkpointer.save(
            path, args=ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_BYTES)
        )


def restore(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads some of the arrays, and nothing else but the list of them."""
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    # ``partial_restore``: else orbax wants a place for every array that was saved.
    item = dict.fromkeys(as_numpy, 0)
    args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=args)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _checkpointer() -> Any:
    """Orbax's, without compression: random mantissas shrink by 8% and take three times as long."""
    how: Any = {"use_ocdbt": True, "use_zarr3": True, "use_compression": False}
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how, type_handler_registry=_BORROW))
