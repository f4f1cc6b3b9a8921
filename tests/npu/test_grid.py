"""On Ascend a batch is split over the vector cores, by its shape and their number: one program on
each.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from k31fn import autodiff, device, tree
from k31fn.kernels import launch
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


class Refused:
    """In place of a kernel: no launch may come."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AssertionError(f"launched with {grid}")


def on_meta(module: Any, kernel: str, place: Any) -> Any:
    """The module with ``place`` for one of its kernels, and tiles for tensors without memory."""
    tiles = mock.patch.dict(module._TILES, meta=module._TILES["npu"])
    cores = mock.patch.object(device, "num_cores", return_value=CUBES)
    return tiles, cores, mock.patch.dict(vars(module), {kernel: place})


def test_many_tokens_are_no_reason_to_refuse_a_launch():
    """64 rows of 65,536 tokens, as one group: programs go on to the next tokens."""
    read = importlib.import_module("k31fn.kernels.mhc_pre.triton.read")
    noted = Noted()
    noted.arg_names = ["N"]
    x = torch.empty(1, 64 * 65536, 4, 512, dtype=BF16, device="meta")
    phi = torch.empty(1, 4 * 512, 24, device="meta")
    given = mock.patch.object(read, "given", return_value={})
    tiles, cores, kernel = on_meta(read, "mhc_pre_project", noted)
    with tiles, cores, kernel, given:
        parts, _ = read._launch_project(x, phi)
    assert parts.shape == (1, 1, 64 * 65536, 24)
    assert noted.grids == [2 * CUBES] or noted.grids == [CUBES]


def test_many_samples_under_vmap_are_refused_with_how_many_would_do():
    read = importlib.import_module("k31fn.kernels.mhc_pre.triton.read")
    samples, width = 512, 5120
    x = torch.empty(samples, 1, 4, width, dtype=BF16, device="meta")
    operands = (
        x,
        torch.empty(1, 4 * width, 24, device="meta"),
        torch.empty(samples, 1, width, dtype=BF16, device="meta"),
        x,
        torch.empty(samples, 1, 4, device="meta"),
        torch.empty(samples, 1, 24, device="meta"),
        torch.empty(samples, 1, device="meta"),
    )
    tile = mock.Mock(columns=64, rows=16, per_core=1)
    of_streams = mock.patch.object(read, "of_streams", return_value=tile)
    tiles, cores, kernel = on_meta(read, "mhc_pre_backward_streams", Refused())
    with (
        tiles,
        cores,
        kernel,
        of_streams,
        pytest.raises(
            ValueError,
            match=r"163840 programs in one launch, at most 65535, for 512 samples under vmap; use "
            r"its chunk_size, at most 204",
        ),
    ):
        read._launch_streams(*operands)


def test_a_split_gives_way_to_the_limit():
    tiles = importlib.import_module("k31fn.kernels.mhc_pre.triton.tiles")
    x = torch.empty(1, 100_000, 4, 64, dtype=BF16, device="meta")
    tile = mock.Mock(rows=16, per_core=1)
    with mock.patch.object(device, "num_cores", return_value=CUBES):
        assert tiles.filling(tile, x, 1) > 1
        assert tiles.filling(tile, x, 40_000) == 1


# Launches that count their programs by themselves; those of a whole row of tokens.
BY_THEMSELVES = ("kda", "gdn", "short_conv")


def launches() -> list[tuple[str, str]]:
    """The operator and the grid of each launch in the kernels' source."""
    found = []
    for file in sorted((Path(launch.__file__).parent).rglob("*.py")):
        parts = file.relative_to(Path(launch.__file__).parent).parts
        if not any("triton" in part for part in parts[1:]):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                found.append((parts[0], ast.unparse(node.func.slice)))
    return found


@pytest.mark.parametrize(("op", "written"), launches())
def test_every_launch_has_its_grid_from_the_one_helper(op: str, written: str):
    """``programs`` gives what times the groups is within the limit; anything else asks ``grid``."""
    if op.startswith(BY_THEMSELVES):
        pytest.skip("counts its programs itself")
    bounded = written in ("(groups * per_group,)", "grid")
    asked = written.startswith(("grid(", "looping_grid(", "(programs("))
    assert bounded or asked, f"{op} launches {written} programs"


def test_what_is_too_much_is_said():
    assert launch.grid(65535, 1) == (65535,)
    with pytest.raises(ValueError, match=r"65536 programs in .*, of a row this wide; split it"):
        launch.grid(65536, 1)
    with pytest.raises(ValueError, match=r"for 70000 samples under vmap; use its chunk_size"):
        launch.programs(torch.device("cpu"), 70000, 5, 1)
    assert launch.share(torch.device("cpu"), 70000, 5, 1) == 1
