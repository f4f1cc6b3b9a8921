"""The checkpoint writer of a rank: a program of its own, the only place that runs orbax (and with
it jax).

It reads requests from stdin, one JSON object a line, and answers each with one line: the fields of
:class:`k31fn.checkpoint.writer_process.WriterAnswer`. Tensors travel in an inherited file
descriptor of shared memory. Neither torch nor the rest of k31fn is imported, so the program is
ready in about two seconds and stays small.

Writers do not know each other. Each saves what its rank owns as an orbax checkpoint of one process;
the ranks tell each other, over their own process group, when all are through, and then the first
one's writer commits the step (:mod:`k31fn.checkpoint.step_folders` describes the folder).

The other way, one checkpoint of global arrays that the writers make together over
``jax.distributed``, was tried with 2 and 4 writers (orbax 0.12.8, jax 0.10.2). Its service starts
in 1.2 s and a barrier takes 1 ms, but:

- A rank that cannot write (a full disk) leaves the others in a collective until its process ends
  (45 s where it lived so long), and one of them is aborted: each failure costs the group.
- A tensor of one pipeline stage needs zeros of its size on the ranks of all others.
- A rank that restores a slice does not get the bytes around it, and cannot tell whether the shard
  still has its checksum.
- A run needs one more port on its hosts.

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

from k31fn.checkpoint import orbax_arrays, step_folders, stored_blocks
from k31fn.checkpoint.boxes import Box, cut

__all__ = ["WriterSetup", "answer", "main"]

_WILL_S = 20.0  # less than the next run waits for the lock (`lock._WAIT_S`)
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not name


@dataclass(frozen=True)
class WriterSetup:
    """What a writer is told when it starts.

    Attributes:
        directory: of the checkpoints.
        buffer: file descriptor of the shared memory.
        rank: whose writer it is.
        ranks: how many there are.
        token: of the run of training; empty: the writer only reads.
        keep: the fields of :class:`step_folders.Retention`.
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


class _NotTidiedError(Exception):
    """A step is complete, and what does not stay could not be deleted."""


def _write(setup: WriterSetup, step: int, header: list[int]) -> None:
    request, slots = _map_buffer(setup, header)
    folder = step_folders.unfinished(setup.path, step, setup.token) / str(setup.rank)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        # not parents: of a folder of checkpoints that was moved away no other one must come to be
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
        blocks: dict[str, np.ndarray] = {}
        shards: dict[str, Any] = {}
        for name, array in slots.items():
            box = _box(request["slots"][name])
            keys = []
            for number, piece in enumerate(cut(box, array.itemsize, step_folders.BLOCK_BYTES)):
                key = f"{name}.{number}"
                keys.append(key)
                # With "...": an array also where it has no dimensions, not a number.
                blocks[key] = array[(*piece.inside(box), ...)]
            shards[name] = {"start": box.start, "shape": box.shape, "blocks": keys}
        digests = dict(zip(blocks, orbax_arrays.save(folder / "state", blocks), strict=True))
        for shard in shards.values():
            shard["sha256"] = [digests[key] for key in shard.pop("blocks")]
        step_folders.finish_part(folder, shards)
    except BaseException:
        # On a full disk this is the room for the next try.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _commit(setup: WriterSetup, step: int, header: list[int], scores: dict[str, float]) -> None:
    request, _ = _map_buffer(setup, header)
    tensors, metadata = request["tensors"], request["metadata"]
    try:
        step_folders.commit(setup.path, step, setup.token, setup.ranks, tensors, metadata)
    except BaseException:
        unfinished = step_folders.unfinished(setup.path, step, setup.token)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    # Only now, when the new step is complete: at no moment are there fewer than `keep.last`.
    score_of = {int(s): score for s, score in scores.items()}  # JSON has no numbers as keys
    try:
        step_folders.retire(setup.path, step, score_of, step_folders.Retention(*setup.keep))
    except OSError as error:
        raise _NotTidiedError(_cause(error)) from error


def _execute(setup: WriterSetup, will: dict[str, Any]) -> None:
    """Commits what the training processes did not live to commit."""
    folder = step_folders.unfinished(setup.path, will["step"], setup.token)
    deadline = time.monotonic() + _WILL_S
    # No folder: the commit was asked for before the end, or the save failed on a rank.
    while folder.exists() and time.monotonic() < deadline:
        if step_folders.all_parts(folder, setup.ranks):
            _commit(setup, **will)
        else:
            time.sleep(0.1)


def _read(setup: WriterSetup, step: int, header: list[int]) -> None:
    request, slots = _map_buffer(setup, header)
    wanted = {name: _box(slot) for name, slot in request["slots"].items()}
    blocks = stored_blocks.blocks_of(step_folders.read_manifest(setup.path, step), wanted)
    for block, array in stored_blocks.load(setup.path / str(step), blocks):
        part = block.box.overlap(wanted[block.name])
        slots[block.name][part.inside(wanted[block.name])] = array[part.inside(block.box)]


def _verify(setup: WriterSetup, step: int, share: list[int]) -> None:
    manifest = step_folders.read_manifest(setup.path, step)
    whole: dict[str, Box] = {}
    for name, tensor in manifest["tensors"].items():
        shape = tuple(tensor["shape"])
        whole[name] = Box((0,) * len(shape), shape)
    number, count = share
    blocks = list(stored_blocks.blocks_of(manifest, whole))[number::count]
    for _ in stored_blocks.load(setup.path / str(step), blocks):
        pass  # it raises at the end if a block is not what was written


def _touch(setup: WriterSetup) -> None:
    with contextlib.suppress(OSError):  # a system that cannot has slow copies
        _memory(setup).madvise(_POPULATE_READ)


def _memory(setup: WriterSetup) -> mmap.mmap:
    state = os.fstat(setup.buffer)
    return _mapped(setup.buffer, state.st_dev, state.st_ino, state.st_size)


@functools.lru_cache(maxsize=1)
def _mapped(descriptor: int, device: int, inode: int, size: int) -> mmap.mmap:
    """The shared memory, mapped once until it grows: a gigabyte anew takes a tenth of a second.

    Device and inode say that the descriptor is still of the same memory.
    """
    del device, inode
    return mmap.mmap(descriptor, size)


def _map_buffer(
    setup: WriterSetup, header: list[int]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header, and its slots as arrays in the same memory."""
    memory = _memory(setup)
    offset, length = header
    request = json.loads(memory[offset : offset + length])
    data = np.frombuffer(memory, np.uint8)
    arrays: dict[str, np.ndarray] = {}
    for name, slot in request["slots"].items():
        flat = data[slot["offset"] : slot["offset"] + slot["nbytes"]]
        arrays[name] = flat.view(np.dtype(slot["dtype"])).reshape(slot["shape"])
    return request, arrays


def _box(slot: dict[str, Any]) -> Box:
    return Box(tuple(slot["start"]), tuple(slot["shape"]))


def _cause(error: BaseException) -> str:
    """What went wrong; of a full disk only that, where tensorstore says a paragraph."""
    text = " ".join(str(error).split())
    if isinstance(error, step_folders.DamagedError | _NotTidiedError):
        return text[:800]
    full = os.strerror(errno.ENOSPC)
    return full if full in text else f"{type(error).__name__}: {text[:700]}"


_OPERATIONS: dict[str, Callable[..., None]] = {
    "write": _write,
    "commit": _commit,
    "read": _read,
    "verify": _verify,
    "touch": _touch,
}


def answer(setup: WriterSetup, request: dict[str, Any]) -> dict[str, Any]:
    """Does one request; the fields of :class:`k31fn.checkpoint.writer_process.WriterAnswer`."""
    began = time.monotonic()
    became: dict[str, Any] = {}
    try:
        _OPERATIONS[request.pop("op")](setup, **request)
    except Exception as error:  # of any kind: the other process says what it means
        became = {
            "error": _cause(error),
            "damaged": isinstance(error, step_folders.DamagedError),
            "committed": isinstance(error, _NotTidiedError),
        }
    return {**became, "seconds": time.monotonic() - began}


def main(options: str) -> int:
    """Answers requests until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log, not among the answers
    setup = WriterSetup(**json.loads(options))
    if setup.token and setup.rank == 0:
        step_folders.remove_leftovers(setup.path, setup.token)
    gc.freeze()  # what was imported is not looked at again by each collection below
    will: dict[str, Any] = {}
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        if request["op"] == "will":
            will = {name: value for name, value in request.items() if name != "op"}
            reply: dict[str, Any] = {}
        else:
            reply = answer(setup, request)
        with contextlib.suppress(BrokenPipeError):  # the training process is gone; stdin ends next
            os.write(answers, json.dumps(reply, ensure_ascii=False).encode() + b"\n")
        gc.collect()  # orbax leaves cycles, and with them the tensors of this request
    if will:
        _execute(setup, will)
    return 0
