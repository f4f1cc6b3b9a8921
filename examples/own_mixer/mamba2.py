"""A Mamba-2-like mixer: a state per head that decays by one number per token (arXiv 2405.21060).

    u, z  = SiLU(conv(x W_u)), x W_z                                     per head   [T H K]
    b, c  = SiLU(conv(x W_bc))                                     shared by heads   [T N]
    dt    = softplus(x W_dt + dt_bias)      g = -exp(A_log) dt            log-decay [T H]
    S_t   = e^g_t S_{t-1} + dt_t b_t u_t^T       o_t = S_t^T c_t + skip u_t          [N K]
    y     = RMSNorm(o * SiLU(z)) W_o                              the norm is per head

``conv`` is :mod:`k31fn.layers.short_conv`. The state and the convolutions start anew with each
document; a padding token's ``y`` is 0. The state is summed by chunks of tokens: inside a chunk all
pairs at once, between chunks the state.

Context parallelism is not written here, and the kind says so: a recipe with ``mesh.cp`` is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange

from k31fn import segments as seg
from k31fn import tree
from k31fn.kernels.norm import rms_norm
from k31fn.kernels.short_conv import short_conv
from k31fn.layers import short_conv as conv
from k31fn.layers.kind import Flops, Output, TokenMixer
from k31fn.layers.linear import linear, split_heads
from k31fn.parallel import UNSHARDED, Sharding, all_gather, axis_size, psum_scatter, pvary
from k31fn.params import Constant, Normal, ParamSpec, SoftplusInverse, Uniform
from k31fn.precision import island, upcast
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "State", "apply", "extend", "init_state", "specs"]


@dataclass(frozen=True)
class Config:
    """A Mamba-2-like mixer.

    Attributes:
        hidden_size: width of the input and the output.
        num_heads: heads of the whole model.
        head_dim: dims of a head's input and output.
        state_size: rows of a head's state.
        conv_width: taps of the short convolutions.
        chunk: tokens that are mixed all at once.
        norm_eps: of the output norm.
        init_std: of the projections.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_width: int = 4
    chunk: int = 64
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "state_size", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"mamba2.Config.{name}={getattr(self, name)} must be positive")
        _ = self.conv_u  # checks conv_width

    @property
    def conv_u(self) -> conv.Config:
        """Of the heads' inputs."""
        return conv.Config(self.num_heads * self.head_dim, self.conv_width)

    @property
    def conv_bc(self) -> conv.Config:
        """Of what writes to the state and what reads from it."""
        return conv.Config(2 * self.state_size, self.conv_width)


@tree.dataclass
class Params(Generic[Leaf]):
    """``w_u w_z [D HK]  w_bc [D 2N]  w_dt [D H]  conv_u conv_bc .weight  A_log dt_bias skip [H]
    norm [K]  w_o [HK D]``; columns are ordered by head.
    """

    w_u: Leaf
    w_z: Leaf
    w_bc: Leaf
    w_dt: Leaf
    conv_u: conv.Params[Leaf]
    conv_bc: conv.Params[Leaf]
    A_log: Leaf
    dt_bias: Leaf
    skip: Leaf
    norm: Leaf
    w_o: Leaf


@tree.dataclass
class State:
    """What decoding keeps: the last inputs of both convolutions, and S."""

    conv_u: Float[Tensor, "B history HK"]
    conv_bc: Float[Tensor, "B history 2N"]
    s: Float[Tensor, "B H N K"]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the weights. What is one per head is a float32 island, as in the paper's code."""
    D, H, HK = cfg.hidden_size, cfg.num_heads, cfg.num_heads * cfg.head_dim

    def matrix(rows: int, columns: int, axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec((rows, columns), axes, Normal(cfg.init_std), tags=frozenset({"matrix"}))

    def vector(size: int, axis: str, init: Constant | Uniform | SoftplusInverse) -> ParamSpec:
        return ParamSpec((size,), (axis,), init, torch.float32, frozenset({"no_decay"}))

    return Params(
        w_u=matrix(D, HK, ("hidden", "heads")),
        w_z=matrix(D, HK, ("hidden", "heads")),
        w_bc=matrix(D, 2 * cfg.state_size, ("hidden", "")),
        w_dt=matrix(D, H, ("hidden", "heads")),
        conv_u=conv.specs(cfg.conv_u),
        conv_bc=conv.specs(cfg.conv_bc, axis=""),
        A_log=vector(H, "heads", Uniform(0.0, 2.77)),  # decay rates of 1 to 16, evenly in the log
        dt_bias=vector(H, "heads", SoftplusInverse()),
        skip=vector(H, "heads", Constant(1.0)),
        norm=vector(cfg.head_dim, "head_dim", Constant(1.0)),
        w_o=matrix(HK, D, ("heads", "hidden")),
    )


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Output:
    """Mixes the tokens of each document. ``segments`` None: one document per row.

    On a mesh ``x`` and ``y`` are the rank's own tokens, and its heads work on all tokens of the
    row. Gradients: to ``params`` and ``x``, to any order.
    """
    assert axis_size(sh.context) == 1, "KIND.splits leaves cp out, so a recipe with it is refused"
    # Every rank applies w_bc, the taps of b and c, and the norm to its own heads' work: pvary makes
    # their gradient the sum over the ranks. The other weights are split by head.
    whole = (params.w_bc, params.conv_bc, params.norm)
    w_bc, conv_bc, norm = tree.map(lambda w: pvary(w, sh.sequence), whole)
    # b and c from the rank's own tokens: 1/n of the work, and 2N values to gather beside D.
    bc = all_gather(linear(x, w_bc), sh.sequence, 1)
    x = all_gather(x, sh.sequence, 1)
    if segments is None:
        segments = seg.whole(x.shape[0], x.shape[1], device=x.device)
    inputs = _Inputs(linear(x, params.w_u), bc, segments.ids)
    o, _ = _mix(params, x, inputs, conv_bc.weight, norm, cfg, None)
    return Output(psum_scatter(linear(o, params.w_o), sh.sequence, 1))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before a document's first token. ``dtype`` is that of ``x``; S is at least
    float32.
    """
    shape = (batch, cfg.num_heads, cfg.state_size, cfg.head_dim)
    return State(
        conv.init_state(cfg.conv_u, batch, dtype=dtype, device=device).history,
        conv.init_state(cfg.conv_bc, batch, dtype=dtype, device=device).history,
        torch.zeros(shape, dtype=island(dtype), device=device),
    )


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T D"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T D"], State]:
    """:func:`apply`'s ``y`` on the next T tokens of one document per row."""
    ids = seg.whole(x.shape[0], x.shape[1], device=x.device).ids
    inputs = _Inputs(linear(x, params.w_u), linear(x, params.w_bc), ids)
    o, s = _mix(params, x, inputs, params.conv_bc.weight, params.norm, cfg, state)
    after = State(
        conv.advance(state.conv_u, inputs.u, cfg.conv_u),
        conv.advance(state.conv_bc, inputs.bc, cfg.conv_bc),
        s,
    )
    return linear(o, params.w_o), after


class _Inputs(NamedTuple):
    """Inputs of the convolutions, and the documents' numbers, 0 for padding."""

    u: Float[Tensor, "B T HK"]
    bc: Float[Tensor, "B T 2N"]
    ids: Int[Tensor, "B T"]


def _mix(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    inputs: _Inputs,
    taps_bc: Tensor,
    norm: Tensor,
    cfg: Config,
    state: State | None,
) -> tuple[Float[Tensor, "B T HK"], Float[Tensor, "B H N K"]]:
    """The gated and normalised output of the local heads, and S after the last token."""
    ids = inputs.ids
    before = () if state is None else (state.conv_u, state.conv_bc)
    u, bc = short_conv((inputs.u, inputs.bc), (params.conv_u.weight, taps_bc), ids, before)
    u = upcast(split_heads(u, cfg.num_heads, cfg.head_dim, "mamba2 w_u"))
    b, c = upcast(bc).split(cfg.state_size, dim=-1)
    dt = F.softplus(upcast(linear(x, params.w_dt)) + upcast(params.dt_bias))
    # Padding writes nothing to the state, and does not make it decay.
    dt = torch.where(ids[..., None] > 0, dt, 0)
    g = -upcast(params.A_log).exp() * dt
    s = state.s if state is not None else None
    o, s = _recurrence(dt[..., None] * u, g, b, c, ids, s, cfg.chunk)
    o = o + upcast(params.skip)[:, None] * u
    z = upcast(split_heads(linear(x, params.w_z), cfg.num_heads, cfg.head_dim, "mamba2 w_z"))
    # One rounding, after the gate: a padding token's u and o are 0, and so is its y.
    o = rms_norm((o * F.silu(z)).to(x.dtype), norm, cfg.norm_eps)
    return rearrange(o, "B T H K -> B T (H K)"), s


def _recurrence(
    u: Float[Tensor, "B T H K"],
    g: Float[Tensor, "B T H"],
    b: Float[Tensor, "B T N"],
    c: Float[Tensor, "B T N"],
    ids: Int[Tensor, "B T"],
    s: Float[Tensor, "B H N K"] | None,
    chunk: int,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H N K"]]:
    """``S_t = e^g_t S_{t-1} + b_t u_t^T`` and ``o_t = S_t^T c_t`` inside documents.

    ``s`` is the state before the first token, of that token's document; None: zero.
    """
    if s is None:
        s = u.new_zeros(u.shape[0], u.shape[2], b.shape[-1], u.shape[-1])
    before = ids[:, :1]  # the document that the state is of
    outputs = []
    pieces = zip(*(t.split(chunk, dim=1) for t in (u, g, b, c, ids)), strict=True)
    for u_, g_, b_, c_, ids_ in pieces:
        total = g_.cumsum(1)
        # e^(total_t - total_s): the decay from s to t. Masked before exp, as later tokens' would
        # overflow, and inf * 0 is NaN in a backward.
        same = ids_[:, :, None] == ids_[:, None, :]
        causal = torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        between = (total[:, :, None] - total[:, None, :]).masked_fill(
            ~(same & causal)[..., None], -torch.inf
        )
        scores = torch.einsum("btn,bsn->bts", c_, b_)[..., None] * between.exp()
        inside = torch.einsum("btsh,bshk->bthk", scores, u_)
        # The state reaches the tokens of its own document only.
        continues = (ids_ == before)[..., None]
        reached = torch.where(continues, total.exp(), 0)
        across = torch.einsum("btn,bhnk->bthk", c_, s) * reached[..., None]
        outputs.append(inside + across)
        # Of the chunk, what lives on at its last token: all since the start of that document.
        to_end = (total[:, -1:] - total).masked_fill((ids_ != ids_[:, -1:])[..., None], -torch.inf)
        written = torch.einsum("bsn,bsh,bshk->bhnk", b_, to_end.exp(), u_)
        s = reached[:, -1][..., None, None] * s + written
        before = ids_[:, -1:]
    return torch.cat(outputs, dim=1), s


def _flops(cfg: Config, length: int) -> Flops:
    """4 N K per head: what the recurrence needs to add a token to the state and to read it."""
    del length
    return Flops(mixing=4.0 * cfg.num_heads * cfg.state_size * cfg.head_dim)


KIND = TokenMixer(
    name="mamba2",
    label="Mamba-2",
    config=Config,
    specs=specs,
    apply=apply,
    init_state=init_state,
    extend=extend,
    flops=_flops,
    tensor_parallel=lambda cfg: {"num_heads": cfg.num_heads},
    splits=frozenset({"tp"}),
)
"""The row in the table of kinds; ``recipe.py`` registers it."""
