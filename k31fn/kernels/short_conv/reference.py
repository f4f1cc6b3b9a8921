"""Short convolution in plain torch: W shifted copies of the input, each tap masked after its
product.

In this order autograd keeps the input and the sum before SiLU, and no masked copy per tap.
"""

from __future__ import annotations

import torch

from k31fn.precision import upcast
from k31fn.typing import Float, Int, Tensor

__all__ = ["short_conv"]


def short_conv(
    x: Float[Tensor, "B T channels"],
    weight: Float[Tensor, "channels W"],
    ids: Int[Tensor, "B T"],
    history: Float[Tensor, "B W-1 channels"] | tuple[()] = (),
) -> Float[Tensor, "B T channels"]:
    """``SiLU(conv(x))``; contract in :mod:`k31fn.kernels.short_conv`."""
    channels, width = weight.shape
    length = x.shape[1]
    if isinstance(history, tuple):  # () is none: the rows begin here
        before = x.new_zeros(x.shape[0], width - 1, channels)
    else:
        before = history.to(x.dtype)
    extended = upcast(torch.cat([before, x], dim=1))
    # [W channels]: a strided factor would cost four times the pass
    taps = upcast(weight).mT.contiguous()
    visible = _visible(ids, width, taps.dtype)
    z = visible[..., -1:] * (extended[:, width - 1 :] * taps[-1])
    # one pass over the tokens for each tap: torch's conv1d takes no mask and no history
    for j in range(width - 1):
        z = torch.addcmul(z, visible[..., j, None], extended[:, j : j + length] * taps[j])
    return (z * torch.sigmoid(z)).to(x.dtype)


def _visible(ids: Int[Tensor, "B T"], width: int, dtype: torch.dtype) -> Float[Tensor, "B T W"]:
    """Which tokens the taps may see. [t, j] is 1 where token t - (W-1-j), which tap j meets, is in
    the document of t; else, and for padding, 0.
    """
    # what lies before the row counts as the first document, which history is of; zeros otherwise
    extended = torch.cat([ids[:, :1].expand(-1, width - 1), ids], dim=1)
    return ((extended.unfold(1, width, 1) == ids[..., None]) & (ids > 0)[..., None]).to(dtype)
