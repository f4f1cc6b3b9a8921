"""Training that is to end in narrow formats: products of routed experts as MXFP4 and MXFP8 will
compute them.

K3 was trained so from supervised fine-tuning on (Kimi K3 report, arXiv 2607.24653): weights of
routed experts in MXFP4, their activations in MXFP8, nothing else. Both operands of a product are
rounded to what the format holds; gradients pass as if they had not been
(:mod:`k31fn.kernels.formats`), to the weights that the optimiser keeps in full.

The weight that counts is the one rounded to bfloat16, as an export writes it: exported to MXFP4,
the model computes what it computed in training.
"""

from __future__ import annotations

from typing import Any

from k31fn.kernels.formats import mxfp4, mxfp8
from k31fn.layers.linear import grouped_linear
from k31fn.typing import Float, Int, Tensor

__all__ = ["quantised_grouped_linear"]


def __dir__() -> list[str]:
    return __all__


def quantised_grouped_linear(
    x: Float[Tensor, "R I"], w: Any, sizes: Int[Tensor, "E"]
) -> Float[Tensor, "R O"]:
    """:func:`k31fn.layers.linear.grouped_linear` of ``x`` in MXFP8 and ``w [E, in, out]`` in MXFP4,
    along ``in``.

    Raises:
        ValueError: ``in`` is no multiple of 32, or ``w`` is no plain weight.
    """
    if not isinstance(w, Tensor):
        raise ValueError(
            f"qat: the weight is a {type(w).__name__}; quantisation-aware training trains plain "
            "weights, adapters have a frozen base: set moe.qat=False, or merge the adapters first"
        )
    # Transposed there and back: the format's groups of 32 lie along the last dim, and those of a
    # weight run along `in`, the dim that is summed over.
    return grouped_linear(mxfp8.fake_quantise(x), mxfp4.fake_quantise(w.mT).mT, sizes)
