"""The checkpoint writer of a rank: a program of its own, the only place that runs orbax (and with
it jax).

It reads requests from stdin, one JSON object a line, and answers each with one line: ``{}``, or
``{"error": "...", "damaged": true or false}``. Tensors travel in an inherited file descriptor of
shared memory. Neither torch nor the rest of k31fn is imported, so the program is ready in about two
seconds and stays small.

Writers do not know each other. Each saves what its rank owns as an orbax checkpoint of one process;
the ranks tell each other, over their own process group, when all are through, and then the first
one's writer commits the step (:mod:`k31fn.checkpoint.files` describes the folder). The other way,
one checkpoint of global arrays that the writers make together over ``jax.distributed``, was tried
with 2 and 4 writers (orbax 0.12.8, jax 0.10.2). Its service starts in 1.2 s and a barrier takes 1
ms, but a rank that cannot write (a full disk) leaves the others in a collective until its process
ends (45 s where it lived so long) and one of them is aborted, so each failure costs the group; a
tensor of one pipeline stage needs zeros of its size on the ranks of all others; a rank that
restores a slice does not get the bytes around it, and cannot tell whether the shard still has its
checksum; and a run needs one more port on its hosts.

Requests (``header``: where a JSON object lies in the shared memory, as offset and length):

- ``write`` (step, header): saves the header's ``slots`` in the step's unfinished folder.
- ``commit`` (step, header, scores): makes the step complete; the first rank's only. ``scores``
  decide what is kept.
- ``will`` (the same): to commit when stdin ends before a ``commit`` came, if within 20 s all parts
  are there.
- ``read`` (step, header): fills the header's ``slots`` from whatever ranks have written.
- ``verify`` (step, share): reads and checks one share, as number and count, of all that is there.
- ``touch``: makes the system provide the shared memory, so that the first copy into it is as fast
  as later ones.

A slot is a dtype, the box of the tensor that it is (start and shape), and its place (offset and
nbytes). When stdin ends, since the training process closed it or died, the writer finishes what it
was asked to do and exits: a save whose copies had been made survives the training processes. It is
started with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k31fn.checkpoint import arrays, files, reading
from k31fn.checkpoint.blocks import Box, cut

__all__ = ["Setup", "answer", "main"]

_WILL_S = 20.0  # less than the next run waits for the lock
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not name


@dataclass(frozen=True)
class Setup:
    """What a writer is told when it starts.

    Attributes:
        directory: of the checkpoints.
        buffer: file descriptor of the shared memory.
        rank: whose writer it is.
        ranks: how many there are.
        token: of the run of training; empty: the writer only reads.
        keep: the fields of :class:`files.Keep`.
    """

    directory: str
    buffer: int
    rank: int
    ranks: int
    token: str
    keep: tuple[int, int, int]

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory)


def _write(setup: Setup, step: int, header: list[int]) -> None:
    request, slots = _map_buffer(setup, header)
    folder = files.unfinished(setup.path, step, setup.token) / str(setup.rank)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        blocks, shards = {}, {}
        for name, array in slots.items():
            box = _box(request["slots"][name])
            pieces = [
                f"{name}.{number}"
                for number in range(len(list(cut(box, array.itemsize, files.BLOCK_BYTES))))
            ]
            for key, piece in zip(pieces, cut(box, array.itemsize, files.BLOCK_BYTES), strict=True):
                blocks[key] = array[(*piece.inside(box), ...)]  # an array, also of no dimensions
            shards[name] = {"start": box.start, "shape": box.shape, "sha256": pieces}
        digests = dict(zip(blocks, arrays.save(folder / "state", blocks), strict=True))
        for shard in shards.values():
            shard["sha256"] = [digests[key] for key in shard["sha256"]]
        files.finish_part(folder, shards)
    except BaseException:
        shutil.rmtree(
            folder, ignore_errors=True
        )  # on a full disk this is the room for the next try
        raise


def _commit(setup: Setup, step: int, header: list[int], scores: dict[str, float]) -> None:
    request, _ = _map_buffer(setup, header)
    try:
        files.commit(
            setup.path, step, setup.token, setup.ranks, request["tensors"], request["metadata"]
        )
    except BaseException:
        shutil.rmtree(files.unfinished(setup.path, step, setup.token), ignore_errors=True)
        raise
    files.retire(
        setup.path, step, {int(s): score for s, score in scores.items()}, files.Keep(*setup.keep)
    )


def _execute(setup: Setup, will: dict[str, Any]) -> None:
    """Commits what the training processes did not live to commit."""
    folder, until = (
        files.unfinished(setup.path, will["step"], setup.token),
        time.monotonic() + _WILL_S,
    )
    while folder.exists() and time.monotonic() < until:
        if files.all_parts(folder, setup.ranks):
            _commit(setup, **will)
        else:
            time.sleep(0.1)


def _read(setup: Setup, step: int, header: list[int]) -> None:
    request, slots = _map_buffer(setup, header)
    wanted = {name: _box(slot) for name, slot in request["slots"].items()}
    blocks = reading.blocks_of(files.read_manifest(setup.path, step), wanted)
    for block, array in reading.load(setup.path / str(step), blocks):
        part = block.box.overlap(wanted[block.name])
        slots[block.name][part.inside(wanted[block.name])] = array[part.inside(block.box)]


def _verify(setup: Setup, step: int, share: list[int]) -> None:
    manifest = files.read_manifest(setup.path, step)
    whole = {
        name: Box((0,) * len(t["shape"]), tuple(t["shape"]))
        for name, t in manifest["tensors"].items()
    }
    number, count = share
    for _ in reading.load(
        setup.path / str(step), list(reading.blocks_of(manifest, whole))[number::count]
    ):
        pass


def _touch(setup: Setup) -> None:
    with contextlib.suppress(OSError):  # a system that cannot has slow copies
        _memory(setup).madvise(_POPULATE_READ)


def _memory(setup: Setup) -> mmap.mmap:
    state = os.fstat(setup.buffer)
    return _mapped(setup.buffer, state.st_dev, state.st_ino, state.st_size)


@functools.lru_cache(maxsize=1)
def _mapped(descriptor: int, device: int, inode: int, size: int) -> mmap.mmap:
    """Kept until it grows: mapping a gigabyte anew takes a tenth of a second.

    The inode says that it is still this.
    """
    del device, inode
    return mmap.mmap(descriptor, size)


def _map_buffer(setup: Setup, header: list[int]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header, and its slots as arrays in the same memory."""
    memory, (offset, length) = _memory(setup), header
    request = json.loads(memory[offset : offset + length])
    data, found = np.frombuffer(memory, np.uint8), {}
    for name, slot in request["slots"].items():
        flat = data[slot["offset"] : slot["offset"] + slot["nbytes"]]
        found[name] = flat.view(np.dtype(slot["dtype"])).reshape(slot["shape"])
    return request, found


def _box(slot: dict[str, Any]) -> Box:
    return Box(tuple(slot["start"]), tuple(slot["shape"]))


def _cause(error: BaseException) -> str:
    """What went wrong; of a full disk only that, where tensorstore says a paragraph."""
    full, text = os.strerror(errno.ENOSPC), " ".join(str(error).split())
    if isinstance(error, files.DamagedError):
        return text[:800]
    return full if full in text else f"{type(error).__name__}: {text[:700]}"


_OPERATIONS: dict[str, Callable[..., None]] = {
    "write": _write,
    "commit": _commit,
    "read": _read,
    "verify": _verify,
    "touch": _touch,
}


def answer(setup: Setup, request: dict[str, Any]) -> dict[str, Any]:
    """Does one request; the fields of :class:`k31fn.checkpoint.process.Answer`."""
    try:
        _OPERATIONS[request.pop("op")](setup, **request)
    except Exception as error:  # the other process says what it means
        return {"error": _cause(error), "damaged": isinstance(error, files.DamagedError)}
    return {}


def main(options: str) -> int:
    """Answers requests until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    setup = Setup(**json.loads(options))
    if setup.token and setup.rank == 0:
        files.remove_leftovers(setup.path, setup.token)
    gc.freeze()  # what was imported is not looked at again by each collection below
    will: dict[str, Any] = {}
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        if request["op"] == "will":
            will = {name: value for name, value in request.items() if name != "op"}
            said = {}
        else:
            said = answer(setup, request)
        with contextlib.suppress(BrokenPipeError):  # the training process is gone; stdin ends next
            os.write(answers, json.dumps(said, ensure_ascii=False).encode() + b"\n")
        gc.collect()  # orbax leaves cycles, and with them the tensors of this request
    if will:
        _execute(setup, will)
    return 0
