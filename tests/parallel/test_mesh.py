from __future__ import annotations

import pytest

from k31fn.parallel import Mesh


def names(axes) -> list[str]:
    return [a.name for a in axes]


def test_an_empty_mesh_has_no_axis():
    mesh = Mesh()
    assert mesh.world_size == 1
    assert mesh.axes().atoms == ()
    assert list(mesh.coordinates()) == [{}]


@pytest.mark.parametrize(
    ("mesh", "world", "atoms", "ep", "efsdp", "etp"),
    [
        (Mesh(fsdp=2, ep=2), 2, ["fsdp"], ["fsdp"], [], []),
        (Mesh(fsdp=4, ep=2), 4, ["fsdp_outer", "fsdp_inner"], ["fsdp_inner"], ["fsdp_outer"], []),
        (Mesh(tp=2, ep=2), 2, ["tp"], ["tp"], [], []),
        (Mesh(fsdp=2, tp=2, ep=2), 4, ["fsdp", "tp"], ["tp"], ["fsdp"], []),
        (
            Mesh(fsdp=4, tp=2, ep=4),
            8,
            ["fsdp_outer", "fsdp_inner", "tp"],
            ["fsdp_inner", "tp"],
            ["fsdp_outer"],
            [],
        ),
        (
            Mesh(pp=2, dp=3, fsdp=2, cp=4, tp=2, ep=4),
            96,
            ["pp", "dp", "fsdp", "cp_outer", "cp_inner", "tp"],
            ["cp_inner", "tp"],
            ["fsdp", "cp_outer"],
            [],
        ),
        (Mesh(tp=4, ep=2), 4, ["tp_outer", "tp_inner"], ["tp_inner"], [], ["tp_outer"]),
    ],
)
def test_ep_takes_the_innermost_ranks(mesh: Mesh, world: int, atoms, ep, efsdp, etp):
    axes = mesh.axes()
    assert mesh.world_size == world
    assert [names(v) for v in (axes.atoms, axes.ep, axes.efsdp, axes.etp)] == [
        atoms,
        ep,
        efsdp,
        etp,
    ]
    size = 1
    for a in axes.ep:
        size *= a.size
    assert size == mesh.ep


def test_ranks_count_with_tp_fastest():
    mesh = Mesh(dp=2, fsdp=3, tp=2)
    coordinates = list(mesh.coordinates())
    assert coordinates[1] == {"dp": 0, "fsdp": 0, "tp": 1}
    assert coordinates[2] == {"dp": 0, "fsdp": 1, "tp": 0}
    assert coordinates == [mesh.coordinate(r) for r in range(mesh.world_size)]


def test_views_together_are_in_the_order_of_the_mesh():
    axes = Mesh(fsdp=2, cp=2, tp=2).axes()
    assert names(axes.view("tp", "fsdp")) == ["fsdp", "tp"]
    with pytest.raises(ValueError, match="'ep' shares axis 'tp' with another"):
        Mesh(tp=2, ep=2).axes().view("tp", "ep")
    with pytest.raises(ValueError, match="mesh axis 'mp' unknown; known: pp, dp, fsdp"):
        axes.view("mp")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(tp=0), "mesh.tp=0: a view has at least one rank"),
        (
            lambda: Mesh(fsdp=8, tp=2, ep=12),
            r"mesh.ep=12 does not divide .* 8 x 1 x 2 .*; nearest: 8, 16",
        ),
        (lambda: Mesh(tp=6, ep=4), r"mesh.ep=4 .*; nearest: 3, 6"),
        (lambda: Mesh(ep=2), "mesh.ep=2"),
        (
            lambda: Mesh(fsdp=2, tp=2).check_world(8),
            r"= 4 ranks, the world has 8; mesh.fsdp=4 would fit",
        ),
        (lambda: Mesh(tp=3).check_world(8), "the world has 8; no mesh.fsdp alone fits"),
        (
            lambda: Mesh(fsdp=12, ep=12).check_divides("ep", num_experts=896),
            "mesh.ep=12 does not divide num_experts=896; nearest: 8, 14, 16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_values(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
