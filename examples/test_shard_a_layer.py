"""The layer of ``shard_a_layer.py`` on its mesh, and two mistakes that are found. Run: ``pytest
examples``.
"""

import ast
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import shard_a_layer as example
from k31fn import params, random
from k31fn.parallel import MeshAxes, all_gather_invariant, pslice
from k31fn.testing import ShardedReport, assert_sharded_equals_dense

FILE = Path(__file__).with_name("shard_a_layer.py")


def check(layer: Callable[..., Tensor], sent: dict[str, int]) -> ShardedReport:
    p = params.init(example.SPECS, random.key(0), dtype=torch.float64)
    x = random.normal(random.key(1), (4, 6, 8), dtype=torch.float64)
    specs = (example.PARTS, example.TOKENS), example.TOKENS
    here = ("simulated", "threads")
    return assert_sharded_equals_dense(
        layer,
        (p, x),
        *specs,
        example.MESH,
        collectives=sent,
        rtol=1e-12,
        atol=1e-12,
        flops=0.25,
        backends=here,
    )


def test_it_runs_and_is_short(capsys: pytest.CaptureFixture[str]):
    statements = [n for n in ast.walk(ast.parse(FILE.read_text())) if isinstance(n, ast.stmt)]
    assert len(statements) < 30
    runpy.run_path(str(FILE), run_name="__main__")
    assert "backends=('simulated', 'threads')" in capsys.readouterr().out


def test_one_device_and_the_mesh_agree():
    assert check(example.layer, {"all_gather": 4, "psum_scatter": 4}).flops == 0.25


def test_a_missing_sum_is_found(monkeypatch: pytest.MonkeyPatch):
    """The rank's own slice of what should be summed: in the simulated mesh an error, whatever the
    values are.
    """
    monkeypatch.setattr(example, "psum_scatter", pslice)
    with pytest.raises(ValueError, match="pslice over 'tp' of a value that varies over it already"):
        check(example.layer, {"all_gather": 4, "psum_scatter": 4})


def test_dense_work_in_disguise_is_found():
    """Right values, but every rank of ``tp`` computes all columns."""

    def layer(axes: MeshAxes, weights: list[Tensor], x: Tensor) -> Tensor:
        up, down = example.fsdp.gather(
            weights, example.fsdp.placements(example.SPECS, example.PARTS, axes)
        )
        up, down = all_gather_invariant(up, axes.tp, 1), all_gather_invariant(down, axes.tp, 0)
        x = all_gather_invariant(x, axes.tp, 1)
        return pslice(torch.tanh(x @ up) @ down, axes.tp, 1)

    sent = {"all_gather": 2, "psum_scatter": 2, "all_gather_invariant": 4}
    with pytest.raises(
        AssertionError, match=r"a rank did 0\.5 of one device's work, at most 0\.25"
    ):
        check(layer, sent)
