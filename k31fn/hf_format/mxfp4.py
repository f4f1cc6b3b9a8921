"""MXFP4 as released checkpoints hold it (:mod:`k31fn.kernels.formats.mxfp4`), with what it cannot
hold refused.
"""

from __future__ import annotations

import torch
from jaxtyping import UInt8

from k31fn.kernels.formats import mxfp4
from k31fn.kernels.formats.mxfp4 import GROUP
from k31fn.typing import Float, Tensor

__all__ = ["CONFIG", "GROUP", "decode", "encode"]

# What ``config.json`` says of it, in the words of the package compressed-tensors: weights of routed
# experts only.
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": [r"re:.*block_sparse_moe\.experts\.\d+\.w[123]$"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
        }
    },
}

_NAN = 255  # the scale that E8M0 keeps for it


def decode(
    packed: UInt8[Tensor, "*E R C2"], scale: UInt8[Tensor, "*E R G"], dtype: torch.dtype
) -> Float[Tensor, "*E R C"]:
    """The weights, exactly.

    Raises:
        ValueError: the shapes do not fit, a scale is not a number, or a weight is too large for
            ``dtype``.
    """
    if bool((scale == _NAN).any()):
        raise ValueError(
            f"MXFP4: {int((scale == _NAN).sum())} of {scale.numel()} scales are 255, which is no "
            "number"
        )
    # Scales go up to 2^127, so a weight may be larger than bfloat16 or float16 can say.
    weights = mxfp4.decode(packed, scale, dtype)
    if not bool(torch.isfinite(weights).all()):
        raise ValueError(
            f"MXFP4: weights with scales up to {int(scale.max())} are too large for {dtype}"
        )
    return weights


def encode(
    weight: Float[Tensor, "*E R C"],
) -> tuple[UInt8[Tensor, "*E R C2"], UInt8[Tensor, "*E R G"]]:
    """``(packed, scale)`` of the nearest weights that MXFP4 can hold; what it can hold comes back
    bit for bit.

    Raises:
        ValueError: the columns are no whole groups, or a weight is not finite.
    """
    mxfp4.check_columns(weight.shape[-1])
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"MXFP4: {int((~torch.isfinite(weight)).sum())} weights are not finite")
    return mxfp4.encode(weight)
