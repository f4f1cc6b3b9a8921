"""Plain torch form: the dense form of attention over sets, with one head of keys for all."""

from __future__ import annotations

from k31fn.kernels.sparse_attention import reference as by_head
from k31fn.typing import Float, Int, Tensor

__all__ = ["latent_attention", "latent_probs"]


def latent_attention(
    q: Float[Tensor, "B T H K"],
    kv: Float[Tensor, "B S K"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
    rank: int,
) -> by_head.SparseAttentionOut:
    """Softmax attention over the latents ``topk_idx[t]`` of each query, and its statistics."""
    k, k_shared = _parts(kv, rank)
    out, lse = by_head.sparse_attention(q, k, k_shared, k, topk_idx, scale)
    return by_head.SparseAttentionOut(out.to(q.dtype), lse)


def latent_probs(
    q: Float[Tensor, "B T H K"],
    kv: Float[Tensor, "B S K"],
    lse: Float[Tensor, "B T H"],
    topk_idx: Int[Tensor, "B T M"],
    scale: float,
) -> Float[Tensor, "B T M"]:
    """Probabilities that :func:`latent_attention` gave the latents ``topk_idx[t]``, summed over the
    heads.
    """
    return by_head.head_probs(q, *_parts(kv, kv.shape[-1]), lse, topk_idx, scale)


def _parts(kv: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The latent as keys and values of one head, and the dims that are keys only."""
    latent, k_shared = kv.split([rank, kv.shape[-1] - rank], dim=-1)
    return latent[:, :, None], k_shared
