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

_FILE_BYTES = (
    128 << 20
)  # orbax starts another file at this size, and flushes one while it writes the next
# Nobody else changes the arrays while they are written; a copy would cost as much memory again, and
# half of the time.
_BORROW = create_type_handler_registry((np.ndarray, NumpyHandler(deepcopy_host_arrays=False)))


def digests(arrays: Iterable[np.ndarray]) -> list[str]:
    """SHA-256 of the bytes of each array; hashlib lets go of the GIL, so on several cores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, arrays))


def save(path: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """As :func:`write`, and gives their digests, taken meanwhile from the same memory."""
    with ThreadPoolExecutor() as pool:
        found = pool.map(_digest, arrays.values())
        if arrays:
            write(path, arrays)
        return list(found)


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays, none of them empty, which must stay as they are until it returns."""
    with _checkpointer() as checkpointer:
        checkpointer.save(
            path, args=ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_BYTES)
        )


def restore(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads some of the arrays, and nothing else but the list of them."""
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(as_numpy, 0), restore_args=as_numpy, partial_restore=True
    )
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=args)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _checkpointer() -> Any:
    """Not compressed: random mantissas shrink by 8% and take three times as long."""
    how: Any = {"use_ocdbt": True, "use_zarr3": True, "use_compression": False}
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how, type_handler_registry=_BORROW))
