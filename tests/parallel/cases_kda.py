"""KDA on meshes: functions of one rank's arrays that the tests run on every backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k31fn import tree
from k31fn.autodiff import remat
from k31fn.kernels.registry import use_impl
from k31fn.layers import kda, short_conv
from k31fn.parallel import AxisRules, Mesh, MeshAxes, Sharding, axis_size, fsdp, partition, pvary
from k31fn.segments import Segments

CFG = kda.Config(hidden_size=8, num_heads=4, head_dim=4, decay_rank=3)
CONV = short_conv.Config(6)


def mesh_of(axes: MeshAxes) -> Mesh:
    """The mesh that these axes are of."""
    return Mesh(**{view: axis_size(getattr(axes, view)) for view in ("dp", "fsdp", "cp", "tp")})


def spread(axes: MeshAxes, params: kda.Params[Tensor], x: Tensor, segments: Segments) -> Tensor:
    """KDA with its weights spread over fsdp and cp, gathered where the layer uses them."""
    specs = kda.specs(CFG)
    places = fsdp.placements(specs, partition(specs, AxisRules(), mesh_of(axes)), axes)
    return kda.apply(fsdp.gather(params, places), x, CFG, segments=segments, sh=Sharding.on(axes)).y


def rematerialised(axes: MeshAxes, params: kda.Params[Tensor], x: Tensor) -> Tensor:
    """The same inside remat, on one document per row."""
    specs = kda.specs(CFG)
    places = fsdp.placements(specs, partition(specs, AxisRules(), mesh_of(axes)), axes)
    sh = Sharding.on(axes)
    return remat(lambda params, x: kda.apply(fsdp.gather(params, places), x, CFG, sh=sh).y)(
        params, x
    )


def whole(axes: MeshAxes, params: kda.Params[Tensor], x: Tensor, segments: Segments) -> Tensor:
    """KDA with weights that each data rank holds whole: collectives are the layer's own, and one
    psum per weight.
    """
    params = tree.map(lambda w: pvary(w, axes.data), params)
    return kda.apply(params, x, CFG, segments=segments, sh=Sharding.on(axes)).y


WIDE = kda.Config(hidden_size=8, num_heads=2, head_dim=16, decay_rank=3)


def fused(axes: MeshAxes, params: kda.Params[Tensor], x: Tensor, segments: Segments) -> Tensor:
    """``whole`` by the fused kernels, which want heads of 16."""
    params = tree.map(lambda w: pvary(w, axes.data), params)
    with use_impl(kda_gated="triton", kda="triton", kda_fragment="triton"):
        return kda.apply(params, x, WIDE, segments=segments, sh=Sharding.on(axes)).y


def one_document(axes: MeshAxes, params: kda.Params[Tensor], x: Tensor) -> Tensor:
    """The same without segments: one document per row."""
    params = tree.map(lambda w: pvary(w, axes.data), params)
    return kda.apply(params, x, CFG, sh=Sharding.on(axes)).y


def convolution(axes: MeshAxes, params: Any, x: Tensor, segments: Segments) -> Tensor:
    """The short convolution alone, on slices."""
    params = tree.map(lambda w: pvary(w, axes.data), params)
    return short_conv.apply(params, x, CONV, segments=segments, sh=Sharding.on(axes))
