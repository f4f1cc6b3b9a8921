"""Gated DeltaNet: linear attention with a gated delta rule whose decay is one number per head.

Equations (arXiv 2412.06464, with the initial values of Mamba-2, arXiv 2405.21060); K dims of a
head's queries and keys, V of its values::

    q, k, v = SiLU(conv(x W_q)), SiLU(conv(x W_k)), SiLU(conv(x W_v))          [T H K], [T H V]
    q, k    = K^-0.5 q rsqrt(sum q^2 + eps), k rsqrt(sum k^2 + eps)
    g       = -exp(A_log) softplus(x W_a + dt_bias)                            log-decay [T H]
    beta    = sigmoid(x W_b)                                                             [T H]
    S_t     = e^g (I - beta k k^T) S_{t-1} + beta k v^T        o_t = S_t^T q_t
    y       = (SiLU(x W_g) * RMSNorm(o)) W_o

``conv`` is :mod:`k31fn.layers.short_conv`. Its histories and S are reset at document boundaries. A
padding token's ``y`` is 0. float32 islands: ``A_log``, ``dt_bias``, the convolutions and
``o_norm``; the L2 norms, both gates, S and the output norm are computed in float32.

On a mesh: heads are split over ``sh.heads``, each rank having all tokens of its slice of the
context. Between slices travel the last inputs of the convolutions, and per head the pair (state
from zero, transition) of each slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F
from einops import rearrange

from k31fn import tree
from k31fn.kernels.gated_norm import gated_norm
from k31fn.kernels.gdn import gdn, gdn_fragment
from k31fn.kernels.short_conv import short_conv
from k31fn.layers import short_conv as conv
from k31fn.layers.arguments import check_call
from k31fn.layers.kind import Flops, Halo, Output, TokenMixer
from k31fn.layers.linear import linear, linears, split_heads
from k31fn.parallel.collectives import all_gather, axis_size, psum_scatter, pvary
from k31fn.parallel.context import relay, whole_slice
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec, SoftplusInverse, Uniform
from k31fn.params import init as init_params
from k31fn.precision import island, upcast
from k31fn.segments import Segments, whole
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "State", "apply", "extend", "init", "init_state", "specs"]


def __dir__() -> list[str]:
    return __all__


# Rates of 1 to 16 a step, and steps of 0.001 to 0.1: decays from e^-0.001 to e^-1.6 a token.
_RATES = Uniform(0.0, math.log(16))
_SMALL_STEPS = SoftplusInverse()


@dataclass(frozen=True)
class Config:
    """Gated DeltaNet.

    Attributes:
        hidden_size: width of the input and the output.
        num_heads: heads of the whole model.
        head_dim: dims per head of queries and keys; the paper's models have 256.
        value_dim: dims per head of values; None: ``head_dim``. The paper's models have twice that.
        conv_width: taps of the short convolutions.
        norm_eps: of the output norm.
        l2_eps: of the L2 norms, added to the sum of squares.
        init_std: of the projections.
        conv_init: of the convolutions.
        A_log_init: of ``A_log``; public code draws the log of U(0, 16).
        dt_bias_init: of ``dt_bias``.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    value_dim: int | None = None
    conv_width: int = 4
    norm_eps: float = 1e-5
    l2_eps: float = 1e-6
    init_std: float = 0.02
    conv_init: Uniform | Normal = conv.DEFAULT_INIT
    A_log_init: Constant | Uniform = _RATES
    dt_bias_init: SoftplusInverse | Constant = _SMALL_STEPS

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "columns"):
            if getattr(self, name) < 1:
                field = "value_dim" if name == "columns" else name
                raise ValueError(
                    f"gdn.Config.{field}={getattr(self, name)} must be positive; set it to 1 or "
                    "more"
                )
        for name in ("norm_eps", "l2_eps", "init_std"):
            # `not >` and not `<=`: it refuses NaN too.
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"gdn.Config.{name}={getattr(self, name)} must be positive, such as 1e-6 or "
                    "0.02"
                )
        # Made here so that a bad conv_width is refused now, in the convolution's words.
        _ = self.conv_keys

    @property
    def columns(self) -> int:
        """Dims per head of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def conv_keys(self) -> conv.Config:
        """Config of the convolutions of queries and of keys."""
        return conv.Config(self.num_heads * self.head_dim, self.conv_width, self.conv_init)

    @property
    def conv_values(self) -> conv.Config:
        """Config of the convolution of values."""
        return conv.Config(self.num_heads * self.columns, self.conv_width, self.conv_init)


@tree.dataclass
class Params(Generic[Leaf]):
    """Weights of Gated DeltaNet.

    ``w_q w_k [D HK]  w_v w_g [D HV]  conv_q conv_k .weight [HK W]  conv_v.weight [HV W]  w_a w_b [D
    H]  A_log dt_bias [H]  o_norm [V]  w_o [HV D]``. Columns are ordered by head.
    """

    w_q: Leaf
    w_k: Leaf
    w_v: Leaf
    conv_q: conv.Params[Leaf]
    conv_k: conv.Params[Leaf]
    conv_v: conv.Params[Leaf]
    w_a: Leaf
    w_b: Leaf
    A_log: Leaf
    dt_bias: Leaf
    w_g: Leaf
    o_norm: Leaf
    w_o: Leaf


@tree.dataclass
class State:
    """What decoding keeps: the last inputs of the three convolutions, and S."""

    conv_q: Float[Tensor, "B history HK"]
    conv_k: Float[Tensor, "B history HK"]
    conv_v: Float[Tensor, "B history HV"]
    s: Float[Tensor, "B H K V"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    D, H = cfg.hidden_size, cfg.num_heads
    HK = H * cfg.head_dim
    HV = H * cfg.columns

    def matrix(rows: int, columns: int, axes: tuple[str, str], *, head_dim: int = 0) -> ParamSpec:
        tags = frozenset({"matrix", "per_head"} if head_dim else {"matrix"})
        return ParamSpec((rows, columns), axes, Normal(cfg.init_std), tags=tags, head_dim=head_dim)

    # float32 in a bfloat16 model too: few numbers that set rates, and whose updates are small.
    def vector(dim: int, axis: str, init: Constant | Uniform | SoftplusInverse) -> ParamSpec:
        return ParamSpec((dim,), (axis,), init, torch.float32, frozenset({"no_decay"}))

    # Muon orthogonalises each head of queries, keys and values by itself.
    by_head = ("hidden", "heads")
    keys = matrix(D, HK, by_head, head_dim=cfg.head_dim)
    return Params(
        w_q=keys,
        w_k=keys,
        w_v=matrix(D, HV, by_head, head_dim=cfg.columns),
        conv_q=conv.specs(cfg.conv_keys),
        conv_k=conv.specs(cfg.conv_keys),
        conv_v=conv.specs(cfg.conv_values),
        w_a=matrix(D, H, by_head),
        w_b=matrix(D, H, by_head),
        A_log=vector(H, "heads", cfg.A_log_init),
        dt_bias=vector(H, "heads", cfg.dt_bias_init),
        w_g=matrix(D, HV, by_head),
        o_norm=vector(cfg.columns, "head_dim", Constant(1.0)),
        w_o=matrix(HV, D, ("heads", "hidden")),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Output:
    """Mixes the tokens of each document. ``segments`` None: one document per row.

    On a mesh ``x`` is split over ``sh.tokens``, ``segments`` over ``sh.context``, and heads over
    ``sh.heads``. Gradients: to ``params`` and ``x``, to any order.

    Raises:
        ValueError: parameters of another number of heads, or slices of the context shorter than
            ``conv_width - 1``.
    """
    check_call(params, x, cfg, (Params, Config), segments=segments, sh=sh)
    # Each rank has some heads, and a head needs all tokens of the slice.
    x = all_gather(x, sh.sequence, 1)
    if segments is None:
        segments = whole_slice(x.shape[0], x.shape[1], sh.context, device=x.device)
    y = _mix(params, x, cfg, segments, (), sh)[0]
    # The sum over the heads of all ranks; each keeps its own tokens of it.
    return Output(psum_scatter(y, sh.sequence, 1))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before a document's first token. ``dtype`` is that of ``x``; S is at least
    float32.
    """
    keys = conv.init_state(cfg.conv_keys, batch, dtype=dtype, device=device).history
    values = conv.init_state(cfg.conv_values, batch, dtype=dtype, device=device).history
    shape = (batch, cfg.num_heads, cfg.head_dim, cfg.columns)
    return State(keys, keys, values, torch.zeros(shape, dtype=island(dtype), device=device))


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply` on the next T tokens of one document per row; any cuts of a document give the
    same outputs.
    """
    packing = whole(x.shape[0], x.shape[1], device=x.device)
    y, inputs, s = _mix(params, x, cfg, packing, state, UNSHARDED)
    before = (state.conv_q, state.conv_k, state.conv_v)
    after = [conv.advance(h, u, cfg.conv_keys) for h, u in zip(before, inputs, strict=True)]
    return y, State(after[0], after[1], after[2], s)


def _mix(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    segments: Segments,
    state: State | tuple[()],
    sh: Sharding,
) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, ...], Float[Tensor, "B H K V"]]:
    """This rank's heads on its slice of the tokens: its part of the sum over heads, the inputs of
    the convolutions, and S after the last token.
    """
    heads = cfg.num_heads // axis_size(sh.heads)
    weights = (params.w_q, params.w_k, params.w_v, params.w_a, params.w_b)
    of_q, of_k, of_v, of_step, of_beta = linears(x, weights)
    projected = (of_q, of_k, of_v)
    if isinstance(state, State):
        before = (state.conv_q, state.conv_k, state.conv_v)
    else:
        # Of all three together, so that they travel in one message.
        before = conv.histories(projected, cfg.conv_keys, segments, sh)
    taps = (params.conv_q.weight, params.conv_k.weight, params.conv_v.weight)
    convolved = short_conv(projected, taps, segments.ids, before)
    pairs = zip(convolved, (cfg.head_dim, cfg.head_dim, cfg.columns), strict=True)
    q, k, v = (split_heads(y, heads, width, "gdn w_q, w_k, w_v") for y, width in pairs)
    q = _l2_norm(q, cfg.l2_eps, cfg.head_dim**-0.5)
    k = _l2_norm(k, cfg.l2_eps, 1.0)
    step = F.softplus(upcast(of_step) + upcast(params.dt_bias))
    g = -upcast(params.A_log).exp() * step
    beta = torch.sigmoid(upcast(of_beta))
    s = state.s if isinstance(state, State) else _state_before(k, v, g, beta, segments, sh)
    o, s = gdn(q, k, v, g, beta, segments.ids, s)
    gate = split_heads(linear(x, params.w_g), heads, cfg.columns, "gdn w_g")
    # SiLU(z) = z sigmoid(z): the gated norm of KDA, times its gate. Its weight is one for all
    # heads, whole on every rank: the gradient is summed over them.
    o = gate * gated_norm(o, gate, pvary(params.o_norm, sh.sequence), cfg.norm_eps)
    return linear(rearrange(o, "b t h v -> b t (h v)"), params.w_o), projected, s


def _l2_norm(x: Float[Tensor, "B T H K"], eps: float, scale: float) -> Float[Tensor, "B T H K"]:
    """``scale * x * rsqrt(sum x^2 + eps)`` in float32, rounded once."""
    wide = upcast(x)
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps))).to(x.dtype)


def _state_before(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    segments: Segments,
    sh: Sharding,
) -> Float[Tensor, "B H K V"] | tuple[()]:
    """S before this rank's slice, which the ranks before it hand on."""
    if axis_size(sh.context) == 1:
        # The first token of the slice is the row's first: S is zero, which () says for free.
        return ()
    # Two passes over the slice: a rank learns what its tokens do to any S before it is told S.
    fragment = gdn_fragment(k, v, g, beta, segments.ids)
    return relay(fragment.state, fragment.transition, segments.position, sh.context)


def _flops(cfg: Config, length: int) -> Flops:
    """6 K V per head: to take a token out of the state, to add it and to read."""
    del length
    return Flops(6.0 * cfg.num_heads * cfg.head_dim * cfg.columns)


KIND = TokenMixer(
    name="gdn",
    label="Gated DeltaNet",
    config=Config,
    specs=specs,
    apply=apply,
    init_state=init_state,
    extend=extend,
    flops=_flops,
    tensor_parallel=lambda cfg: {"num_heads": cfg.num_heads},
    halo=lambda cfg: Halo(cfg.conv_width - 1, "a convolution", "conv_width"),
    splits=frozenset({"tp", "cp"}),
)
