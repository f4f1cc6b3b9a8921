"""Short convolutions in plain torch: W shifted copies of each input, each tap masked after its
product.

In this order autograd keeps the input and the sum before SiLU, and no masked copy per tap.
"""

from __future__ import annotations

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["short_conv"]


def short_conv(
    inputs: tuple[Float[Tensor, "B T _"], ...],
    weights: tuple[Float[Tensor, "_ W"], ...],
    ids: Int[Tensor, "B T"],
    histories: tuple[Float[Tensor, "B W-1 _"], ...] = (),
) -> tuple[Float[Tensor, "B T _"], ...]:
    """``SiLU(conv(x))`` of each input; contract in :mod:`k31fn.kernels.short_conv`."""
    width = weights[0].shape[1]
    # one mask for all inputs, which are of the same tokens
    visible = _visible(ids, width, upcast(weights[0]).dtype)
    # () is none: the rows begin here
    before = histories or tuple(x.new_zeros(x.shape[0], width - 1, x.shape[2]) for x in inputs)
    triples = zip(inputs, weights, before, strict=True)
    return tuple(_convolved(x, weight, history, visible) for x, weight, history in triples)


def _convolved(
    x: Float[Tensor, "B T channels"],
    weight: Float[Tensor, "channels W"],
    history: Float[Tensor, "B W-1 channels"],
    visible: Float[Tensor, "B T W"],
) -> Float[Tensor, "B T channels"]:
    """One of the convolutions."""
    width, length = weight.shape[1], x.shape[1]
    extended = upcast(torch.cat([history.to(x.dtype), x], dim=1))
    # [W channels]: a strided factor would cost four times the pass
    taps = upcast(weight).mT.contiguous()
    z = visible[..., -1:] * (extended[:, width - 1 :] * taps[-1])
    # one pass over the tokens for each tap: torch's conv1d takes no mask and no history
    for j in range(width - 1):
        z = torch.addcmul(z, visible[..., j, None], extended[:, j : j + length] * taps[j])
    return (z * torch.sigmoid(z)).to(x.dtype)


def _visible(ids: Int[Tensor, "B T"], width: int, dtype: torch.dtype) -> Float[Tensor, "B T W"]:
    """Which tokens the taps may see. [t, j] is 1 where token t - (W-1-j), which tap j meets, is in
    the document of t; else, and for padding, 0.
    """
    if not ids.shape[1]:  # no first token, whose document the history is of
        return ids.new_zeros((*ids.shape, width), dtype=dtype)
    # what lies before the row counts as the first document, which history is of; zeros otherwise
    extended = torch.cat([ids[:, :1].expand(-1, width - 1), ids], dim=1)
    return ((extended.unfold(1, width, 1) == ids[..., None]) & (ids > 0)[..., None]).to(dtype)
