"""What a writer reads: the blocks that a rank wants of a step, each of them checked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k31fn.checkpoint import orbax_arrays, step_folders
from k31fn.checkpoint.boxes import Box, cut

__all__ = ["blocks_of", "load"]

_AT_ONCE = 256 << 20  # bytes in memory at once; orbax reads the blocks of a call side by side
_NAMED = 3  # damaged blocks that a message names


class _StoredBlock(NamedTuple):
    """A piece of a tensor as it lies on disk.

    Attributes:
        name: of the tensor.
        key: of the block in the checkpoint of the rank that wrote it.
        rank: that rank.
        box: what it is of the tensor.
        dtype: of its elements.
        sha256: of its bytes.
    """

    name: str
    key: str
    rank: int
    box: Box
    dtype: np.dtype
    sha256: str

    def __str__(self) -> str:
        return f"{self.name!r} {self.box}, block {self.key!r} of {self.rank}/state"


def blocks_of(manifest: Mapping[str, Any], wanted: Mapping[str, Box]) -> Iterator[_StoredBlock]:
    """The blocks of a step that have something of what is wanted, by tensor."""
    for name, box in wanted.items():
        tensor = manifest["tensors"][name]
        dtype = np.dtype(tensor["dtype"])
        for shard in tensor["shards"]:
            whole = Box(tuple(shard["start"]), tuple(shard["shape"]))
            pieces = cut(whole, dtype.itemsize, manifest["block_bytes"])
            for number, (piece, digest) in enumerate(zip(pieces, shard["sha256"], strict=True)):
                if piece.overlap(box).numel:
                    stored_as = f"{name}.{number}"
                    yield _StoredBlock(name, stored_as, shard["rank"], piece, dtype, digest)


def load(folder: Path, blocks: Iterable[_StoredBlock]) -> Iterator[tuple[_StoredBlock, np.ndarray]]:
    """Each block that is what was written, a few at a time.

    Raises:
        DamagedError: at the end, if some were not; names them.
    """
    damaged: list[_StoredBlock] = []
    first_cause = ""
    # By the rank that wrote them: each has an orbax checkpoint of its own.
    by_rank = itertools.groupby(sorted(blocks, key=lambda b: b.rank), key=lambda b: b.rank)
    for rank, of_rank in by_rank:
        for batch in _batches(of_rank):
            arrays, cause = _read(folder / str(rank) / "state", batch)
            first_cause = first_cause or cause
            digests = dict(zip(arrays, orbax_arrays.digests(arrays.values()), strict=True))
            for block in batch:
                array = arrays.get(block.key)
                if array is None or _differs(array, digests[block.key], block):
                    damaged.append(block)
                else:
                    yield block, array
    # At the end, so that one message names all of them.
    if damaged:
        names = "; ".join(str(block) for block in damaged[:_NAMED])
        others = f" and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
        raise step_folders.DamagedError(f"damaged: {names}{others}{first_cause}")


def _batches(blocks: Iterable[_StoredBlock]) -> Iterator[list[_StoredBlock]]:
    batch: list[_StoredBlock] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += block.box.numel * block.dtype.itemsize
        if size >= _AT_ONCE:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _read(path: Path, blocks: list[_StoredBlock]) -> tuple[dict[str, np.ndarray], str]:
    """The blocks that can be read, by key, and why others cannot."""
    keys = [b.key for b in blocks]
    try:
        return orbax_arrays.restore(path, keys), ""
    except Exception as error:  # orbax and tensorstore raise many kinds
        # Retention or another run may have deleted the step meanwhile: that is no damage.
        if not path.parents[1].exists():
            raise FileNotFoundError(
                f"step {path.parents[1].name} was removed while it was read"
            ) from error
        # One by one, which tells the blocks that are hit from those beside them in a file.
        readable: dict[str, np.ndarray] = {}
        for key in keys:
            with contextlib.suppress(Exception):
                readable |= orbax_arrays.restore(path, [key])
        return readable, f" ({type(error).__name__}: {' '.join(str(error).split())[:300]})"


def _differs(array: np.ndarray, digest: str, block: _StoredBlock) -> bool:
    return (array.dtype, array.shape, digest) != (block.dtype, block.box.shape, block.sha256)
