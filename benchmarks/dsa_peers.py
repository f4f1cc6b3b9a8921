"""What the core of DSA is compared with: libraries' attention on heads-first tensors, with the
shared dims already in the keys of each head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from k31fn.kernels.sparse_attention.reference import as_mask

__all__ = ["cudnn_dense", "flex_chosen"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def cudnn_dense(scale: float) -> Attention:
    """Causal attention to all keys by cuDNN, and by nothing else."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    return run


def flex_chosen(chosen: Tensor, scale: float) -> Attention:
    """flex_attention with the sets ``[1 T M]`` as its mask, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = chosen.shape[1]
    seen = as_mask(chosen, tokens)[0]

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del b, h
        return seen[query, key]

    blocks = create_block_mask(mask, None, None, tokens, tokens, device=str(chosen.device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=blocks, scale=scale)

    return run
