"""Short convolution: a causal depthwise convolution and SiLU (arXiv 2510.26692), reset at document
boundaries.

``y[t, c] = SiLU(sum_{j < W} weight[c, W-1-j] x[t-j, c])``, over the t - j that are in the document
of t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch

from k31fn import tree
from k31fn.kernels.short_conv import short_conv
from k31fn.parallel.collectives import axis_size
from k31fn.parallel.context import left_halo, whole_slice
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Normal, ParamSpec, Uniform
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Leaf, Tensor

__all__ = [
    "DEFAULT_INIT",
    "Config",
    "Params",
    "State",
    "advance",
    "apply",
    "extend",
    "histories",
    "init",
    "init_state",
    "specs",
]


def __dir__() -> list[str]:
    return __all__


DEFAULT_INIT = Uniform(-0.5, 0.5)
"""The taps' initial values: those of a ``torch.nn.Conv1d`` of width 4."""


@dataclass(frozen=True)
class Config:
    """A filter of ``width`` taps for each of ``channels``.

    Attributes:
        channels: width of the input and the output.
        width: taps, the token's own included.
        init: of the taps.
    """

    channels: int
    width: int = 4
    init: Uniform | Normal = DEFAULT_INIT

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(
                f"short_conv.Config.channels={self.channels} must be positive; set it to 1 or more"
            )
        # A single tap would be a scale, and its history empty.
        if self.width < 2:
            raise ValueError(
                f"short_conv.Config.width={self.width} must be at least 2: one tap sees no other "
                "token; 4 is usual"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """``weight [channels W]``, the token's own tap last; a float32 island."""

    weight: Leaf


@tree.dataclass
class State:
    """The last W-1 inputs, oldest first; zeros before the document."""

    history: Float[Tensor, "B history channels"]


def specs(cfg: Config, *, axis: str = "heads") -> Params[ParamSpec]:
    """The taps. ``axis`` is the logical axis of the channels."""
    tags = frozenset({"no_decay"})
    # float32 in a bfloat16 model too: few numbers, whose small updates bfloat16 would round away.
    return Params(
        ParamSpec((cfg.channels, cfg.width), (axis, "conv"), cfg.init, torch.float32, tags)
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T channels"],
    cfg: Config,
    *,
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B T channels"]:
    """Convolves inside each document; padding gives 0.

    Channels are independent: on a mesh a rank has any of them, on all tokens of its slice over
    ``sh.context``.

    Raises:
        ValueError: a slice has fewer than ``width - 1`` tokens.
    """
    if segments is None:
        segments = whole_slice(x.shape[0], x.shape[1], sh.context, device=x.device)
    before = histories((x,), cfg, segments, sh)
    return short_conv((x,), (params.weight,), segments.ids, before)[0]


def histories(
    inputs: tuple[Float[Tensor, "B T _"], ...], cfg: Config, segments: Segments, sh: Sharding
) -> tuple[Float[Tensor, "B history _"], ...]:
    """The histories of several inputs before this rank's slice over ``sh.context``, in one message;
    ``()``: zeros, for all.

    Raises:
        ValueError: the slice has fewer than ``width - 1`` tokens.
    """
    if axis_size(sh.context) == 1:
        # No slice before this one. `()` and not zeros, which the op would have to read.
        return ()
    num_before = cfg.width - 1
    # A message costs its latency more than its bytes: those of q, k and v travel as one.
    tails = torch.cat([x[:, -num_before:] for x in inputs], dim=-1)
    before = left_halo(tails, num_before, segments.position, sh.context)
    return tuple(before.split([x.shape[-1] for x in inputs], dim=-1))


def init_state(
    cfg: Config, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> State:
    """The state before a document's first token."""
    return State(torch.zeros(batch, cfg.width - 1, cfg.channels, dtype=dtype, device=device))


def extend(
    params: Params[Tensor], x: Float[Tensor, "B T channels"], cfg: Config, state: State
) -> tuple[Float[Tensor, "B T channels"], State]:
    """:func:`apply` on the next T tokens of one document per row; any cuts of a document give the
    same outputs.
    """
    # One document: the op then takes the history as the tokens before the first.
    ids = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
    (y,) = short_conv((x,), (params.weight,), ids, (state.history,))
    return y, State(advance(state.history, x, cfg))


def advance(
    history: Float[Tensor, "B history channels"], x: Float[Tensor, "B T channels"], cfg: Config
) -> Float[Tensor, "B history channels"]:
    """The last W-1 inputs after ``x``, in the dtype of ``history``."""
    num_before = cfg.width - 1
    # Old ones stay where fewer than W-1 are new, as in decoding token by token.
    inputs = torch.cat([history, x[:, -num_before:].to(history.dtype)], dim=1)
    return inputs[:, -num_before:]
