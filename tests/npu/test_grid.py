"""On Ascend a batch is split over the vector cores, by its shape and their number: one program on
each.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from k31fn import autodiff, device, tree
from k31fn.kernels import mhc_post as post
from k31fn.kernels import mhc_pre as pre

OPS = {"mhc_pre": pre, "mhc_post": post}
CUBES = 24  # each has two vector cores
BF16 = torch.bfloat16


def mhc_pre(tokens: int) -> tuple[Any, ...]:
    phi = torch.zeros(4 * 512, 24)
    return (
        torch.zeros(1, tokens, 4, 512, dtype=BF16),
        phi,
        torch.zeros(3),
        torch.zeros(24),
        1e-6,
        20,
    )


def mhc_post(tokens: int) -> tuple[Any, ...]:
    x = torch.zeros(1, tokens, 4, 512, dtype=BF16)
    return x, x[:, :, 0].contiguous(), torch.zeros(1, tokens, 4), torch.zeros(1, tokens, 4, 4)


class Noted:
    """In place of a kernel: keeps the number of programs of each launch."""

    def __init__(self) -> None:
        self.grids: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid[0])
        return lambda *_, **__: None


def vector_kernels(module: Any) -> list[str]:
    """Kernels of the op without a product, which the cube cores would do."""
    files = {sys.modules[b.kernel.fn.__module__] for b in module.builds("npu")}
    bodies = [f for file in files for f in ast.parse(inspect.getsource(file)).body]
    functions = {f.name: f for f in bodies if isinstance(f, ast.FunctionDef)}

    def multiplies(name: str) -> bool:
        called = {ast.unparse(c.func) for c in ast.walk(functions[name]) if isinstance(c, ast.Call)}
        return "tl.dot" in called or any(multiplies(c) for c in called & (set(functions) - {name}))

    listed = {b.kernel.__name__ for b in module.builds("npu")}
    return sorted(name for name in listed if not multiplies(name))


def programs(op: str, args: tuple[Any, ...]) -> dict[str, list[int]]:
    """Programs per launch of each vector kernel, forward and backward."""
    module = importlib.import_module(getattr(OPS[op], op).implementations["triton"].kernels)
    noted = {b.kernel.__name__: Noted() for b in module.builds("npu")}
    tiles = mock.patch.dict(module._TILES, cpu=module._TILES["npu"])
    cores = mock.patch.object(device, "num_cores", return_value=CUBES)
    tensors = [a for a in args if isinstance(a, Tensor)]
    with tiles, cores, mock.patch.dict(vars(module), noted):
        out, pull = autodiff.vjp(lambda *xs: getattr(module, op)(*xs, *args[len(xs) :]), *tensors)
        pull(tree.map(torch.zeros_like, out))
    return {name: noted[name].grids for name in vector_kernels(module)}


@pytest.mark.parametrize(("op", "make"), [("mhc_pre", mhc_pre), ("mhc_post", mhc_post)])
def test_one_program_on_each_vector_core(op: str, make: Any):
    launched = programs(op, make(4096))
    assert len(launched) >= 2
    assert all(grids == [2 * CUBES] for grids in launched.values()), launched
    few = programs(op, make(1))
    # no more than there are pieces: a token, and beside its mix its coefficients; sums are over
    # parameters, not tokens
    pieces = {"mhc_pre_mix": 2, "mhc_pre_backward_mix": 2, "mhc_pre_backward_sums": 2 * CUBES}
    assert few == {name: [pieces.get(name, 1)] for name in few}
