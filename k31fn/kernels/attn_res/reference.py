"""Plain torch form of the residual attention: one pass over the sources each way, no copy of them
kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.autodiff import custom_vjp, remat, stop_gradient
from k31fn.precision import island, upcast
from k31fn.typing import Float, Tensor

__all__ = ["Summary", "attn_res", "merge", "summarize"]

_NEVER = -1e30  # the maximum over no score; finite, so that exp(_NEVER - s) is 0 and not NaN


class Summary(NamedTuple):
    """What all queries need to know of the blocks. One query's summary is ``Summary(*(part[q] for
    part in summary))``.

    Attributes:
        max: ``[Q, B, T]`` largest score. It only keeps ``exp`` in range and is a constant for
            differentiation.
        sum: ``[Q, B, T]`` sum of ``exp(score - max)``.
        out: ``[Q, B, T, D]`` the mix of the blocks alone, in float32 (float64 for float64 blocks).
    """

    max: Tensor
    sum: Tensor
    out: Tensor


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
    return _mix(sources, key[None], eps).outs[0].to(sources[0].dtype)


def summarize(
    blocks: tuple[Float[Tensor, "B T D"], ...],
    queries: Float[Tensor, "Q D"],
    norm_weights: Float[Tensor, "Q D"],
    eps: float,
) -> Summary:
    """The first phase: the frozen blocks, read once for all queries.

    Without blocks the parts have sizes 1 for B, T and D and broadcast: merging then gives back the
    running sum.
    """
    wide = island(blocks[0].dtype if blocks else queries.dtype)
    keys = queries.to(wide) * norm_weights.to(wide)
    if not blocks:
        nothing = keys.new_zeros((len(keys), 1, 1))
        return Summary(max=nothing + _NEVER, sum=nothing, out=nothing[..., None])
    mixes = _mix(blocks, keys, eps)
    largest = stop_gradient(mixes.scores.amax(0))
    return Summary(
        max=largest, sum=(mixes.scores - largest).exp().sum(0), out=torch.stack(mixes.outs)
    )


def merge(
    summary: Summary,
    prefix: Float[Tensor, "B T D"],
    query: Float[Tensor, "D"],
    norm_weight: Float[Tensor, "D"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """The second phase: the running sum joins one query's summary by online softmax; in the dtype
    of ``prefix``.

    With the summary ``(m1, l1, o1)`` and the score ``s`` of the running sum ``p``, ``m = max(m1,
    s)``: ``out = (e^(m1-m) l1 o1 + e^(s-m) p) / (e^(m1-m) l1 + e^(s-m))``.
    """
    wide = island(prefix.dtype)
    return remat(_merge_one)(summary, prefix, query.to(wide) * norm_weight.to(wide), eps)


def _merge_one(summary: Summary, prefix: Tensor, key: Tensor, eps: float) -> Tensor:
    value = upcast(prefix)
    score = (value @ key) * torch.rsqrt(value.square().mean(-1) + eps)
    largest = stop_gradient(torch.maximum(summary.max, score))
    before = (summary.max - largest).exp() * summary.sum
    now = (score - largest).exp()
    return torch.lerp(summary.out, value, (now / (before + now))[..., None]).to(prefix.dtype)


class _Mixes(NamedTuple):
    """The mixes of Q keys, and what their backward needs; all of it output, so that every order is
    exact.
    """

    outs: tuple[Tensor, ...]  # Q of [B T D]
    scores: Tensor  # [N Q B T]
    rrms: Tensor  # [N B T], rsqrt(mean(v^2) + eps)


def _mix_fwd(
    sources: tuple[Tensor, ...], keys: Tensor, eps: float
) -> tuple[_Mixes, tuple[object, ...]]:
    norms, products = [], []
    for value in map(upcast, sources):
        norms.append(torch.linalg.vector_norm(value, dim=-1))  # makes no square of [B T D]
        products.append(value @ keys.mT)
    rrms = torch.rsqrt(torch.stack(norms).square() / keys.shape[-1] + eps)
    scores = torch.stack(products).movedim(-1, 1) * rrms[:, None]
    probs = torch.softmax(scores, 0)[..., None]
    outs = [probs[0, q] * upcast(sources[0]) for q in range(len(keys))]
    for i, source in enumerate(sources[1:], 1):
        value = upcast(source)
        outs = [torch.addcmul(out, probs[i, q], value) for q, out in enumerate(outs)]
    return _Mixes(tuple(outs), scores, rrms), (sources, keys, scores, rrms)


def _mix_bwd(
    eps: float, residuals: tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor], ct: _Mixes
) -> tuple[tuple[Tensor, ...], Tensor]:
    """With ``g`` the cotangent of a mix, ``p = softmax(s)``, ``rho = rrms`` and ``dp_i = <g,
    v_i>``:

    ``ds_i = p_i (dp_i - sum_j p_j dp_j)``, ``dv_i = p_i g + ds_i rho_i key - (ds_i s_i rho_i^2 / D)
    v_i`` and ``dkey = sum_i ds_i rho_i v_i``, plus what arrives for the scores and for rho.
    """
    del eps  # it is in rrms
    sources, keys, scores, rrms = residuals
    probs = torch.softmax(scores, 0)
    d_probs = torch.stack(
        [torch.stack([(g * v).sum(-1) for g in ct.outs]) for v in map(upcast, sources)]
    )
    d_scores = probs * (d_probs - (probs * d_probs).sum(0)) + ct.scores
    along_key = d_scores * rrms[:, None]
    along_value = ((d_scores * scores).sum(1) + ct.rrms * rrms) * rrms.square() / -keys.shape[-1]
    of_key, of_value, of_ct = along_key[..., None], along_value[..., None], probs[..., None]
    d_sources, d_keys = [], []
    for i, source in enumerate(sources):
        value = upcast(source)
        d_value = of_value[i] * value
        for q, g in enumerate(ct.outs):
            d_value = torch.addcmul(torch.addcmul(d_value, of_ct[i, q], g), of_key[i, q], keys[q])
        d_sources.append(d_value.to(source.dtype))
        d_keys.append(along_key[i].flatten(1) @ value.flatten(0, -2))
    return tuple(d_sources), torch.stack(d_keys).sum(0)


_mix = custom_vjp(_mix_fwd, nondiff_argnums=(2,), name="attn_res").defvjp(_mix_fwd, _mix_bwd)
