"""Products with weights: the one seam through which every layer multiplies.

``linear`` and ``grouped_linear`` dispatch on the weight leaf (Tensor, :class:`~k31fn.params.Quantized`,
:class:`~k31fn.params.LowRank`), so quantised weights and low-rank adapters touch no layer. Both are differentiable in
reverse mode to any order; forward mode raises. Under :func:`k31fn.autodiff.split_vjp` weight gradients come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k31fn import _functorch
from k31fn.autodiff import weight_product
from k31fn.kernels.experts import grouped_matmul
from k31fn.params import LowRank, Quantized
from k31fn.typing import Float, Int, Tensor

__all__ = ["dequantize", "grouped_linear", "linear", "per_head", "split_heads", "transposed_linear"]


def linear(x: Float[Tensor, "*rows I"], w: Any) -> Float[Tensor, "*rows2 O"]:
    """``x @ w`` for a weight leaf stored ``[..., in, out]``, in the dtype of ``x``.

    Tensor: ``x @ w``. Quantized: ``x @ (codes * scales)``. LowRank: ``x @ base + (x @ a) @ b``; the dense update is
    never formed. Leading dims of ``w`` batch against those of ``x``, as in ``torch.matmul``.

    Raises:
        ValueError: the last dim of ``x`` is not the weight's input dim.
        RuntimeError: under forward-mode differentiation.
    """
    if _functorch.forward_mode_active():
        raise RuntimeError(
            "linear under forward-mode differentiation: k31fn layers are reverse-mode only; use torch.func.jacrev or "
            "k31fn.autodiff.hessian (reverse over reverse)"
        )
    if isinstance(w, LowRank):
        return linear(x, w.base) + linear(linear(x, w.a), w.b)
    if isinstance(w, Quantized):
        return linear(x, dequantize(w, x.dtype))
    _check_features("linear", x, w)
    return weight_product(torch.matmul, x, w.to(x.dtype))


def transposed_linear(y: Float[Tensor, "*rows O"], w: Any) -> Float[Tensor, "*rows2 I"]:
    """``y @ w^T`` for the same leaves as :func:`linear`; the dense update of a LowRank is never formed either."""
    if isinstance(w, LowRank):
        return transposed_linear(y, w.base) + transposed_linear(transposed_linear(y, w.b), w.a)
    if isinstance(w, Quantized):
        return transposed_linear(y, dequantize(w, y.dtype))
    return linear(y, w.mT)


def grouped_linear(x: Float[Tensor, "R I"], w: Any, sizes: Int[Tensor, "E"]) -> Float[Tensor, "R O"]:
    """``x @ w[e]`` for rows sorted by expert: the first ``sizes[0]`` rows use expert 0, and so on.

    Args:
        x: rows of all experts, :func:`k31fn.kernels.experts.plan`'s order.
        w: weight leaf ``[E, in, out]``, dispatched on as in :func:`linear`.
        sizes: rows per expert, adding up to ``R``.

    Raises:
        ValueError: ``w`` has another number of experts or of input features.
    """
    if isinstance(w, LowRank):
        return grouped_linear(x, w.base, sizes) + grouped_linear(grouped_linear(x, w.a, sizes), w.b, sizes)
    if isinstance(w, Quantized):
        return grouped_linear(x, dequantize(w, x.dtype), sizes)
    if w.ndim != 3 or w.shape[0] != sizes.shape[0]:
        raise ValueError(
            f"grouped_linear: a weight [experts, in, out] for {sizes.shape[0]} experts is needed, got {list(w.shape)}"
        )
    _check_features("grouped_linear", x, w)
    return weight_product(lambda x, w: grouped_matmul(x, w, sizes), x, w.to(x.dtype))


def dequantize(w: Quantized[Tensor], dtype: torch.dtype) -> Float[Tensor, "*experts I O"]:
    """``codes * scales`` with each scale repeated over its group of rows, in ``dtype``.

    Raises:
        ValueError: the scales do not divide the rows of the codes into equal groups, or differ in another dim.
    """
    groups, rows = w.scales.shape[-2], w.codes.shape[-2]
    if rows % groups or w.scales.shape[:-2] + w.scales.shape[-1:] != w.codes.shape[:-2] + w.codes.shape[-1:]:
        raise ValueError(
            f"Quantized: scales {list(w.scales.shape)} do not fit codes {list(w.codes.shape)}: needed is one scale per "
            "group of rows, [..., in / group, out]"
        )
    return w.codes.to(dtype) * w.scales.to(dtype).repeat_interleave(rows // groups, dim=-2)


def split_heads(
    x: Float[Tensor, "*rows HK"], num_heads: int, head_dim: int, name: str
) -> Float[Tensor, "*rows H {head_dim}"]:
    """The columns of a projection by head; a rank may hold an equal share of the ``num_heads``.

    Raises:
        ValueError: the columns are not whole heads, or their number does not divide ``num_heads``: the weights are
            those of another config.
    """
    return x.unflatten(-1, (_local_heads(x, num_heads, head_dim, name), head_dim))


def per_head(w: Any, num_heads: int, dims: Sequence[int], name: str) -> tuple[Any, ...]:
    """A projection's weight by head: for each part of a head's columns a leaf whose heads are a leading dim.

    ``w [in, H sum(dims)]`` gives one leaf ``[H, in, dim]`` for each of ``dims``, of the same kind; :func:`linear` and
    :func:`transposed_linear` take it with rows ``[H, rows, ...]``.

    Raises:
        ValueError: as in :func:`split_heads`.
    """
    if isinstance(w, LowRank):
        parts = (per_head(leaf, num_heads, dims, name) for leaf in (w.base, w.b))
        return tuple(LowRank(base, w.a, b) for base, b in zip(*parts, strict=True))
    if isinstance(w, Quantized):
        parts = (per_head(leaf, num_heads, dims, name) for leaf in (w.codes, w.scales))
        return tuple(Quantized(codes, scales) for codes, scales in zip(*parts, strict=True))
    by_head = w.unflatten(-1, (_local_heads(w, num_heads, sum(dims), name), sum(dims)))
    return by_head.transpose(-3, -2).split(list(dims), dim=-1)


def _local_heads(x: Tensor, num_heads: int, head_dim: int, name: str) -> int:
    local, rest = divmod(x.shape[-1], head_dim)
    if rest or not local or num_heads % local:
        raise ValueError(
            f"{name}: {x.shape[-1]} columns do not divide into num_heads={num_heads} heads of {head_dim}; the "
            f"parameters are of another config: {num_heads} heads have {num_heads * head_dim} columns"
        )
    return local


def _check_features(name: str, x: Tensor, w: Any) -> None:
    if not isinstance(w, Tensor):
        raise ValueError(f"{name}: the weight is {w!r}; a leaf is a Tensor, Quantized or LowRank, never None")
    if w.ndim < 2 or x.shape[-1] != w.shape[-2]:
        raise ValueError(
            f"{name}: x {list(x.shape)} has {x.shape[-1]} features, the weight [..., in, out]={list(w.shape)} does not "
            "take them; weights are stored [in, out], the transpose of torch.nn.Linear's"
        )
