"""One layer of the vision tower: attention inside each image, then an MLP, both on a residual
stream.

Equations (MoonViT-V2, arXiv 2607.24653)::

    h = RMSNorm(x)    q, k, v = h W_q, h W_k, h W_v
    o = softmax(K^-0.5 rot(q) rot(k)^T) v    x = x + o W_o
    x = x + gelu_tanh(RMSNorm(x) W_in) W_out

Bidirectional over all patches (and frames) of one image and no other. ``rot`` turns pairs of
adjacent dims by the row and the column of the patch (:mod:`k31fn.layers.patch_position`). The heads
together are wider than the residual stream. Softmax and rotation are float32 islands. A padding
patch attends to nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange

from k31fn import tree
from k31fn.autodiff.keep import keep
from k31fn.kernels.interval_attention import interval_attention
from k31fn.kernels.norm import rms_norm
from k31fn.layers.linear import linear, split_heads
from k31fn.layers.patch_position import angles
from k31fn.layers.patches import Patches
from k31fn.parallel.collectives import all_gather, psum_scatter, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec, TruncatedNormal
from k31fn.params import init as init_params
from k31fn.precision import island, upcast
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = ["Config", "Params", "apply", "geometry", "init", "specs", "without_branches"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """A layer of the tower.

    Attributes:
        hidden_size: width of the residual stream.
        num_heads: attention heads of the whole layer.
        head_dim: dims of a head, a multiple of 4.
        intermediate_size: inner width of the MLP.
        rope_theta: base of the rotation's frequencies.
        norm_eps: of the norms; the released code passes none, which in torch is float32's epsilon
            for every dtype.
        init_std: of the attention's weights; the MLP's are drawn with ``sqrt(2 / inputs)``.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    norm_eps: float = torch.finfo(torch.float32).eps
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"vision_block.Config.{name}={getattr(self, name)} must be at least 1"
                )
        if self.head_dim % 4:
            raise ValueError(
                f"vision_block.Config.head_dim={self.head_dim} must be a multiple of 4: pairs of "
                f"dims turn by row and by column in turn; nearest: {-(-self.head_dim // 4) * 4}"
            )
        for name in ("rope_theta", "norm_eps", "init_std"):
            # `not >` and not `<=`: it refuses NaN too.
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"vision_block.Config.{name}={getattr(self, name)} must be positive"
                )


@tree.dataclass
class Params(Generic[Leaf]):
    """``attn_norm [D]  w_q w_k w_v [D HK]  w_o [HK D]  mlp_norm [D]  w_in [D F]  w_out [F D]``;
    columns by head.
    """

    attn_norm: Leaf
    w_q: Leaf
    w_k: Leaf
    w_v: Leaf
    w_o: Leaf
    mlp_norm: Leaf
    w_in: Leaf
    w_out: Leaf


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters. Heads and the MLP's inner width are split under tensor
    parallelism.
    """
    D, HK, F = cfg.hidden_size, cfg.num_heads * cfg.head_dim, cfg.intermediate_size
    matrix = frozenset({"matrix"})
    init = Normal(cfg.init_std)
    # The tag lets Muon orthogonalise each head by itself; w_o mixes heads and is one matrix.
    by_head = ParamSpec(
        (D, HK), ("hidden", "heads"), init, tags=matrix | {"per_head"}, head_dim=cfg.head_dim
    )
    norm = ParamSpec((D,), ("hidden",), Constant(1.0), tags=frozenset({"no_decay"}))
    return Params(
        attn_norm=norm,
        w_q=by_head,
        w_k=by_head,
        w_v=by_head,
        w_o=ParamSpec((HK, D), ("heads", "hidden"), init, tags=matrix),
        mlp_norm=norm,
        w_in=ParamSpec((D, F), ("hidden", "mlp"), TruncatedNormal(math.sqrt(2 / D)), tags=matrix),
        w_out=ParamSpec((F, D), ("mlp", "hidden"), TruncatedNormal(math.sqrt(2 / F)), tags=matrix),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


class _Geometry(NamedTuple):
    """What all layers of a tower know of the patches.

    Attributes:
        cos: of the angle that each pair of adjacent dims turns by, alike for all heads.
        sin: of the same.
        start: the first patch that a patch attends to, in the whole row.
        stop: one past the last; not above ``start`` for padding.
    """

    cos: Float[Tensor, "B T 1 K2"]
    sin: Float[Tensor, "B T 1 K2"]
    start: Int[Tensor, "B T"]
    stop: Int[Tensor, "B T"]


def geometry(patches: Patches, cfg: Config, dtype: torch.dtype) -> _Geometry:
    """The geometry of a pack, computed once for all layers; ``dtype`` is that of the
    activations.
    """
    # An island: bfloat16 cannot tell the columns above 256 apart.
    turn = angles(patches, cfg.head_dim, cfg.rope_theta, island(dtype))[:, :, None]
    return _Geometry(turn.cos(), turn.sin(), patches.start, patches.stop)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    geometry: _Geometry,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B T D"]:
    """``x + Attention(RMSNorm(x))``, then ``x + MLP(RMSNorm(x))``, on packed patches.

    On a mesh ``x`` is split by patch over ``sh.tokens`` and ``geometry`` over ``sh.context`` only.
    Patches of one image may lie on several ranks: keys and values are gathered over ``sh.context``.
    A remat may keep both sublayers after their norm, by the names of
    :data:`k31fn.layers.block.BRANCHES`.
    """
    # A sublayer gets its own weights without the norms': what it is given is what a remat must hand
    # it when it is made again, and the norms lie outside.
    weights = dataclasses.replace(params, attn_norm=(), mlp_norm=())
    # A norm's weight is whole on every rank and meets its tokens only: pvary sums its gradient.
    h = rms_norm(x, pvary(params.attn_norm, sh.sequence), cfg.norm_eps)
    x = x + keep("attention", functools.partial(_attention, cfg, sh))(weights, h, geometry)
    h = rms_norm(x, pvary(params.mlp_norm, sh.sequence), cfg.norm_eps)
    return x + keep("ffn", functools.partial(_mlp, sh))(weights, h)


def without_branches(params: Params[Any]) -> Params[Any]:
    """A tree like the parameters with those that the sublayers read after their norm replaced by
    ``()``.
    """
    absent = dict.fromkeys((field.name for field in dataclasses.fields(Params)), ())
    return Params(**absent | {"attn_norm": params.attn_norm, "mlp_norm": params.mlp_norm})


def _mlp(sh: Sharding, params: Params[Any], h: Tensor) -> Tensor:
    # Columns of w_in and rows of w_out are split: each rank works on the tokens of all, and keeps
    # its own tokens of the sum.
    h = F.gelu(linear(all_gather(h, sh.sequence, 1), params.w_in), approximate="tanh")
    return psum_scatter(linear(h, params.w_out), sh.sequence, 1)


def _attention(
    cfg: Config, sh: Sharding, params: Params[Any], h: Tensor, geometry: _Geometry
) -> Tensor:
    # Heads are split: each rank has some, for the tokens of all.
    h = all_gather(h, sh.sequence, 1)
    q = split_heads(linear(h, params.w_q), cfg.num_heads, cfg.head_dim, "vision_block w_q")
    k = split_heads(linear(h, params.w_k), cfg.num_heads, cfg.head_dim, "vision_block w_k")
    v = split_heads(linear(h, params.w_v), cfg.num_heads, cfg.head_dim, "vision_block w_v")
    # Keys turn before they travel: a rank knows the positions of its own slice only.
    q = _rotate(q, geometry)
    k = _rotate(k, geometry)
    # One message for both.
    kv = all_gather(torch.cat([k, v], dim=-1), sh.context, 1)
    k, v = kv.split([cfg.head_dim, cfg.head_dim], dim=-1)
    o = interval_attention(q, k, v, geometry.start, geometry.stop, cfg.head_dim**-0.5)
    o = rearrange(o, "b t h k -> b t (h k)")
    return psum_scatter(linear(o.to(h.dtype), params.w_o), sh.sequence, 1)


def _rotate(x: Float[Tensor, "B T H K"], geometry: _Geometry) -> Float[Tensor, "B T H K"]:
    # Pairs are adjacent dims, as the released weights have them.
    a, b = rearrange(upcast(x), "b t h (pair two) -> two b t h pair", two=2)
    cos, sin = geometry.cos, geometry.sin
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return rearrange(turned, "b t h pair two -> b t h (pair two)").to(x.dtype)
