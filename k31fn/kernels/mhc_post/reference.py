"""Plain torch form of the update of hyper-connected streams."""

from __future__ import annotations

import torch

from k31fn.autodiff.remat import remat
from k31fn.precision import upcast
from k31fn.typing import Float, Tensor

__all__ = ["mhc_post"]


def mhc_post(
    x: Float[Tensor, "B T N D"],
    f: Float[Tensor, "B T D"],
    h_post: Float[Tensor, "B T N"],
    h_res: Float[Tensor, "B T N N"],
) -> Float[Tensor, "B T N D"]:
    """``h_post[j] f + sum_i h_res[i, j] x[i]``, in the dtype of ``x``."""
    return remat(_post)(x, f, h_post, h_res)


def _post(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    # first index of h_res: the stream that is read, second: the one that is written
    mixed = torch.einsum("btij,btid->btjd", h_res, upcast(x))
    return torch.addcmul(mixed, h_post[..., None], upcast(f)[:, :, None]).to(x.dtype)
