"""The mHC scheme on token shards against one device; its parameters' gradients are sums over all
ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import tree
from k31fn.layers import mhc
from k31fn.parallel import Mesh, MeshAxes, P, Sharding, pvary
from k31fn.testing import assert_sharded_equals_dense

D = 6
CFG = mhc.Config(num_streams=2, iterations=3)


def arguments() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    specs = (mhc.specs(CFG, D), mhc.specs(CFG, D), mhc.specs_out(CFG, D))
    weights = tree.map(lambda s: torch.randn(s.shape, dtype=torch.float64), specs)
    return weights, torch.randn(2, 8, D, dtype=torch.float64)


def two_sublayers(axes: MeshAxes, weights: Any, x: Tensor) -> Tensor:
    sh = Sharding.on(axes)
    *mixes, last = tree.map(lambda w: pvary(w, axes.data), weights)
    carry = mhc.start(x, CFG)
    for mix in mixes:
        carry, _ = mhc.connect(mix, carry, CFG, lambda h: (h.tanh(), ()), opens_block=False, sh=sh)
    return mhc.finish(last, carry, CFG, sh=sh)


def check(mesh: Mesh) -> None:
    views = sum(n > 1 for n in (mesh.dp * mesh.fsdp * mesh.cp, mesh.tp))
    assert_sharded_equals_dense(
        two_sublayers,
        arguments(),
        (P(), P(("dp", "fsdp"), ("cp", "tp"))),
        P(("dp", "fsdp"), ("cp", "tp")),
        mesh,
        collectives={
            "psum": 9 * views
        },  # the gradient of each of nine leaves; tokens are independent
        rtol=1e-10,
        atol=1e-10,
        backends=("simulated", "threads"),
    )


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2, tp=2), Mesh(dp=2, cp=2)], ids=str)
def test_equals_one_device(mesh: Mesh) -> None:
    check(mesh)


def test_a_missing_pvary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mhc, "pvary", lambda w, axis: w)
    with pytest.raises(ValueError, match="varies over"):
        check(Mesh(tp=2))
