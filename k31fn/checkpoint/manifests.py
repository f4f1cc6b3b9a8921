"""Whether a manifest says what a manifest must say: its checksum alone proves no more than that who
wrote it could count.
"""

from __future__ import annotations

import math
import re
from typing import Any

from k31fn.checkpoint.boxes import num_blocks

__all__ = ["check_content"]

_MOST_DIMENSIONS = 64


def check_content(manifest: dict[str, Any]) -> None:
    """Refuses one from which no state could be read.

    Raises:
        ValueError: says which part of it is wrong.
    """
    block_bytes = manifest.get("block_bytes")
    if not _is_count(block_bytes) or not block_bytes:
        raise ValueError(f"block_bytes={block_bytes!r} must be a positive integer")
    for name in ("metadata", "tensors"):
        if not isinstance(manifest.get(name), dict):
            raise ValueError(f"{name} must be an object")
    for name, tensor in manifest["tensors"].items():
        try:
            _check_tensor(tensor, block_bytes)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from error


def _check_tensor(tensor: Any, block_bytes: int) -> None:
    if not isinstance(tensor, dict):
        raise ValueError("must be an object")
    shape = _sizes(tensor, "shape")
    dtype = tensor.get("dtype")
    shards = tensor.get("shards")
    if not isinstance(dtype, str) or not isinstance(shards, list):
        raise ValueError("dtype must be a name and shards a list")
    bits = re.search(r"\d+", dtype)  # a bool has none, and takes a byte
    itemsize = int(bits[0]) // 8 if bits else 1
    numel: dict[tuple[int, ...], int] = {}
    for shard in shards:
        part = _check_shard(shard, shape, itemsize, block_bytes)
        # tiles of one grid, so equal starts are the only way in which two can overlap
        numel[tuple(shard["start"])] = math.prod(part)
    if len(numel) != len(shards) or sum(numel.values()) != math.prod(shape):
        raise ValueError(f"its shards do not make up the shape {shape}")


def _check_shard(shard: Any, whole: list[int], itemsize: int, block_bytes: int) -> list[int]:
    """The shape of a shard that lies inside the tensor and has as many checksums as blocks."""
    if not isinstance(shard, dict) or not _is_count(shard.get("rank")):
        raise ValueError("a shard must be an object with the rank that wrote it")
    start = _sizes(shard, "start")
    part = _sizes(shard, "shape")
    if not len(start) == len(part) == len(whole):
        raise ValueError(f"shard {start} + {part} has other dimensions than {whole}")
    for first, size, of in zip(start, part, whole, strict=True):
        if first + size > of:
            raise ValueError(f"shard {start} + {part} is not inside {whole}")
    digests = shard.get("sha256")
    blocks = num_blocks(part, itemsize, block_bytes)
    if (
        not isinstance(digests, list)
        or len(digests) != blocks
        or not all(isinstance(digest, str) for digest in digests)
    ):
        raise ValueError(f"shard {start} + {part} must have {blocks} checksums")
    return part


def _sizes(entry: dict[str, Any], name: str) -> list[int]:
    sizes = entry.get(name)
    if not isinstance(sizes, list) or not all(_is_count(size) for size in sizes):
        raise ValueError(f"{name} must be a list of integers from 0")
    if len(sizes) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has more than {_MOST_DIMENSIONS} dimensions")
    return sizes


def _is_count(value: Any) -> bool:
    # of more than 62 bits no array is, and sums of such numbers take any time
    return type(value) is int and 0 <= value < 1 << 62
