"""Whatever tile the tuner chooses, the same inputs give the same bits; and the tables hold what it
may choose.
"""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import attn_res, mhc
from benchmarks.op import Subject, cotangents, repeats_alike, variants
from k31fn.kernels.registry import OPS
from tests.kernels.fused import DEVICE

WHERE = torch.device(DEVICE)
TABLES = {**attn_res.TUNED, **mhc.TUNED}


def kernels(op: str) -> Any:
    return importlib.import_module(OPS[op].implementations["triton"].kernels)


def subject(op: str, kernel: int) -> Subject:
    """More tokens than programs, a width that fills no tile, and sources and width for which the
    kernel is launched.
    """
    if op == "attn_res":
        return attn_res.subject(3 if kernel == 2 else 5, 600, 1000, WHERE)
    return mhc.subject(600, 4, 1000, WHERE)


@pytest.mark.parametrize("op", TABLES)
def test_the_table_is_one_of_the_choices(op: str) -> None:
    table = kernels(op)._TILES["cuda"]
    assert len(table) == len(TABLES[op])
    for tile, options in zip(table, TABLES[op], strict=True):
        for name, values in options.items():
            assert getattr(tile, name) in values, (tile, name)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("op", "kernel"), [(op, i) for op, options in TABLES.items() for i in range(len(options))]
)
def test_twenty_runs_are_bit_identical_with_every_tile(op: str, kernel: int) -> None:
    run = subject(op, kernel)
    inputs = run.draw()
    cts, table = cotangents(run.plain, inputs), kernels(op)._TILES
    for i, tile, tiles in variants(kernels(op), "cuda", TABLES[op]):
        with mock.patch.dict(table, cuda=tiles):
            assert i != kernel or repeats_alike(run, inputs, cts, 20), (
                f"{op}: two runs with {tile} differ"
            )


def test_a_difference_of_one_bit_is_seen() -> None:
    """On the CPU with plain torch, whose second run adds a bit."""
    count = iter(range(9))

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + next(count) * torch.finfo(x.dtype).eps)

    run = Subject("", list, unsteady, unsteady, unsteady, 0, 0)
    x = torch.ones(3)
    assert not repeats_alike(run, [x], [x], 3)
    steady = Subject("", list, torch.sin, torch.sin, torch.sin, 0, 0)
    assert repeats_alike(steady, [x], [x], 3)
