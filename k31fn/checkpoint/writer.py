"""The checkpoint writer: a program of its own, the only place that imports orbax (and with it jax).

``python writer.py '{"directory": ..., "buffer": 5, "keep": 2}'`` reads requests from stdin, one JSON object a line, and
answers each with one line: ``{}``, or ``{"error": "...", "damaged": true or false}``. Tensors travel in ``buffer``, an
inherited file descriptor of shared memory. The program is started by its path, not with ``-m``, and imports neither
torch nor the rest of k31fn, so it is ready in about two seconds and stays small.

A step is written under a temporary name, flushed to disk and renamed, so its name exists only when it is complete::

    30/manifest.json   dtype, shape and SHA-256 of each tensor, the caller's metadata, and a SHA-256 of all that
    30/state/          an ordinary orbax checkpoint of {name: array}
    40.unfinished/     being written, or left by a killed writer; the next writer removes it
    10.removed/        being deleted by retention; the next writer removes what is left
    20.damaged/        set aside by ``Checkpointer.latest(on_damage=...)``; never touched again

Requests: ``save`` (step, header), ``read`` (step, header), ``verify`` (step). ``header`` is the length of a JSON object
at the start of the buffer: ``tensors`` (for each name dtype, shape, and where its bytes are: offset, counted from
:func:`data_start`, and nbytes) and, for ``save``, ``metadata``. When stdin ends, since the training process closed it
or died, the writer finishes what it was asked to do and exits. It is started with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import importlib
import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ANSWER_BYTES", "DamagedError", "complete_steps", "data_start", "main", "read_manifest"]

MANIFEST = "manifest.json"
UNFINISHED, REMOVED = ".unfinished", ".removed"
ANSWER_BYTES = 4096  # PIPE_BUF: an answer of at most so many bytes is written and read whole

Header = dict[str, Any]


class DamagedError(Exception):
    """What was read is not what was written."""


def data_start(header: int) -> int:
    """Where the tensors start in the buffer, after a header of that length: at a multiple of 64, as the offsets are."""
    return -(-header // 64) * 64


def complete_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending. Imports nothing and reads no file."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


def read_manifest(directory: Path, step: int) -> Header:
    """The manifest of a complete step.

    Raises:
        DamagedError: it is missing, unreadable, or not what was written.
    """
    path = directory / str(step) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        recorded = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if recorded != _digest(_dump(manifest)) or manifest["step"] != step:
        raise DamagedError(f"{MANIFEST} is not what was written at this step: its checksum differs")
    return manifest


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _digests(arrays: Iterable[np.ndarray]) -> list[str]:
    """Of the bytes of each array; hashlib lets go of the GIL, so on several cores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda a: _digest(np.ascontiguousarray(a).reshape(-1).view(np.uint8)), arrays))


def _map_buffer(buffer: int, header: int) -> tuple[Header, dict[str, np.ndarray]]:
    """The header at the start of the shared memory, and its tensors as arrays in the same memory."""
    memory = mmap.mmap(buffer, 0)
    request = json.loads(memory[:header])
    data = np.frombuffer(memory, np.uint8)[data_start(header) :]
    arrays = {}
    for name, t in request["tensors"].items():
        flat = data[t["offset"] : t["offset"] + t["nbytes"]]
        arrays[name] = flat.view(np.dtype(t["dtype"])).reshape(t["shape"])
    return request, arrays


def _save(directory: Path, buffer: int, keep: int, step: int, header: int) -> None:
    request, arrays = _map_buffer(buffer, header)
    final, temporary = directory / str(step), directory / f"{step}{UNFINISHED}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        tensors = {
            name: {"dtype": t["dtype"], "shape": t["shape"], "sha256": digest}
            for (name, t), digest in zip(request["tensors"].items(), _digests(arrays.values()), strict=True)
        }
        _orbax_save(temporary / "state", arrays)
        manifest = {"step": step, "metadata": request["metadata"], "tensors": tensors}
        (temporary / MANIFEST).write_bytes(_dump({**manifest, "sha256": _digest(_dump(manifest))}))
        _flush_to_disk(temporary)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this is the room for the next try
        raise
    _flush(directory)
    _retire(directory, keep, step)


def _retire(directory: Path, keep: int, step: int) -> None:
    """Deletes all but the newest ``keep`` steps; never ``step``. Renamed first: half a step must not look complete."""
    for old in complete_steps(directory)[:-keep]:
        if old != step:
            removed = directory / f"{old}{REMOVED}"
            os.rename(directory / str(old), removed)
            shutil.rmtree(removed)


def _remove_leftovers(directory: Path) -> None:
    """What a killed writer left. The lock on the folder says that no writer is at work there."""
    for name in os.listdir(directory):
        step, suffix = os.path.splitext(name)
        if step.isdecimal() and suffix in (UNFINISHED, REMOVED):
            shutil.rmtree(directory / name)


def _flush_to_disk(folder: Path) -> None:
    """Files, then the folders that name them: orbax flushes its data files only."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            _flush(Path(parent, name))
        _flush(Path(parent))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(directory: Path, buffer: int, keep: int, step: int, header: int) -> None:
    request, arrays = _map_buffer(buffer, header)
    for name, array in _load(directory, step, list(request["tensors"])).items():
        arrays[name][...] = array


def _verify(directory: Path, buffer: int, keep: int, step: int) -> None:
    _load(directory, step, list(read_manifest(directory, step)["tensors"]))


def _load(directory: Path, step: int, names: list[str]) -> dict[str, np.ndarray]:
    """These tensors of a step, each equal to what was saved.

    Raises:
        DamagedError: some are not; names them.
    """
    declared = read_manifest(directory, step)["tensors"]
    empty = {n: np.empty(declared[n]["shape"], np.dtype(declared[n]["dtype"])) for n in names if _is_empty(declared[n])}
    full = [name for name in names if name not in empty]
    path = directory / str(step) / "state"
    try:
        arrays, cause = _orbax_restore(path, full), ""
    except Exception as error:  # orbax and tensorstore raise many kinds; read one by one to tell which tensors are hit
        if not path.exists():
            raise FileNotFoundError(f"step {step} was removed while it was read") from error
        arrays, cause = {}, f" ({type(error).__name__}: {_one_line(error)})"
        for name in full:
            with contextlib.suppress(Exception):
                arrays |= _orbax_restore(path, [name])
    digests = dict(zip(arrays, _digests(arrays.values()), strict=True))
    damaged = [name for name in full if not _as_declared(arrays.get(name), digests.get(name), declared[name])]
    if damaged:
        others = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        listed = ", ".join(repr(n) for n in damaged[:3])
        raise DamagedError(f"damaged: {listed}{others} of {len(names)} tensors differ from what was saved{cause}")
    return {**arrays, **empty}


def _as_declared(array: np.ndarray | None, digest: str | None, declared: Header) -> bool:
    return (
        array is not None
        and array.dtype == np.dtype(declared["dtype"])
        and list(array.shape) == declared["shape"]
        and digest == declared["sha256"]
    )


def _is_empty(tensor: Header) -> bool:
    return 0 in tensor["shape"]


def _one_line(error: BaseException, most: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]}..."


def _cause(error: BaseException) -> str:
    """What went wrong; of a full disk only that, where tensorstore says a paragraph."""
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else f"{type(error).__name__}: {_one_line(error, 700)}"


def _checkpointer() -> Any:
    """Not compressed: random mantissas shrink by 8% and take three times as long."""
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False))


def _orbax_save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Arrays without elements stay out: orbax refuses them, and the manifest holds all that they are."""
    import orbax.checkpoint as ocp

    if full := {name: a for name, a in arrays.items() if a.size}:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(full))


def _orbax_restore(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=as_numpy, partial_restore=True)
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=args) if names else {}


_OPERATIONS: dict[str, Callable[..., None]] = {"save": _save, "read": _read, "verify": _verify}


def main(options: str) -> int:
    """Answers requests until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    setup = json.loads(options)
    directory, buffer, keep = Path(setup["directory"]), setup["buffer"], setup["keep"]
    importlib.import_module("orbax.checkpoint")  # so that a broken installation shows at once
    if keep:
        _remove_leftovers(directory)
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        answer = {}
        try:
            _OPERATIONS[request.pop("op")](directory, buffer, keep, **request)
        except Exception as error:  # the other process says what it means
            damaged = isinstance(error, DamagedError)
            text = _one_line(error, 800) if damaged else _cause(error)
            answer = {"error": text, "damaged": damaged}
        with contextlib.suppress(BrokenPipeError):  # the training process is gone; stdin ends next
            os.write(answers, json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        gc.collect()  # orbax leaves cycles, and with them the tensors of this request
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))  # all is on disk; the exit handlers of jax and tensorstore take most of a second
