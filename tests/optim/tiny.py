"""A small tree of specs with a leaf of every kind, and gradients for it."""

from typing import Any, Generic

import torch

from k31fn import params, random, tree
from k31fn.params import Constant, Normal, ParamSpec
from k31fn.typing import Leaf, Tensor


@tree.dataclass
class Layer(Generic[Leaf]):
    w: Leaf
    w_q: Leaf
    experts: Leaf
    norm: Leaf
    bias: Any = ()


@tree.dataclass
class Tiny(Generic[Leaf]):
    embedding: Leaf
    layers: tuple[Layer[Leaf], ...]
    extra: dict[str, Leaf]


def spec(*shape: int, dtype=torch.float32, tags=(), **kwargs) -> ParamSpec:
    return ParamSpec(shape, ("",) * len(shape), Normal(0.5), dtype, frozenset(tags), **kwargs)


def specs(dtype=torch.float32) -> Tiny[ParamSpec]:
    layers = tuple(
        Layer(
            w=spec(6, 9, dtype=dtype, tags=["matrix"]),
            w_q=spec(8, 12, dtype=dtype, tags=["matrix", "per_head"], head_dim=4),
            experts=spec(3, 7, 5, dtype=dtype, tags=["matrix", "expert"]),
            norm=ParamSpec((8,), ("",), Constant(1.0), torch.float32, frozenset({"no_decay"})),
        )
        for _ in range(2)
    )
    extra = {
        "frozen": spec(4, 4, dtype=dtype, tags=["frozen", "matrix"]),
        "scale": spec(dtype=dtype),
    }
    return Tiny(spec(11, 6, dtype=dtype), layers, extra)


def weights(dtype=torch.float32, seed: int = 0) -> Tiny[Tensor]:
    return params.init(specs(dtype), random.key(seed))


def gradients(step: int, like: Tiny[Tensor]) -> Tiny[Tensor]:
    """Different at each step, with a common part so that momentum builds up."""
    generator = torch.Generator().manual_seed(step)
    return tree.map(lambda p: (torch.randn(p.shape, generator=generator) * 0.1 + 0.05).to(p), like)


def clone(values: Any) -> Any:
    return tree.map(lambda x: x.clone(), values)


def identical(a: Any, b: Any) -> bool:
    """Bit for bit, NaN equal to NaN."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs
    )


def largest_difference(a: Any, b: Any) -> float:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)
