"""Gated DeltaNet on meshes: functions of one rank's arrays that the tests run on every backend."""

from __future__ import annotations

from torch import Tensor

from k31fn import tree
from k31fn.layers import gdn
from k31fn.parallel import MeshAxes, Sharding, pvary
from k31fn.segments import Segments

CFG = gdn.Config(hidden_size=8, num_heads=4, head_dim=4, value_dim=3)


def whole(axes: MeshAxes, params: gdn.Params[Tensor], x: Tensor, segments: Segments) -> Tensor:
    """With weights that each data rank holds whole: collectives are the layer's own, and one psum
    per weight.
    """
    params = tree.map(lambda w: pvary(w, axes.data), params)
    return gdn.apply(params, x, CFG, segments=segments, sh=Sharding.on(axes)).y
