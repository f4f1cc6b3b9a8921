"""A layer of your own, written once, on a mesh of 2 x 2: ``python -m examples.shard_a_layer``."""

from torch import Tensor, float64, tanh

from k31fn import params, random
from k31fn.layers.linear import linear
from k31fn.parallel import (
    AxisRules,
    Mesh,
    MeshAxes,
    P,
    Sharding,
    all_gather,
    fsdp,
    partition,
    psum_scatter,
)
from k31fn.params import Normal, ParamSpec
from k31fn.testing import assert_sharded_equals_dense

MESH = Mesh(fsdp=2, tp=2)
TOKENS = P("fsdp", "tp")  # rows of a batch over fsdp, tokens of a row over tp
SPECS = [
    ParamSpec((8, 12), ("hidden", "mlp"), Normal(0.3)),
    ParamSpec((12, 8), ("mlp", "hidden"), Normal(0.3)),
]
PARTS = partition(SPECS, AxisRules(), MESH)  # "mlp" over tp, the other dimension over fsdp


def layer(axes: MeshAxes, weights: list[Tensor], x: Tensor) -> Tensor:
    """One rank's part: its tokens ``x [B T D]``, its columns and rows; alone it sends nothing."""
    up, down = fsdp.gather(weights, fsdp.placements(SPECS, PARTS, axes))
    sh = Sharding.on(axes)
    h = tanh(linear(all_gather(x, sh.sequence, 1), up))
    return psum_scatter(linear(h, down), sh.sequence, 1)


if __name__ == "__main__":
    weights = params.init(SPECS, random.key(0), dtype=float64)
    x = random.normal(random.key(1), (4, 6, 8), dtype=float64)
    # tokens, two weights, and the sum; the backward sends the same back
    sent = {"all_gather": 4, "psum_scatter": 4}
    # flops: a rank does a quarter of the work
    how = {"collectives": sent, "rtol": 1e-12, "atol": 1e-12, "flops": 1 / 4}
    specs = (PARTS, TOKENS)
    print(assert_sharded_equals_dense(layer, (weights, x), specs, TOKENS, MESH, **how))
