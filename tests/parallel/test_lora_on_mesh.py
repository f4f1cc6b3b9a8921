"""Layers with adapters on a mesh: factors that are whole where their weight is split, and bytes
that travel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import lora, params, random, tree
from k31fn.layers import kda, latent_moe, mla, mlp
from k31fn.parallel import AxisRules, Mesh, MeshAxes, P, Sharding, fsdp, partition
from k31fn.testing import assert_sharded_equals_dense
from tests.parallel.cases_moe import mesh_of

TOKENS = P(("dp", "fsdp"), ("cp", "tp"))
D = 16
MOE = latent_moe.Config(D, latent_size=32, expert_size=64, shared_size=8, num_experts=4, top_k=2)
KDA = kda.Config(D, num_heads=2, head_dim=8)
MLA = mla.Config(
    D, 2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)
MLP = mlp.Config(D, 16)
BIAS = torch.zeros(4, dtype=torch.float64)

LAYERS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "moe": (
        latent_moe.specs(MOE),
        lambda p, x, sh: latent_moe.apply(p, x, MOE, bias=BIAS, sh=sh).y,
    ),
    "kda": (kda.specs(KDA), lambda p, x, sh: kda.apply(p, x, KDA, sh=sh).y),
    "mla": (mla.specs(MLA), lambda p, x, sh: mla.apply(p, x, MLA, sh=sh).y),
    "mlp": (mlp.specs(MLP), lambda p, x, sh: mlp.apply(p, x, MLP, sh=sh).y),
}


def adapted(name: str, held: Any) -> Any:
    return lora.apply(
        LAYERS[name][0], pattern="w_|latent", rank=2, held=held, held_pattern="w_|latent"
    )


def weights(specs: Any, name: str) -> Any:
    """Adapters that are not zero, on weights large enough to matter."""
    dense = dict(
        tree.flatten_with_paths(params.init(LAYERS[name][0], random.key(1), dtype=torch.float64))
    )
    drawn = lora.init(
        specs, random.key(2), lambda path, tile: 10 * dense[path][tile], dtype=torch.float64
    )
    leaves = [
        random.normal(random.key(i), x.shape, dtype=torch.float64) / 3 if path.endswith(".b") else x
        for i, (path, x) in enumerate(tree.flatten_with_paths(drawn))
    ]
    wide = [x.to(torch.float64) if x.is_floating_point() else x for x in leaves]
    return tree.unflatten(tree.flatten(drawn)[1], wide)


def check(
    name: str,
    mesh: Mesh,
    held: Any,
    counts: dict[str, int],
    change: Callable[[Any], Any] = lambda specs: specs,
) -> None:
    specs = adapted(name, held)
    parts = partition(specs, AxisRules(), mesh)

    def run(axes: MeshAxes, w: Any, x: Tensor) -> Tensor:
        own = partition(specs, AxisRules(), mesh_of(axes))
        return LAYERS[name][1](
            fsdp.gather(w, fsdp.placements(change(specs), own, axes)), x, Sharding.on(axes)
        )

    args = weights(specs, name), random.normal(random.key(3), (2, 8, D), dtype=torch.float64)
    for backend in ("simulated", "threads"):
        sent = dict(counts)
        if backend == "threads" and mesh.ep > 1:  # rows travel as they are
            sent["ragged_all_to_all"] = 4
            sent["all_to_all"] = 1
        how: Any = {
            "mesh": mesh,
            "backends": (backend,),
            "collectives": sent,
            "rtol": 1e-10,
            "atol": 1e-12,
        }
        assert_sharded_equals_dense(run, args, (parts, TOKENS), out_specs=TOKENS, **how)


@pytest.mark.parametrize(
    ("name", "mesh", "held", "counts"),
    [
        ("moe", Mesh(tp=2), "mxfp4", {"all_gather": 6, "psum_scatter": 5, "psum": 10}),
        (
            "moe",
            Mesh(fsdp=2, ep=2),
            "mxfp4",
            {"all_gather": 17, "psum_scatter": 10, "all_to_all": 5},
        ),
        ("kda", Mesh(tp=2), "bfloat16", {"all_gather": 3, "psum_scatter": 3, "psum": 9}),
        ("mla", Mesh(tp=2), "fp8", {"all_gather": 4, "psum_scatter": 4, "psum": 8}),
        ("mlp", Mesh(fsdp=2), "fp8", {"all_gather": 12, "psum_scatter": 6}),
        pytest.param(
            "moe",
            Mesh(tp=2, fsdp=2, ep=2),
            "fp8",
            {"all_gather": 34, "psum_scatter": 18, "all_to_all": 5, "psum": 7},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "kda",
            Mesh(fsdp=2, tp=2),
            "fp8",
            {"all_gather": 38, "psum_scatter": 19, "psum": 9},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_values_and_gradients_equal_one_device(
    name: str, mesh: Mesh, held: str, counts: dict[str, int]
):
    """Over tp: a psum for each factor of a whole weight, and for one of the two factors of each
    split weight.

    Over fsdp everything is gathered, codes and scales by themselves, and two gradients for each
    matrix are scattered.
    """
    check(name, mesh, held, counts)


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_a_factor_that_is_not_known_to_be_one_is_found(name: str):
    """Without ``beside`` each rank's gradient is of its own columns alone."""

    def forget(specs: Any) -> Any:
        return tree.map(lambda s: dataclasses.replace(s, beside=()), specs)

    with pytest.raises((AssertionError, ValueError), match=r"gradient|pvary|varies"):
        check(name, Mesh(tp=2), "bfloat16", {}, forget)


def test_bytes_travel_as_bytes():
    """Of a weight over fsdp its codes are sent, an eighth of its float64."""
    specs, mesh = adapted("mlp", "fp8"), Mesh(fsdp=2)
    places = fsdp.placements(
        specs, partition(specs, AxisRules(), mesh), mesh.axes(), compute=torch.float64
    )
    assert places.w_up.base.codes.dtype == torch.uint8
    assert places.w_up.base.codes.gather
    assert places.w_up.a.dtype == torch.float64
    assert places.w_up.base.codes.frozen
    assert not places.w_up.a.frozen
