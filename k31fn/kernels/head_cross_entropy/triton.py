# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The head's statistics from chunks of logits: products by torch, and one pass over a chunk each
way.

First order only. The forward reads a chunk once. The backward reads it once more and writes the
gradient over it, from which two products make the gradients of ``hidden`` and of the weight. Each
token has one program at a time, and its sums have one order: bits depend on no device's size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn import _functorch
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.cross_entropy.reference import Statistics
from k31fn.kernels.launch import Build, Tile, grid, programs
from k31fn.precision import island, upcast

__all__ = ["accepts", "builds", "head_cross_entropy"]

_NAME = "head_cross_entropy (triton)"
_LOGITS_BYTES = 5 * 2**29  # 2.5 GiB: 8192 tokens of 163840 columns in bfloat16
_SUMMED = 4096  # columns that one float32 product sums over: one over 163840 is off by 1e-6

# Per kind of device: (statistics, gradient).
_TILES = {
    "cuda": (Tile(warps=8, per_core=8, columns=4096), Tile(warps=8, per_core=8, columns=4096)),
    "npu": (Tile(per_core=1, columns=2048), Tile(per_core=1, columns=2048)),
    "cpu": (Tile(columns=16), Tile(columns=16)),
}


@triton.jit
def head_statistics(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    picked_ptr,
    rows,
    columns,
    COLUMNS: tl.constexpr,
):
    lane = tl.arange(0, COLUMNS)
    wide = tl.program_id(0).to(tl.int64) * 0  # 64 bits: a chunk may pass 2^31 elements
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        logits = logits_ptr + (wide + row) * columns
        label = tl.load(labels_ptr + row)
        top = tl.full((), -1e30, dtype=tl.float32)
        sums = tl.zeros((COLUMNS,), dtype=tl.float32)
        found = tl.zeros((COLUMNS,), dtype=tl.float32)
        for start in range(0, columns, COLUMNS):
            column = start + lane
            here = column < columns
            x = tl.load(logits + column, mask=here, other=-1e30).to(tl.float32)
            largest = tl.maximum(top, tl.max(x, axis=0))
            # Columns of a tile stay apart until the row ends: one sum across threads for all.
            sums = sums * tl.exp(top - largest) + tl.exp(x - largest)
            found += tl.where(here & (column == label), x, 0.0)
            top = largest
        tl.store(lse_ptr + row, top + tl.log(tl.sum(sums, axis=0)))
        tl.store(picked_ptr + row, tl.sum(found, axis=0))


@triton.jit
def head_gradient(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    d_lse_ptr,
    d_picked_ptr,
    rows,
    columns,
    COLUMNS: tl.constexpr,
):
    lane = tl.arange(0, COLUMNS)
    wide = tl.program_id(0).to(tl.int64) * 0  # 64 bits, as above
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        logits = logits_ptr + (wide + row) * columns
        label = tl.load(labels_ptr + row)
        lse = tl.load(lse_ptr + row)
        d_lse = tl.load(d_lse_ptr + row)
        d_picked = tl.load(d_picked_ptr + row)
        for start in range(0, columns, COLUMNS):
            column = start + lane
            here = column < columns
            x = tl.load(logits + column, mask=here, other=-1e30).to(tl.float32)
            d = d_lse * tl.exp(x - lse) + tl.where(column == label, d_picked, 0.0)
            tl.store(logits + column, d.to(logits_ptr.dtype.element_ty), mask=here)


def accepts(hidden: Tensor, w: Tensor, labels: Tensor, logits_bytes: int = 0) -> str:
    """Why :func:`head_cross_entropy` cannot run, or nothing."""
    del logits_bytes
    if w.ndim != 2 or hidden.shape[-1:] != w.shape[:1] or hidden.shape[:-1] != labels.shape:
        shapes = [list(x.shape) for x in (hidden, w, labels)]
        return f"hidden is [*rows D], w [D Z] and labels [*rows], got {shapes}"
    return "" if w.numel() else f"w has no column or no row: {list(w.shape)}"


def head_cross_entropy(
    hidden: Tensor, w: Tensor, labels: Tensor, logits_bytes: int = 0
) -> Statistics:
    """The op."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    # as a product with a weight casts it; int32 is what the kernels compare columns with
    parts = _statistics(
        logits_bytes or _LOGITS_BYTES, rows, w.to(hidden.dtype), labels.flatten().to(torch.int32)
    )
    return Statistics(*(x.view(labels.shape) for x in parts))


class _KeptLogits:
    """The memory of a chunk, with the logits of the last one until a backward writes over them."""

    def __init__(self, chunk: Tensor) -> None:
        self._chunk: Tensor | None = chunk

    def take(self) -> Tensor | None:
        """The logits; None the second time, for a backward of a graph that was retained."""
        chunk, self._chunk = self._chunk, None
        return chunk


def _chunks(tokens: int, columns: int, itemsize: int, logits_bytes: int) -> list[slice]:
    """Equal parts of the tokens, but for the last one, as few as the bound allows; at least one."""
    most = max(1, logits_bytes // (columns * itemsize))
    size = -(-tokens // max(1, -(-tokens // most)))
    return [slice(i, min(i + size, tokens)) for i in range(0, max(1, tokens), max(1, size))]


def _fwd(logits_bytes: int, hidden: Tensor, w: Tensor, labels: Tensor) -> tuple[Statistics, Any]:
    chunks = _chunks(hidden.shape[0], w.shape[1], hidden.itemsize, logits_bytes)
    chunk = hidden.new_empty((chunks[0].stop, w.shape[1]))
    parts: list[tuple[Tensor, ...]] = []
    for rows in chunks:
        logits = torch.mm(hidden[rows], w, out=chunk[: rows.stop - rows.start])
        parts.append(_launch_statistics(logits, labels[rows]))
    lse, picked = (torch.cat(some) for some in zip(*parts, strict=True))
    # Out of autograd's sight, since its check would refuse a second backward, not serve it.
    return Statistics(lse, picked), (hidden, w, labels, lse, _KeptLogits(chunk))


def _bwd(
    logits_bytes: int, needs: Any, residuals: Any, ct: Statistics
) -> tuple[Tensor | None, Tensor | None, None]:
    if _functorch.is_batched(ct.lse) or _functorch.is_batched(ct.picked):
        raise RuntimeError(
            f"{_NAME}: several cotangents at once (jacrev, vmap of a pullback), but there is one "
            "memory of logits to write over; use the reference implementation "
            "(k31fn.kernels.registry.use_impl)"
        )
    hidden, w, labels, lse, kept = residuals
    of_hidden, of_weight, _ = needs
    chunks = _chunks(hidden.shape[0], w.shape[1], hidden.itemsize, logits_bytes)
    taken = kept.take()
    chunk = hidden.new_empty((chunks[0].stop, w.shape[1])) if taken is None else taken
    d_hidden = torch.empty_like(hidden) if of_hidden else None
    d_w: Tensor | None = None
    # From the last, whose logits the forward left.
    for rows in reversed(chunks):
        logits = chunk[: rows.stop - rows.start]
        if taken is None or rows is not chunks[-1]:
            torch.mm(hidden[rows], w, out=logits)
        _launch_gradient(logits, labels[rows], lse[rows], ct.lse[rows], ct.picked[rows])
        if d_hidden is not None:
            _times_columns(logits, w, d_hidden[rows])
        if of_weight and len(chunks) == 1:
            d_w = torch.mm(hidden.mT, logits)
        elif of_weight:
            d_w = _plus_product(d_w, hidden[rows].mT, logits)
    # Given up before the sum is rounded: both would be the peak.
    del taken, chunk, logits
    return d_hidden, d_w if d_w is None else d_w.to(w.dtype), None


def _times_columns(logits: Tensor, w: Tensor, out: Tensor) -> None:
    """Writes ``logits @ w^T``, in float32 by parts of the columns that are added in order."""
    if w.dtype != island(w.dtype):
        torch.mm(logits, w.mT, out=out)
        return
    for start in range(0, w.shape[1], _SUMMED):
        columns = slice(start, start + _SUMMED)
        # beta 0: what is there is not read
        torch.addmm(out, logits[:, columns], w[:, columns].mT, beta=int(start > 0), out=out)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` in float32, written over ``total``."""
    wide = island(a.dtype)
    beta = 1
    if total is None:
        total = a.new_empty((a.shape[0], b.shape[1]), dtype=wide)
        beta = 0  # what is there is not read
    if a.dtype == wide:
        return torch.addmm(total, a, b, beta=beta, out=total)
    if a.device.type == "cuda":
        return torch.addmm(total, a, b, out_dtype=wide, beta=beta, out=total)
    # No other device has a product of narrow numbers that is not rounded to them.
    return torch.addmm(total, upcast(a), upcast(b), beta=beta, out=total)


_statistics = custom_vjp(
    _fwd,
    _bwd,
    nondiff_argnums=(0,),
    opaque=True,
    needs=True,
    name=_NAME,
)


def _launch_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = logits.shape
    lse = logits.new_empty(rows, dtype=torch.float32)
    picked = torch.empty_like(lse)
    tile = _TILES[logits.device.type][0]
    count = programs(logits.device, 1, rows, tile.per_core)
    # Triton launches on the thread's current device, not on that of the operands
    with torch.accelerator.device_index(logits.device.index):
        head_statistics[grid(count, 1)](
            logits,
            labels,
            lse,
            picked,
            rows,
            columns,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return lse, picked


def _launch_gradient(logits: Tensor, *of_tokens: Tensor) -> None:
    rows, columns = logits.shape
    tile = _TILES[logits.device.type][1]
    count = programs(logits.device, 1, rows, tile.per_core)
    with torch.accelerator.device_index(logits.device.index):
        head_gradient[grid(count, 1)](
            logits,
            *(x.contiguous() for x in of_tokens),
            rows,
            columns,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
        )


def builds(kind: str) -> list[Build]:
    """What is compiled for a vocabulary of any size on a kind of device."""
    one, other = _TILES[kind]
    sizes = {"rows": "i32", "columns": "i32"}
    found: list[Build] = []
    for dtype in ("bf16", "fp32"):
        operands = {"logits_ptr": f"*{dtype}", "labels_ptr": "*i32", "lse_ptr": "*fp32"}
        forward = {**operands, "picked_ptr": "*fp32", **sizes}
        backward = {**operands, "d_lse_ptr": "*fp32", "d_picked_ptr": "*fp32", **sizes}
        found += [
            Build(
                f"head_statistics {dtype}",
                head_statistics,
                forward,
                {"COLUMNS": one.columns},
                "forward",
                one,
                ("rows", "columns"),
            ),
            Build(
                f"head_gradient {dtype}",
                head_gradient,
                backward,
                {"COLUMNS": other.columns},
                "backward",
                other,
                ("rows", "columns"),
            ),
        ]
    return found
