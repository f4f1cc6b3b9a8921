"""Which dtype is used where: parameters, compute, gradient reduction, and the fp32 islands.

An island is a place that must not run in bfloat16 (softmax, norms, gates, decays, losses). It
computes in ``promote_types(dtype, float32)``: float32 for narrower inputs, float64 in a float64
run. Layers enter one with :func:`upcast` only, never with ``.float()``, which would break a float64
run silently.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch

from k31fn.typing import Float, Tensor

__all__ = ["Precision", "Products", "island", "slices", "storage_dtype", "upcast"]


def __dir__() -> list[str]:
    return __all__


Products = Literal["exact", "fp8_rows", "fp8_blocks"]
"""Products of linear layers: in the dtype of compute, or in FP8 with scales by row or by blocks.
"""

# float16 would need loss scaling, which k31fn has not
_SUPPORTED = (torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        param: of parameters and optimiser updates, except islands (:func:`storage_dtype`).
        compute: of activations and products; a parameter is cast to it when it is used.
        reduce: of gradients while they are summed over ranks and micro-batches.
        products: of linear layers (:func:`k31fn.layers.linear.use_products`); FP8 is for
            ``compute`` in bfloat16.

    Raises:
        ValueError: a dtype that is not supported, ``param`` or ``reduce`` narrower than
            ``compute``, or FP8 products of another ``compute``.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    products: Products = "exact"

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce"):
            value = getattr(self, name)
            if value not in _SUPPORTED:
                raise ValueError(
                    f"precision.{name}={value} must be one of {[str(d) for d in _SUPPORTED]}"
                )
        if self.products not in get_args(Products):
            raise ValueError(
                f"precision.products={self.products!r} must be one of {list(get_args(Products))}"
            )
        if self.products != "exact" and self.compute != torch.bfloat16:
            raise ValueError(
                f"precision.products={self.products!r} with compute={self.compute}: FP8 products "
                "are for activations in bfloat16; set compute to bfloat16 or products to 'exact'"
            )
        for name in ("param", "reduce"):
            value = getattr(self, name)
            # promotion and not item sizes: it is the order in which one dtype holds the other
            if torch.promote_types(value, self.compute) != value:
                raise ValueError(
                    f"precision.{name}={value} is narrower than precision.compute={self.compute}; "
                    f"set {name} to {self.compute} or wider"
                )


def island(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an fp32 island computes in for inputs of ``dtype``: at least float32, float64
    stays.
    """
    return torch.promote_types(dtype, torch.float32)


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``x`` in its island's dtype; no copy if it is there already.

    The gradient comes back in ``x.dtype``.
    """
    return x.to(island(x.dtype))


def slices(shape: Sequence[int], most: int = 2**22) -> Iterator[tuple[slice, ...]]:
    """Slices that cover a tensor in order, of at most ``most`` elements, contiguous if it is.

    What is done to narrow values in a wide dtype is done slice by slice, so that no wide copy of
    the whole is made: a dozen slices of 4 Mi elements in float32, as a step of an optimiser has at
    once, are 192 MiB. They cut along the first dimension that allows it: experts, heads or rows.
    """
    if not shape:
        yield ()
        return
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) > most:
        dim += 1
    whole = [slice(0, n) for n in shape[dim + 1 :]]
    step = max(1, most // max(1, math.prod(shape[dim + 1 :])))
    for outer in itertools.product(*map(range, shape[:dim])):
        one = [slice(i, i + 1) for i in outer]
        for start in range(0, shape[dim], step):
            yield (*one, slice(start, min(start + step, shape[dim])), *whole)


def storage_dtype(declared: torch.dtype, requested: torch.dtype) -> torch.dtype:
    """The dtype of a parameter leaf declared as ``declared`` in a model that is asked to be
    ``requested``.

    A leaf declared float32 or wider is an island: it never gets narrower (``A_log = log 15.3``
    rounded to bfloat16 changes a decay rate by 0.65%) and follows a wider request. Codes (integers,
    8-bit floats) stay what they are. All others take ``requested``.

    Raises:
        ValueError: ``requested`` is not bfloat16, float32 or float64.
    """
    if requested not in _SUPPORTED:
        raise ValueError(f"requested={requested} must be one of {[str(d) for d in _SUPPORTED]}")
    # torch counts float8 as floating, but codes have no other dtype that means the same
    if not declared.is_floating_point or declared.itemsize < 2:
        return declared
    return torch.promote_types(declared, requested) if declared.itemsize >= 4 else requested
