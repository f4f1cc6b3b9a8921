"""Token embedding: ``y_t = weight[token_t]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F

from k31fn import _functorch, tree
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.parallel.axis import active
from k31fn.parallel.collectives import axis_index, psum_scatter
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.precision import upcast
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = ["Config", "Params", "apply", "check_tokens", "init", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """``vocab_size`` rows of ``hidden_size``, drawn from N(0, init_std^2)."""

    vocab_size: int
    hidden_size: int
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"embedding.Config.{name}={getattr(self, name)}: must be at least 1; set "
                    f"{name} >= 1"
                )
        # `not >=` and not `<`: it refuses NaN too.
        if not self.init_std >= 0:
            raise ValueError(
                f"embedding.Config.init_std={self.init_std}: a standard deviation; set init_std "
                ">= 0"
            )


@tree.dataclass
class Params(Generic[Leaf]):
    """``weight [Z, D]``."""

    weight: Leaf


def specs(cfg: Config) -> Params[ParamSpec]:
    """The table. Not tagged ``matrix``: its rows are looked up, not multiplied, so Muon does not
    apply.
    """
    return Params(
        # Its rows are split over "vocab" and not its columns: a rank then looks up some tokens
        # and is silent about the others, and the head can share the split.
        weight=ParamSpec(
            (cfg.vocab_size, cfg.hidden_size), ("vocab", "hidden"), Normal(cfg.init_std)
        )
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor], tokens: Int[Tensor, "B S"], cfg: Config, *, sh: Sharding = UNSHARDED
) -> Float[Tensor, "B T D"]:
    """Rows of the table in its dtype. Reverse-mode to any order; forward mode raises, as for every
    layer.

    On a mesh ``tokens`` are all those of the slice of the context, the result has this rank's: each
    rank looks up the tokens whose rows it holds.

    Raises:
        ValueError: parameters of another class, tokens that are not integers ``[B, T]``; on a CPU,
            a token outside of a table that is not split. Elsewhere that is undefined, since to
            look would be to wait: :func:`check_tokens` checks a batch where it is made.
    """
    del cfg  # the table says it all
    if _functorch.forward_mode_active():
        raise RuntimeError(
            "embedding under forward-mode differentiation: k31fn layers are reverse-mode only; "
            "use k31fn.autodiff.hvp or hessian (reverse over reverse), or torch.func.jacrev"
        )
    if not isinstance(params, Params):
        raise ValueError(
            f"embedding.apply: params is a {type(params).__name__}; give the embedding.Params of "
            "embedding.init(cfg, key)"
        )
    if tokens.is_floating_point() or tokens.ndim != 2:
        raise ValueError(
            f"embedding.apply: tokens are {list(tokens.shape)} in {tokens.dtype}; give integers "
            "[B, T]"
        )
    if not active(sh.vocab):
        return _checked_lookup(params.weight, tokens)
    num_rows = params.weight.shape[0]
    row = tokens - axis_index(sh.vocab) * num_rows
    local = (row >= 0) & (row < num_rows)
    # Other ranks' tokens read row 0, which exists on every rank, and are then made zero; with the
    # value the gradient of row 0 is made zero too.
    y = torch.where(local[..., None], _lookup(params.weight, torch.where(local, row, 0)), 0)
    # One term of each sum is not zero: exact in any dtype.
    return psum_scatter(y, sh.sequence, 1)


def _lookup_fwd(weight: Tensor, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, int, torch.dtype]]:
    # The table itself is not kept: under FSDP the gathered one may be freed.
    return F.embedding(tokens, weight), (tokens, weight.shape[0], weight.dtype)


def _lookup_bwd(residuals: tuple[Tensor, int, torch.dtype], ct: Tensor) -> tuple[Tensor, None]:
    """Sums each token's cotangents in float32, in a fixed order on every device.

    torch's own rule sums in the table's dtype on a CPU, and a bfloat16 sum of ones stops at 256:
    the gradient of every frequent token would be lost.
    """
    tokens, num_rows, dtype = residuals
    # -1: no row is left out as padding; False: a token is not divided by how often it occurs.
    total = torch.ops.aten.embedding_dense_backward(upcast(ct), tokens, num_rows, -1, False)
    return total.to(dtype), None


_lookup = custom_vjp(_lookup_fwd, _lookup_bwd, name="embedding")


def _checked_lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    # The lookup looks at each token anyhow, so values are looked at only to name the bad one.
    try:
        return _lookup(weight, tokens)
    except IndexError:
        if not _functorch.transforms_active():
            check_tokens(tokens, weight.shape[0], "tokens")
        raise ValueError(
            f"tokens hold a value outside of the vocabulary, [0, {weight.shape[0]})"
        ) from None


def check_tokens(
    tokens: Int[Tensor, "B T"], vocab_size: int, name: str, *, ignored: int | None = None
) -> None:
    """Checks on the host, where a batch is made, that every token is in ``[0, vocab_size)``.

    Args:
        tokens: token ids or labels.
        vocab_size: rows of the table.
        name: what the error calls them.
        ignored: one more value that is allowed, such as :data:`k31fn.layers.losses.IGNORED`.

    Raises:
        ValueError: names the first bad value with its row and position.
    """
    bad = (tokens < 0) | (tokens >= vocab_size)
    if ignored is not None:
        bad &= tokens != ignored
    if not bad.any():
        return
    row, position = bad.nonzero()[0].tolist()
    allowed = f"[0, {vocab_size})" + (f" or {ignored}" if ignored is not None else "")
    raise ValueError(
        f"{name}[{row}, {position}]={int(tokens[row, position])}: must be in {allowed}, as is not "
        f"so for {int(bad.sum())} of {tokens.numel()}; does the tokenizer match "
        f"vocab_size={vocab_size}?"
    )
