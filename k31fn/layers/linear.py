"""Products with weights: the one seam through which every layer multiplies.

``linear`` and ``grouped_linear`` dispatch on the weight leaf (Tensor,
:class:`~k31fn.params.Quantized`, :class:`~k31fn.params.LowRank`), so quantised weights and low-rank
adapters touch no layer. Both are differentiable in reverse mode to any order; forward mode raises.
Under :func:`k31fn.autodiff.split_vjp` weight gradients come later.

Inside :func:`use_products` those of plain matrices in bfloat16 are computed in FP8, forward and
backward.

A frozen weight in FP8 or MXFP4 is decoded for each product and given up after it: what is kept for
the backward are its bytes, whatever remat does.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from einops import rearrange

from k31fn import _functorch
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.autodiff.weight_grads import current_weight_tape, weight_product
from k31fn.kernels.experts import grouped_matmul
from k31fn.kernels.formats import fp8, mxfp4
from k31fn.kernels.scaled_matmul import scaled_matmul
from k31fn.kernels.scaled_matmul.reference import Scaling, refusal
from k31fn.params import LowRank, Quantized
from k31fn.precision import Products
from k31fn.typing import Float, Int, Tensor

__all__ = [
    "dequantize",
    "grouped_linear",
    "linear",
    "linears",
    "per_head",
    "scale_columns",
    "split_heads",
    "transposed_linear",
    "use_products",
]


def __dir__() -> list[str]:
    return __all__


_SCALINGS: dict[str, Scaling] = {"fp8_rows": "rows", "fp8_blocks": "blocks"}
# Ambient, so that a layer need not pass it on to each of its products; whoever replays a layer
# enters it again.
_PRODUCTS: contextvars.ContextVar[Products] = contextvars.ContextVar(
    "k31fn_products", default="exact"
)


@contextlib.contextmanager
def use_products(kind: Products) -> Iterator[None]:
    """Inside, how :func:`linear` multiplies by a plain matrix in bfloat16; a replay of remat does
    as its forward did.

    ``fp8_rows`` and ``fp8_blocks``: by :func:`~k31fn.kernels.scaled_matmul.scaled_matmul`, where
    tokens, rows and columns are multiples of 16, or of 128. Other products, those of weights in
    other leaves and of routed experts, and of an input that is not bfloat16, are exact: computed in
    the dtype of the input.
    """
    token = _PRODUCTS.set(kind)
    try:
        yield
    finally:
        _PRODUCTS.reset(token)


def linear(x: Float[Tensor, "*rows I"], w: Any) -> Float[Tensor, "*rows2 O"]:
    """``x @ w`` for a weight leaf stored ``[..., in, out]``, in the dtype of ``x``.

    Tensor: ``x @ w``. Quantized: ``x @ dequantize(w)``. LowRank: ``x @ base + scale (x @ a) @ b``;
    the dense update is never formed. Leading dims of ``w`` batch against those of ``x``, as in
    ``torch.matmul``.

    Raises:
        ValueError: the last dim of ``x`` is not the weight's input dim.
        RuntimeError: under forward-mode differentiation.
    """
    _refuse_forward_mode()
    if isinstance(w, LowRank):
        # The base first, here and below: the gradient of `x` adds its parts in the reverse order,
        # which is part of the bits.
        base = linear(x, w.base)
        # From left to right: `a @ b` would be as large as the base.
        update = linear(linear(x, w.a), w.b)
        return base + _scaled(update, w)
    if isinstance(w, Quantized):
        # Codes of "scaled" may be trained through their scales; packed bytes are frozen.
        if w.format == "scaled":
            return linear(x, dequantize(w, x.dtype))
        return _frozen_product(False, x, w, ())
    _check_features("linear", x, w)
    # Cast here, beside the product: a remat then keeps the weight and not its narrow copy.
    return weight_product(_product_of(x, w), x, w.to(x.dtype))


def _refuse_forward_mode() -> None:
    # torch.matmul alone would go through: a layer is to refuse forward mode on every device.
    if _functorch.forward_mode_active():
        raise RuntimeError(
            "linear under forward-mode differentiation: k31fn layers are reverse-mode only; use "
            "k31fn.autodiff.hvp or hessian (reverse over reverse), or torch.func.jacrev"
        )


def linears(x: Float[Tensor, "*rows I"], weights: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """:func:`linear` of one input by each of several weights, as of queries, keys and values.

    The gradients of ``x`` by plain matrices are added inside the products: apart, each would be a
    tensor as large as ``x``, and a pass over memory to add it. Other leaves, FP8, and products
    whose weight gradients are put off go one by one.

    Raises:
        ValueError: as in :func:`linear`.
        RuntimeError: as in :func:`linear`.
    """
    _refuse_forward_mode()
    together = current_weight_tape() is None
    for w in weights:
        if not isinstance(w, Tensor) or w.ndim != 2:
            together = False
        else:
            _check_features("linears", x, w)
            together = together and _product_of(x, w) is torch.matmul
    if not together:
        return tuple(linear(x, w) for w in weights)
    return _products(x, tuple(w.to(x.dtype) for w in weights))


def _products_fwd(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
    return tuple(torch.matmul(x, w) for w in weights), (x, weights)


def _products_bwd(needs: Any, residuals: Any, cts: tuple[Tensor, ...]) -> tuple[Any, ...]:
    x, weights = residuals
    of_input, of_weights = needs
    rows = x.flatten(0, -2)
    d_rows: Tensor | None = None
    d_weights: list[Tensor | None] = []
    for w, ct, needed in zip(weights, cts, of_weights, strict=True):
        of_rows = ct.flatten(0, -2)
        d_weights.append(rows.mT @ of_rows if needed else None)
        if of_input:
            d_rows = _plus_product(d_rows, of_rows, w.mT)
    return d_rows if d_rows is None else d_rows.reshape(x.shape), tuple(d_weights)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``; ``total`` may be written over."""
    if total is None:
        return a @ b
    # A graph of this backward needs each sum, and vmap has no rule for a write into one sample.
    if torch.is_grad_enabled() or _functorch.transforms_active():
        return total + a @ b
    # As an output: torch's counter of operations, which check_split asks, does not know addmm_.
    return torch.addmm(total, a, b, out=total)


_products = custom_vjp(_products_fwd, _products_bwd, needs=True, name="products of one input")


def _product_of(x: Tensor, w: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The product that :func:`use_products` asks for, where it takes these sizes."""
    scaling = _SCALINGS.get(_PRODUCTS.get())
    features = x.shape[-1]
    if scaling is None or x.dtype != torch.bfloat16 or w.ndim != 2:
        return torch.matmul
    if refusal(x.numel() // features, features, w.shape[1], scaling):
        return torch.matmul

    def product(x: Tensor, w: Tensor) -> Tensor:
        # The op takes a matrix: all leading dims together are its rows.
        return scaled_matmul(x.reshape(-1, features), w, scaling, True).unflatten(0, x.shape[:-1])

    return product


def transposed_linear(y: Float[Tensor, "*rows O"], w: Any) -> Float[Tensor, "*rows2 I"]:
    """``y @ w^T`` for the same leaves as :func:`linear`; the dense update of a LowRank is never
    formed either.
    """
    if isinstance(w, LowRank):
        # (a b)^T = b^T a^T: the transposed product begins with b.
        base = transposed_linear(y, w.base)
        update = transposed_linear(transposed_linear(y, w.b), w.a)
        return base + _scaled(update, w)
    if isinstance(w, Quantized):
        if w.format != "scaled":
            return _frozen_product(True, y, w, ())
        return transposed_linear(y, dequantize(w, y.dtype))
    return linear(y, w.mT)


def grouped_linear(
    x: Float[Tensor, "R I"], w: Any, sizes: Int[Tensor, "E"]
) -> Float[Tensor, "R O"]:
    """``x @ w[e]`` for rows sorted by expert: the first ``sizes[0]`` rows use expert 0, and so on.

    Args:
        x: rows of all experts, :func:`k31fn.kernels.experts.sort_by_expert`'s order.
        w: weight leaf ``[E, in, out]``, dispatched on as in :func:`linear`.
        sizes: rows per expert, adding up to ``R``.

    Raises:
        ValueError: ``w`` has another number of experts or of input features.
    """
    if isinstance(w, LowRank):
        base = grouped_linear(x, w.base, sizes)
        update = grouped_linear(grouped_linear(x, w.a, sizes), w.b, sizes)
        return base + _scaled(update, w)
    if isinstance(w, Quantized):
        if w.format != "scaled":
            return _frozen_product(False, x, w, sizes)
        return grouped_linear(x, dequantize(w, x.dtype), sizes)
    if w.ndim != 3 or w.shape[0] != sizes.shape[0]:
        raise ValueError(
            f"grouped_linear: a weight [experts, in, out] for {sizes.shape[0]} experts is needed, "
            f"got {list(w.shape)}"
        )
    _check_features("grouped_linear", x, w)
    # The sizes are captured and no argument: they have no gradient to be put off.
    return weight_product(lambda x, w: grouped_matmul(x, w, sizes), x, w.to(x.dtype))


def dequantize(w: Quantized[Tensor], dtype: torch.dtype) -> Float[Tensor, "*experts I O"]:
    """The weight in ``dtype``: ``codes * scales``, each scale repeated over its group of rows, its
    block or its group.

    Raises:
        ValueError: the scales do not divide the codes into equal groups, or differ from them in
            another dim.
    """
    if w.format == "mxfp4":  # packed along the rows of the weight as it is stored here
        return mxfp4.decode(w.codes.mT, w.scales.mT, dtype).mT
    if w.format == "fp8":
        return fp8.decode(w.codes, w.scales, dtype)
    groups, rows = w.scales.shape[-2], w.codes.shape[-2]
    if (
        rows % groups
        or w.scales.shape[:-2] + w.scales.shape[-1:] != w.codes.shape[:-2] + w.codes.shape[-1:]
    ):
        raise ValueError(
            f"Quantized: scales {list(w.scales.shape)} do not fit codes {list(w.codes.shape)}: "
            "needed is one scale per group of rows, [..., in / group, out]"
        )
    return w.codes.to(dtype) * w.scales.to(dtype).repeat_interleave(rows // groups, dim=-2)


def scale_columns(w: Quantized[Tensor]) -> Quantized[Tensor]:
    """The same weight with scales for each of its columns, so that columns can be taken apart."""
    repeats = w.codes.shape[-1] // w.scales.shape[-1]
    if repeats == 1:
        return w
    # The scales of blocks are few: repeated they are still a small part of the codes' bytes.
    return dataclasses.replace(w, scales=w.scales.repeat_interleave(repeats, dim=-1))


def _scaled(update: Tensor, w: LowRank[Any]) -> Tensor:
    # A multiplication by 1 would be one more pass over the tokens.
    return update if w.scale == 1 else update * w.scale


def _frozen_fwd(
    transposed: bool, x: Tensor, w: Quantized[Tensor], sizes: Any
) -> tuple[Tensor, Any]:
    dense = dequantize(w, x.dtype)
    dense = dense.mT if transposed else dense
    _check_features("linear", x, dense)
    y = grouped_matmul(x, dense, sizes) if isinstance(sizes, Tensor) else torch.matmul(x, dense)
    # The bytes are kept and not `dense`, and not `x` either: no gradient of the weight is taken.
    return y, (w, sizes, x.shape)


def _frozen_bwd(transposed: bool, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    w, sizes, shape = residuals
    # Again a product with the frozen weight, so that it is decoded anew and any order has a rule.
    dx = _frozen_product(not transposed, ct, w, sizes)
    # Where leading dims of the weight batched against none of `x`, their cotangents are summed.
    return (dx if dx.shape == shape else dx.sum_to_size(shape)), None, None


_frozen_product = custom_vjp(
    _frozen_fwd, _frozen_bwd, nondiff_argnums=(0,), name="product with a frozen weight"
)


def split_heads(
    x: Float[Tensor, "*rows HK"], num_heads: int, head_dim: int, name: str
) -> Float[Tensor, "*rows H {head_dim}"]:
    """The columns of a projection by head, ``h K + k`` for dim ``k`` of head ``h``; a rank may hold
    an equal share of the ``num_heads``.

    Raises:
        ValueError: the columns are not whole heads, or their number does not divide ``num_heads``:
            the weights are those of another config.
    """
    local_heads = _local_heads(x, num_heads, head_dim, name)
    return rearrange(x, "... (h k) -> ... h k", h=local_heads)


def per_head(w: Any, num_heads: int, dims: Sequence[int], name: str) -> tuple[Any, ...]:
    """A projection's weight by head: for each part of a head's columns a leaf whose heads are a
    leading dim.

    ``w [in, H sum(dims)]`` gives one leaf ``[H, in, dim]`` for each of ``dims``, of the same kind;
    :func:`linear` and :func:`transposed_linear` take it with rows ``[H, rows, ...]``.

    Raises:
        ValueError: as in :func:`split_heads`.
    """
    if isinstance(w, LowRank):
        # `a` has no columns by head: all heads share it.
        bases = per_head(w.base, num_heads, dims, name)
        bs = per_head(w.b, num_heads, dims, name)
        pairs = zip(bases, bs, strict=True)
        return tuple(dataclasses.replace(w, base=base, b=b) for base, b in pairs)
    if isinstance(w, Quantized):
        # A block of codes may lie across two heads, so each column first gets scales of its own.
        w = scale_columns(w)
        codes = per_head(w.codes, num_heads, dims, name)
        scales = per_head(w.scales, num_heads, dims, name)
        pairs = zip(codes, scales, strict=True)
        return tuple(dataclasses.replace(w, codes=c, scales=scale) for c, scale in pairs)
    local_heads = _local_heads(w, num_heads, sum(dims), name)
    return rearrange(w, "... i (h k) -> ... h i k", h=local_heads).split(list(dims), dim=-1)


def _local_heads(x: Tensor, num_heads: int, head_dim: int, name: str) -> int:
    """The heads that the columns of ``x`` hold."""
    local, rest = divmod(x.shape[-1], head_dim)
    if rest or not local or num_heads % local:
        raise ValueError(
            f"{name}: {x.shape[-1]} columns do not divide into num_heads={num_heads} heads of "
            f"{head_dim}; the parameters are of another config: {num_heads} heads have "
            f"{num_heads * head_dim} columns"
        )
    return local


def _check_features(name: str, x: Tensor, w: Any) -> None:
    if not isinstance(w, Tensor):
        raise ValueError(
            f"{name}: the weight is {w!r}; a leaf is a Tensor, Quantized or LowRank, never None"
        )
    if w.ndim < 2 or x.shape[-1] != w.shape[-2]:
        raise ValueError(
            f"{name}: x {list(x.shape)} has {x.shape[-1]} features, the weight [..., in, "
            f"out]={list(w.shape)} does not take them; weights are stored [in, out], the transpose "
            "of torch.nn.Linear's"
        )
