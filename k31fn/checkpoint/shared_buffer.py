"""Memory that a training process shares with its writer, and the places of tensors in it."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn.checkpoint.boxes import Box

__all__ = ["BufferSlot", "SharedBuffer", "open_memory", "pack"]

_ALIGNMENT = 64  # a cache line, and more than any dtype needs


class BufferSlot(NamedTuple):
    """A part of a tensor and its place in the buffer."""

    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def pack(parts: Mapping[str, tuple[Tensor, Box]]) -> dict[str, BufferSlot]:
    """A place in the buffer for each part: the box that it is of a tensor of this dtype."""
    slots: dict[str, BufferSlot] = {}
    end = 0
    for name, (x, box) in parts.items():
        nbytes = box.numel * x.dtype.itemsize
        dtype_name = str(x.dtype).removeprefix("torch.")
        slots[name] = BufferSlot(dtype_name, box.start, box.shape, end, nbytes)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots


class SharedBuffer:
    """Shared memory that has no name: it is gone with the last process that has it open, killed or
    not.

    Not limited by the size of /dev/shm. Where the system has no such memory it is an unlinked
    temporary file.
    """

    def __init__(self) -> None:
        self.descriptor = open_memory()
        self._memory: mmap.mmap | None = None

    def hold(
        self, slots: Mapping[str, BufferSlot], header: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """The slots as tensors in the memory, which grows if it must, and the place of the header
        written behind them.

        Raises:
            OSError: there is not so much memory.
            ValueError: the header is not JSON data.
        """
        content = {**header, "slots": {name: slot._asdict() for name, slot in slots.items()}}
        text = json.dumps(content, allow_nan=False).encode()
        end = max((slot.offset + slot.nbytes for slot in slots.values()), default=0)
        memory = self._map(end + len(text))
        memory[end : end + len(text)] = text
        data = torch.frombuffer(memory, dtype=torch.uint8)
        tensors: dict[str, Tensor] = {}
        for name, slot in slots.items():
            flat = data[slot.offset : slot.offset + slot.nbytes]
            tensors[name] = flat.view(getattr(torch, slot.dtype)).view(slot.shape)
        return tensors, (end, len(text))

    def close(self) -> None:
        """Lets go of it. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        self._memory = None

    def _map(self, size: int) -> mmap.mmap:
        """The memory, at least so large.

        Kept from save to save: the pages of a new mapping would have to be found one by one again.
        """
        if self._memory is None or len(self._memory) < size:
            if size > os.fstat(self.descriptor).st_size:
                _grow(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        return self._memory


def open_memory() -> int:
    """A descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("k31fn-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _grow(descriptor: int, size: int) -> None:
    # Provided now: a lack of memory is an OSError here. After ftruncate alone, pages come with the
    # first write to each, and the lack would be a SIGBUS in the middle of a copy.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        os.ftruncate(descriptor, size)
