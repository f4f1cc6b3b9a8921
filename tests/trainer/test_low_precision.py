"""Runs with FP8 products, and with parameters in bfloat16 alone."""

import dataclasses

import pytest
import torch

from k31fn import config, optim, precision, trainer, tree
from k31fn.kernels.registry import record_impls
from k31fn.layers import kda, mlp
from k31fn.parallel import Mesh, fsdp
from tests import small
from tests.trainer import meshes

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]

ADAMW = config.Optimizer(kind="adamw", peak_lr=0.01, warmup_steps=0)
LOSS = trainer.Metrics._fields.index("loss")


@pytest.fixture(scope="module")
def recipe(text):
    """With a KDA layer and an MLP of sizes that FP8 takes."""
    made = meshes.recipe(text, compute="bfloat16", optimizer=ADAMW, length=32, remat="layer")
    cfg = small.replace(
        made.model, kda=kda.Config(16, num_heads=2, head_dim=16), dense=mlp.Config(16, 48)
    )
    return dataclasses.replace(made, model=cfg)


def test_fp8_products(recipe):
    """The first loss within 0.5% of bfloat16's; three large steps of AdamW later, which takes signs
    of gradients that FP8 rounds by some percent, within 2%. On a mesh as on one device.
    """
    exact, _ = meshes.on_one_device(recipe, 4)
    with record_impls() as ran:
        fp8, _ = meshes.on_one_device(dataclasses.replace(recipe, products="fp8_rows"), 4)
    assert ran["scaled_matmul", "reference"] > 40
    torch.testing.assert_close(fp8[0, LOSS], exact[0, LOSS], rtol=5e-3, atol=0)
    torch.testing.assert_close(fp8[:, LOSS], exact[:, LOSS], rtol=2e-2, atol=0)
    assert not torch.equal(fp8[:, LOSS], exact[:, LOSS])
    metrics, _, _ = meshes.on_threads(
        dataclasses.replace(recipe, products="fp8_rows", mesh=Mesh(fsdp=2)), 2
    )
    torch.testing.assert_close(metrics[0][:2, LOSS], fp8[:2, LOSS], rtol=2e-3, atol=0)


def test_parameters_in_bfloat16_alone(recipe):
    """No float32 copy of a matrix is kept; losses stay near, and ranks that hold the same part hold
    the same bits.
    """
    made = dataclasses.replace(recipe, master="bfloat16")
    metrics, state = meshes.on_one_device(made, 4)
    expected, wide = meshes.on_one_device(recipe, 4)
    torch.testing.assert_close(metrics[:, LOSS], expected[:, LOSS], rtol=2e-2, atol=0)
    assert state.params.layers[0].attn.w_q.dtype == torch.bfloat16
    assert state.params.layers[0].attn.A_log.dtype == torch.float32
    sizes = [sum(x.nbytes for x in tree.leaves((s.params, s.opt_state))) for s in (state, wide)]
    assert sizes[0] < 0.87 * sizes[1], "10 bytes a parameter instead of 12"
    mesh = dataclasses.replace(made, mesh=Mesh(dp=2))
    _, states, _ = meshes.on_threads(mesh, 2)
    pairs = list(meshes.replicas(mesh, states))
    assert pairs
    assert [path for path, a, b in pairs if not torch.equal(a, b)] == []


def test_gradients_that_nothing_is_added_to_stay_narrow(recipe, monkeypatch):
    """They have the values of wide ones: each is one rounded cotangent."""
    made = dataclasses.replace(recipe, master="bfloat16")
    placements = fsdp.placements
    leaf_norms = optim.leaf_norms
    found = []
    for adds in (False, True):
        dtypes = []

        def placed(*args, wanted=adds, **how):
            return placements(*args, **{**how, "adds": wanted})

        def noting(grads, dtypes=dtypes, **how):
            dtypes.extend(g.dtype for g in tree.leaves(grads))
            return leaf_norms(tree.map(precision.upcast, grads), **how)

        monkeypatch.setattr(fsdp, "placements", placed)
        monkeypatch.setattr(optim, "leaf_norms", noting)
        _, state = meshes.on_one_device(made, 2)
        found.append(tree.leaves(state))
        assert (torch.bfloat16 in dtypes) != adds
    assert all(map(torch.equal, *found))


def test_what_is_refused(recipe):
    with pytest.raises(ValueError, match=r"FP8 products are for activations in bfloat16"):
        dataclasses.replace(recipe, compute="float32", products="fp8_rows")
    with pytest.raises(ValueError, match=r"precision.param=torch.bfloat16 is narrower"):
        dataclasses.replace(recipe, compute="float32", master="bfloat16")
