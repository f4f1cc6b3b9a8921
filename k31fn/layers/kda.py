"""Kimi Delta Attention: linear attention with a gated delta rule, the decay gate included.

Equations (Kimi Linear, arXiv 2510.26692; the bounded decay and the full-rank output gate are those
of Kimi K3, arXiv 2607.24653); K = V dims per head::

    q, k, v = SiLU(conv(x W_q)), SiLU(conv(x W_k)), SiLU(conv(x W_v))                  [T H K]
    q, k    = K^-0.5 q rsqrt(sum q^2 + eps), k rsqrt(sum k^2 + eps)
    g       = bound * sigmoid(exp(A_log) (x W_fa W_fb + dt_bias))           log-decay, in (bound, 0)
    beta    = sigmoid(x W_b)                                                           [T H]
    S_t     = (I - beta k k^T) Diag(e^g) S_{t-1} + beta k v^T        o_t = S_t^T q_t
    y       = (sigmoid(x W_g) * RMSNorm(o)) W_o

``conv`` is :mod:`k31fn.layers.short_conv`. Its histories and S are reset at document boundaries. A
padding token's ``y`` is 0. float32 islands: ``A_log``, of which 40 counts at most, ``dt_bias``, the
convolutions and ``o_norm``; the L2 norms, both gates, S and the output norm are computed in
float32.

On a mesh: heads are split over ``sh.heads``, each rank having all tokens of its slice of the
context. Between slices travel the last inputs of the convolutions, and per head the pair (state
from zero, transition) of each slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal

import torch
from einops import rearrange

from k31fn import tree
from k31fn.kernels.gated_norm import gated_norm
from k31fn.kernels.kda import kda, kda_fragment, kda_gated
from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY, TILE
from k31fn.kernels.kda_gates import kda_gates
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
from k31fn.precision import island
from k31fn.segments import Segments, whole
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "State", "apply", "extend", "init", "init_state", "specs"]


def __dir__() -> list[str]:
    return __all__


_ZERO = Constant(0.0)
_SMALL_STEPS = SoftplusInverse()


@dataclass(frozen=True)
class Config:
    """KDA.

    Attributes:
        hidden_size: width of the input and the output.
        num_heads: heads of the whole model.
        head_dim: dims per head of queries, keys and values.
        decay_rank: width between the two decay projections; None: ``head_dim``.
        conv_width: taps of the short convolutions.
        gate_lower_bound: the strongest log-decay per token. At least -5: a tile of 16 tokens then
            spans e^80, which float32 and bfloat16 hold.
        norm_eps: of the output norm.
        l2_eps: of the L2 norms, added to the sum of squares.
        keep: what the fused rule keeps for its backward: ``"factors"`` is the faster and for
            layers that are computed again (``remat``) costs nothing between forward and backward;
            ``"inputs"`` keeps less. The results are the same bits.
        init_std: of the projections.
        conv_init: of the convolutions.
        A_log_init: of ``A_log``; the report says 0, public code draws log U(1, 16).
        dt_bias_init: of ``dt_bias``; public code also uses 0.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    decay_rank: int | None = None
    conv_width: int = 4
    gate_lower_bound: float = -5.0
    norm_eps: float = 1e-5
    l2_eps: float = 1e-6
    keep: Literal["factors", "inputs"] = "factors"
    init_std: float = 0.02
    conv_init: Uniform | Normal = conv.DEFAULT_INIT
    A_log_init: Constant | Uniform = _ZERO
    dt_bias_init: SoftplusInverse | Constant = _SMALL_STEPS

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "rank"):
            if getattr(self, name) < 1:
                field = "decay_rank" if name == "rank" else name
                raise ValueError(
                    f"kda.Config.{field}={getattr(self, name)} must be positive; set it to 1 or "
                    "more"
                )
        for name in ("norm_eps", "l2_eps", "init_std"):
            # `not >` and not `<=`: it refuses NaN too.
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"kda.Config.{name}={getattr(self, name)} must be positive, such as 1e-6 or "
                    "0.02"
                )
        if self.keep not in ("factors", "inputs"):
            raise ValueError(
                f"kda.Config.keep={self.keep!r} is not known; set it to 'factors' or 'inputs'"
            )
        if not MIN_LOG_DECAY <= self.gate_lower_bound < 0:
            raise ValueError(
                f"kda.Config.gate_lower_bound={self.gate_lower_bound} must be in "
                f"[{MIN_LOG_DECAY}, 0): a tile of {TILE} tokens factors decays up to "
                f"exp({TILE} * bound), and e^80 is what float32 holds; use -5.0"
            )
        # Made here so that a bad conv_width is refused now, in the convolution's words.
        _ = self.conv

    @property
    def rank(self) -> int:
        """Width between the two decay projections."""
        return self.head_dim if self.decay_rank is None else self.decay_rank

    @property
    def conv(self) -> conv.Config:
        """Config of each of the three convolutions."""
        return conv.Config(self.num_heads * self.head_dim, self.conv_width, self.conv_init)


@tree.dataclass
class Params(Generic[Leaf]):
    """Weights of KDA.

    ``w_q w_k w_v w_g [D HK]  conv_q conv_k conv_v .weight [HK W]  w_fa [D R]  w_fb [R HK]  dt_bias
    [HK]  A_log [H] w_b [D H]  o_norm [K]  w_o [HK D]``. Columns are ordered by head.
    """

    w_q: Leaf
    w_k: Leaf
    w_v: Leaf
    conv_q: conv.Params[Leaf]
    conv_k: conv.Params[Leaf]
    conv_v: conv.Params[Leaf]
    w_fa: Leaf
    w_fb: Leaf
    dt_bias: Leaf
    A_log: Leaf
    w_b: Leaf
    w_g: Leaf
    o_norm: Leaf
    w_o: Leaf


@tree.dataclass
class State:
    """What decoding keeps: the last inputs of the three convolutions, and S."""

    conv_q: Float[Tensor, "B history channels"]
    conv_k: Float[Tensor, "B history channels"]
    conv_v: Float[Tensor, "B history channels"]
    s: Float[Tensor, "B H K V"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters."""
    D, HK = cfg.hidden_size, cfg.num_heads * cfg.head_dim

    def matrix(rows: int, columns: int, axes: tuple[str, str], *, head_dim: int = 0) -> ParamSpec:
        tags = frozenset({"matrix", "per_head"} if head_dim else {"matrix"})
        return ParamSpec((rows, columns), axes, Normal(cfg.init_std), tags=tags, head_dim=head_dim)

    # float32 in a bfloat16 model too: few numbers that set rates, and whose updates are small.
    def vector(dim: int, axis: str, init: Constant | Uniform | SoftplusInverse) -> ParamSpec:
        return ParamSpec((dim,), (axis,), init, torch.float32, frozenset({"no_decay"}))

    # Muon orthogonalises each head of these by itself.
    per_head = matrix(D, HK, ("hidden", "heads"), head_dim=cfg.head_dim)
    taps = conv.specs(cfg.conv)
    return Params(
        w_q=per_head,
        w_k=per_head,
        w_v=per_head,
        conv_q=taps,
        conv_k=taps,
        conv_v=taps,
        w_fa=matrix(D, cfg.rank, ("hidden", "rank")),
        w_fb=matrix(cfg.rank, HK, ("rank", "heads")),
        dt_bias=vector(HK, "heads", cfg.dt_bias_init),
        A_log=vector(cfg.num_heads, "heads", cfg.A_log_init),
        w_b=matrix(D, cfg.num_heads, ("hidden", "heads")),
        w_g=matrix(D, HK, ("hidden", "heads")),
        o_norm=vector(cfg.head_dim, "head_dim", Constant(1.0)),
        w_o=matrix(HK, D, ("heads", "hidden")),
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
    # From the rank's own tokens, as w_fa has no heads to split: 1/n of the work, and R values to
    # gather beside D. The weight is whole, so its gradient is summed over the ranks.
    decay = linear(x, tree.map(lambda w: pvary(w, sh.sequence), params.w_fa))
    # Each rank has some heads, and a head needs all tokens of the slice.
    x = all_gather(x, sh.sequence, 1)
    decay = all_gather(decay, sh.sequence, 1)
    if segments is None:
        segments = whole_slice(x.shape[0], x.shape[1], sh.context, device=x.device)
    y = _mix(params, x, decay, cfg, segments, (), sh)[0]
    # The sum over the heads of all ranks; each keeps its own tokens of it.
    return Output(psum_scatter(y, sh.sequence, 1))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before a document's first token. ``dtype`` is that of ``x``; S is at least
    float32.
    """
    history = conv.init_state(cfg.conv, batch, dtype=dtype, device=device).history
    shape = (batch, cfg.num_heads, cfg.head_dim, cfg.head_dim)
    return State(history, history, history, torch.zeros(shape, dtype=island(dtype), device=device))


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply` on the next T tokens of one document per row; any cuts of a document give the
    same outputs.
    """
    packing = whole(x.shape[0], x.shape[1], device=x.device)
    y, inputs, s = _mix(params, x, linear(x, params.w_fa), cfg, packing, state, UNSHARDED)
    before = (state.conv_q, state.conv_k, state.conv_v)
    after = [conv.advance(h, u, cfg.conv) for h, u in zip(before, inputs, strict=True)]
    return y, State(after[0], after[1], after[2], s)


def _mix(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    decay: Float[Tensor, "B T R"],
    cfg: Config,
    segments: Segments,
    state: State | tuple[()],
    sh: Sharding,
) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, ...], Float[Tensor, "B H K V"]]:
    """This rank's heads on its slice of the tokens: its part of the sum over heads, the inputs of
    the convolutions, and S after the last token.
    """
    heads = cfg.num_heads // axis_size(sh.heads)
    weights = (params.w_q, params.w_k, params.w_v, params.w_b)
    of_q, of_k, of_v, beta = linears(x, weights)
    projected = (of_q, of_k, of_v)
    if isinstance(state, State):
        before = (state.conv_q, state.conv_k, state.conv_v)
    else:
        # Of all three together, so that they travel in one message.
        before = conv.histories(projected, cfg.conv, segments, sh)
    taps = (params.conv_q.weight, params.conv_k.weight, params.conv_v.weight)
    convolved = short_conv(projected, taps, segments.ids, before)
    q, k, v = (split_heads(y, heads, cfg.head_dim, "kda w_q, w_k, w_v") for y in convolved)
    z = split_heads(linear(decay, params.w_fb), heads, cfg.head_dim, "kda w_fb")
    gates = (params.A_log, rearrange(params.dt_bias, "(h k) -> h k", h=heads))
    numbers = (cfg.gate_lower_bound, cfg.l2_eps, cfg.head_dim**-0.5)
    if axis_size(sh.context) == 1 or isinstance(state, State):
        # () is zeros, for free: the first token of the slice is the row's first.
        s = state.s if isinstance(state, State) else ()
        # Norms and gates in float32, as S is: one op, since each alone is a pass over memory.
        o, s = kda_gated(q, k, v, z, beta, *gates, segments.ids, *numbers, s, cfg.keep)
    else:
        # What stands between is wanted twice, so it is made once.
        made = kda_gates(q, k, z, beta, *gates, *numbers)
        s = _state_before(made.k, v, made.g, made.beta, segments, sh)
        o, s = kda(made.q, made.k, v, made.g, made.beta, segments.ids, s, cfg.keep)
    gate = split_heads(linear(x, params.w_g), heads, cfg.head_dim, "kda w_g")
    # One weight for all heads, whole on every rank: its gradient is summed over them.
    o = gated_norm(o, gate, pvary(params.o_norm, sh.sequence), cfg.norm_eps)
    return linear(rearrange(o, "b t h v -> b t (h v)"), params.w_o), projected, s


def _state_before(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    segments: Segments,
    sh: Sharding,
) -> Float[Tensor, "B H K V"]:
    """S before this rank's slice, which the ranks before it hand on."""
    # Two passes over the slice: a rank learns what its tokens do to any S before it is told S.
    fragment = kda_fragment(k, v, g, beta, segments.ids)
    return relay(fragment.state, fragment.transition, segments.position, sh.context)


def _flops(cfg: Config, length: int) -> Flops:
    """6 K V per head: to take a token out of the state, to add it and to read."""
    del length
    return Flops(6.0 * cfg.num_heads * cfg.head_dim**2)


KIND = TokenMixer(
    name="kda",
    label="KDA",
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
