"""A reader of single weights of a checkpoint, any part of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from k31fn import balance, model
from k31fn.hf_format.files import TensorSource, open_source
from k31fn.hf_format.leaves import read_leaf
from k31fn.hf_format.problems import find_problems
from k31fn.hf_format.table import Entry, entries
from k31fn.hf_format.transforms import Tile, whole
from k31fn.typing import Tensor

__all__ = ["Reader", "open_checkpoint"]

_PARAMS = "params."


class Reader:
    """The open checkpoint of :func:`open_checkpoint`, of which any part can be read."""

    def __init__(self, source: TensorSource, table: list[Entry], cfg: model.Config) -> None:
        self._source = source
        self._cfg = cfg
        self._entries = {entry.path: entry for entry in table}

    def read(self, path: str, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
        """A tile of the parameter at ``path``, on the CPU; only its bytes are read.

        Args:
            path: in the tree of parameters.
            tile: a slice per dimension, with start and stop.
            dtype: None: as it is stored, MXFP4 as bfloat16; float32 islands are at least float32.

        Raises:
            ValueError: it is not finite.
        """
        return self._read(_PARAMS + path, tile, dtype)

    def balance(self) -> balance.State:
        """The routers' biases."""
        layers = model.moe_layers(self._cfg)
        empty = balance.init(layers, model.experts(self._cfg).num_experts)
        # Without MoE layers the table has no row for it.
        if not layers:
            return empty
        bias = self._read("balance", whole(tuple(empty.bias.shape)), None)
        return balance.State(bias, layers)

    def _read(self, path: str, tile: Tile, dtype: torch.dtype | None) -> Tensor:
        # Not only the value: NaN in a base would turn up as a loss that is no number, steps later.
        broken: list[str] = []
        value = read_leaf(self._entries[path], self._source, dtype, tile, broken)
        if broken:
            raise ValueError(
                f"{broken[0]} has values that are not finite ({len(broken)} tensors of {path})"
            )
        return value


@contextlib.contextmanager
def open_checkpoint(directory: str | Path, cfg: model.Config) -> Iterator[Reader]:
    """Opens a checkpoint in K3's names for reading.

    Raises:
        ValueError: it does not fit ``cfg``; says all that is wrong.
    """
    table = entries(cfg)
    with open_source(Path(directory)) as source:
        problems = find_problems(table, source.tensors)
        if problems:
            raise ValueError(f"checkpoint {directory} does not fit the config:\n{problems}")
        yield Reader(source, table, cfg)
