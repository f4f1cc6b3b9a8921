"""Plain torch form of the residual attention: one pass over the sources each way, no copy of them
kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.precision import island, upcast
from k31fn.typing import Float, Tensor

__all__ = ["attn_res"]


def attn_res(
    sources: tuple[Float[Tensor, "B T D"], ...],
    query: Float[Tensor, "D"],
    norm_weight: Float[Tensor, "D"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """``sum_i softmax_i(s) v_i``, in the dtype of the sources.

    Raises:
        ValueError: no source.
    """
    if not sources:
        raise ValueError("attn_res: sources=() has nothing to mix; pass at least the running sum")
    wide = island(sources[0].dtype)
    key = query.to(wide) * norm_weight.to(wide)
    return _mix(sources, key, eps).out.to(sources[0].dtype)


class _Mix(NamedTuple):
    """The mix, and what its backward needs. All three are outputs of the rule, not hidden state, so
    that a derivative of the backward sees how scores and norms depend on the sources.
    """

    out: Tensor  # [B T D]
    scores: Tensor  # [N B T]
    rrms: Tensor  # [N B T], rsqrt(mean(v^2) + eps)


def _mix_fwd(
    sources: tuple[Tensor, ...], key: Tensor, eps: float
) -> tuple[_Mix, tuple[object, ...]]:
    norms, products = [], []
    for source in sources:
        value = upcast(source)
        # unlike value.square().mean(-1) it writes no square of [B T D]
        norms.append(torch.linalg.vector_norm(value, dim=-1))
        # a matrix of one column: torch sums a product with a vector in another order under vmap
        products.append((value @ key[None].mT)[..., 0])
    rrms = torch.rsqrt(torch.stack(norms).square() / key.shape[-1] + eps)
    scores = torch.stack(products) * rrms
    probs = torch.softmax(scores, 0)[..., None]
    # sources are widened again, one at a time: a list of them would be N wide copies at once
    out = probs[0] * upcast(sources[0])
    for prob, source in zip(probs[1:], sources[1:], strict=True):
        out = torch.addcmul(out, prob, upcast(source))
    return _Mix(out, scores, rrms), (sources, key, scores, rrms)


def _mix_bwd(
    eps: float, residuals: tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor], ct: _Mix
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of the sources and of the key.

    With ``g`` the cotangent of the mix, ``p = softmax(s)``, ``rho = rrms`` and ``dp_i = <g, v_i>``:

    ``ds_i = p_i (dp_i - sum_j p_j dp_j)``, ``dv_i = p_i g + ds_i rho_i key - (ds_i s_i rho_i^2 / D)
    v_i`` and ``dkey = sum_i ds_i rho_i v_i``, plus what arrives for the scores and for rho.
    """
    del eps  # it is in rrms
    sources, key, scores, rrms = residuals
    probs = torch.softmax(scores, 0)
    d_probs = torch.stack([(ct.out * upcast(source)).sum(-1) for source in sources])
    d_scores = probs * (d_probs - (probs * d_probs).sum(0)) + ct.scores
    along_key = d_scores * rrms
    along_value = (d_scores * scores + ct.rrms * rrms) * rrms.square() / -key.shape[-1]
    d_sources, d_keys = [], []
    for i, source in enumerate(sources):
        value = upcast(source)
        d_value = along_value[i, ..., None] * value
        d_value = torch.addcmul(d_value, probs[i, ..., None], ct.out)
        d_value = torch.addcmul(d_value, along_key[i, ..., None], key)
        d_sources.append(d_value.to(source.dtype))
        # again as matrices, for the same bits with and without vmap
        d_keys.append(along_key[i].flatten()[None] @ value.flatten(0, -2))
    return tuple(d_sources), torch.cat(d_keys).sum(0)


_mix = custom_vjp(_mix_fwd, _mix_bwd, nondiff_argnums=(2,), name="attn_res")
