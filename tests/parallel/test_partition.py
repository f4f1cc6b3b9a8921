from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from k31fn import params, random, tree
from k31fn.layers import kda, latent_moe, mla, mlp
from k31fn.parallel import AxisRules, Mesh, P, partition
from k31fn.parallel.partition import broadcast, local_shape, tile, tiles
from k31fn.parallel.tiling import assemble, cut
from k31fn.params import Constant, ParamSpec


@dataclass(frozen=True)
class RulesOfAnotherLayer(AxisRules):
    """A spec may have its axis, which the rules of other models do not know."""

    of_these_rules: tuple[str, ...] = ()


def spec(shape, axes, tags=()) -> ParamSpec:
    return ParamSpec(shape, axes, Constant(0.0), tags=frozenset(tags))


def test_the_tile_of_each_rank_covers_the_tensor_once():
    mesh, x = Mesh(fsdp=2, cp=2, tp=2), torch.arange(8 * 6).reshape(8, 6)
    for p in (P("fsdp", "tp"), P(("tp", "fsdp", "cp")), P(None, "tp"), P(("fsdp", "tp"))):
        parts = [cut([p], [x], mesh, c)[0] for c in mesh.coordinates()]
        assert all(q.shape == local_shape(p, x.shape, mesh) for q in parts)
        assert torch.equal(assemble(parts, p, mesh), x)


def test_the_first_view_of_a_dimension_is_the_outermost():
    mesh = Mesh(fsdp=2, tp=2)
    assert tile(P(("tp", "fsdp")), (8,), mesh, {"fsdp": 1, "tp": 0}) == (slice(2, 4),)
    assert tile(P(("fsdp", "tp")), (8,), mesh, {"fsdp": 1, "tp": 0}) == (slice(4, 6),)


def test_initial_values_are_the_same_on_every_mesh():
    specs, key = kda.specs(kda.Config(hidden_size=8, num_heads=4, head_dim=4)), random.key(3)
    whole = params.init(specs, key, dtype=torch.float32)
    mesh = Mesh(fsdp=2, tp=2)
    found = partition(specs, AxisRules(), mesh)
    for coordinate in mesh.coordinates():
        own = params.init(
            specs, key, dtype=torch.float32, tile=tiles(specs, found, mesh, coordinate)
        )
        expected = cut(broadcast(found, whole), tree.leaves(whole), mesh, coordinate)
        for a, b in zip(tree.leaves(own), expected, strict=True):
            assert torch.equal(a, b)


def test_rules_split_heads_and_columns_over_tp_and_the_rest_over_fsdp():
    found = partition(mlp.specs(mlp.Config(8, 12)), AxisRules(), Mesh(fsdp=2, tp=2))
    assert found.w_gate == P(("fsdp", "cp"), "tp")
    assert found.w_down == P(("tp", "fsdp", "cp"), None)
    found = partition(mla.specs(mla.Config(8, 4, 6, 6, 4, 2, 4)), AxisRules(), Mesh(tp=2))
    assert found.w_qb == P(None, "tp")
    assert found.w_o == P("tp", None)
    assert found.w_qa == P(None, None)


def test_experts_go_over_ep_and_what_it_leaves():
    cfg = latent_moe.Config(8, 4, 4, 2, num_experts=4, top_k=2)
    experts = partition(latent_moe.specs(cfg), AxisRules(), Mesh(fsdp=4, ep=2)).experts
    assert experts.w_gate == experts.w_up == P(("ep", "efsdp"), None, "etp")
    assert experts.w_down == P(("ep", "efsdp"), "etp", None)


def test_a_weight_that_nothing_divides_stays_whole():
    assert partition({"w": spec((3,), ("hidden",))}, AxisRules(), Mesh(fsdp=2)) == {"w": P(())}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: local_shape(P("tp"), (6,), Mesh(tp=4)),
            r"P\('tp'\): tp = 4 ranks do not divide .* 6; nearest: 3, 6",
        ),
        (
            lambda: local_shape(P("tp", "tp"), (4, 4), Mesh(tp=2)),
            "uses mesh axis 'tp' twice in one tensor",
        ),
        (lambda: local_shape(P("tp", "ep"), (4, 4), Mesh(tp=2, ep=2)), "uses mesh axis 'tp' twice"),
        (
            lambda: local_shape(P(None, "tp"), (4,), Mesh(tp=2)),
            "has 2 entries for a tensor of 1 dimensions",
        ),
        (
            lambda: partition({"w": spec((4,), ("of_these_rules",))}, AxisRules(), Mesh()),
            "w: logical axis 'of_these_rules' unknown",
        ),
        (
            lambda: partition({"w": spec((3,), ("heads",))}, AxisRules(), Mesh(tp=2)),
            "w: .* ranks do not divide",
        ),
        (
            lambda: partition({"w": spec((4, 4), ("heads", "mlp"))}, AxisRules(), Mesh(tp=2)),
            "w: .* uses mesh axis 'tp' twice",
        ),
        (lambda: broadcast(("tp",), (torch.ones(1),)), "every leaf is a P"),
        (lambda: broadcast((P(), P()), (torch.ones(1),)), "do not fit the tree"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
