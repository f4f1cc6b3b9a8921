from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import grad, vmap

from k31fn.parallel.axis import Axis
from k31fn.parallel.collectives import psum, pvary
from k31fn.parallel.mesh import Mesh
from k31fn.parallel.sharding import UNSHARDED, Sharding


def test_an_unsharded_layer_has_no_axis():
    assert UNSHARDED.axes() == {}
    assert Sharding() == UNSHARDED


def test_axes_lists_what_is_split():
    tp, one = Axis("tp", 4), Axis("cp", 1)
    assert Sharding(tp, tp, tp, sequence=tp, context=one).axes() == dict.fromkeys(
        ["heads", "mlp", "vocab", "sequence"], tp
    )


def test_every_field_may_be_split():
    tp = Axis("tp", 2)
    names = [f.name for f in dataclasses.fields(Sharding)]
    assert list(Sharding(**dict.fromkeys(names, tp)).axes()) == names


@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_has_a_rank(size: int):
    with pytest.raises(
        ValueError, match=rf"Axis\('tp'\)\.size={size}: an axis has at least one rank"
    ):
        Axis("tp", size)


@pytest.mark.parametrize("collective", [psum, pvary])
@pytest.mark.parametrize("axis", [(), Axis("tp", 1)])
def test_a_collective_over_one_rank_is_an_identity(collective, axis):
    x = torch.randn(3)
    assert collective(x, axis) is x
    assert torch.equal(grad(lambda x: (collective(x, axis) ** 2).sum())(x), 2 * x)
    assert torch.equal(vmap(lambda x: collective(x, axis))(x[None])[0], x)


@pytest.mark.parametrize("collective", [psum, pvary])
def test_an_axis_that_is_bound_to_no_ranks_is_refused(collective):
    with pytest.raises(
        ValueError, match=f"{collective.__name__} over axis 'tp' of size 2: not bound to ranks"
    ):
        collective(torch.ones(2), Axis("tp", 2))


def test_a_tuple_of_axes_is_split_too():
    axes = Mesh(fsdp=4, tp=2, ep=4).axes()
    assert Sharding(experts=axes.ep, context=axes.cp).axes() == {"experts": axes.ep}


def test_a_mesh_says_how_the_model_lies_on_it():
    axes = Mesh(fsdp=2, cp=2, tp=4, ep=2).axes()
    sh = Sharding.on(axes)
    assert sh.heads == sh.mlp == sh.vocab == sh.sequence == axes.tp
    assert [a.name for a in sh.tokens] == ["cp", "tp_outer", "tp_inner"]
    assert [a.name for a in axes.data] == ["fsdp", "cp"]
    assert (sh.experts, sh.expert_mlp) == ((axes.tp[1],), (axes.tp[0],))


def test_tensor_parallelism_without_sequence_sharding_is_refused():
    tp = Axis("tp", 2)
    with pytest.raises(
        ValueError, match=r"Sharding.heads=\['tp'\], but sequence=\[\]: .* take Sharding.on\(axes\)"
    ):
        Sharding(heads=tp)
    with pytest.raises(ValueError, match=r"Sharding.vocab=\['tp'\], but sequence=\['cp'\]"):
        Sharding(Axis("cp", 2), Axis("cp", 2), vocab=tp, sequence=Axis("cp", 2))
    with pytest.raises(ValueError, match=r"Sharding.heads=\[\], but sequence=\['tp'\]"):
        Sharding(sequence=tp)
