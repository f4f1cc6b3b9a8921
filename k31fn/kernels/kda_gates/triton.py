# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Norms and gates of KDA in one pass each way.

A piece of work is a chunk of tokens of one head, so that the head's parameters are read once and
their gradients summed in registers: each chunk in order, then torch adds the chunks, so the bits
depend on no device. First order only.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda.triton.shared import opened, rate_of
from k31fn.kernels.kda_gates.reference import KdaGates
from k31fn.kernels.launch import Build, Tile, grouped, programs

__all__ = ["accepts", "builds", "gates_gradients", "kda_gates"]

CHUNK = 128
"""Tokens that one partial sum of the parameters' gradients covers."""

# Per kind of device: (forward, backward).
_TILES = {
    "cuda": (Tile(warps=4, per_core=8, rows=16), Tile(warps=4, per_core=8, rows=16)),
    "npu": (Tile(per_core=2, rows=8), Tile(per_core=2, rows=8)),
    "cpu": (Tile(rows=16), Tile(rows=16)),
}
_WIDEST = 256  # a row of a head is held in registers


@triton.jit
def kda_gates_forward(
    q_ptr,
    k_ptr,
    z_ptr,
    beta_ptr,
    rate_ptr,
    bias_ptr,
    q_out_ptr,
    k_out_ptr,
    g_ptr,
    beta_out_ptr,
    tokens,
    chunks,
    pieces,
    bound,
    eps,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``rate`` is A_log."""
    c = tl.arange(0, PADDED)
    r = tl.arange(0, ROWS)
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        h = p % H
        chunk = (p // H) % chunks
        group = p // (H * chunks)
        rate = rate_of(tl.load(rate_ptr + group * H + h))[0]
        bias = tl.load(bias_ptr + (group * H + h) * K + c, mask=c < K, other=0.0).to(tl.float32)
        for t in range(chunk * CHUNK, chunk * CHUNK + CHUNK, ROWS):
            first = (group.to(tl.int64) * tokens + t) * H + h
            there = r < tokens - t
            here = there[:, None] & (c < K)[None, :]
            at = first * K + (r[:, None] * (H * K) + c[None, :])
            q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + at, mask=here, other=0.0).to(tl.float32)
            z = tl.load(z_ptr + at, mask=here, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + first + r * H, mask=there, other=0.0).to(tl.float32)
            q *= (scale / tl.sqrt(tl.sum(q * q, 1) + eps))[:, None]
            k *= (1.0 / tl.sqrt(tl.sum(k * k, 1) + eps))[:, None]
            g = bound * opened(rate * (z + bias[None, :]))[0]
            tl.store(q_out_ptr + at, q.to(q_out_ptr.dtype.element_ty), mask=here)
            tl.store(k_out_ptr + at, k.to(k_out_ptr.dtype.element_ty), mask=here)
            tl.store(g_ptr + at, g, mask=here)
            tl.store(beta_out_ptr + first + r * H, opened(beta)[0], mask=there)


@triton.jit
def kda_gates_backward(
    q_ptr,
    k_ptr,
    z_ptr,
    beta_ptr,
    rate_ptr,
    bias_ptr,
    ids_ptr,
    ct_q_ptr,
    ct_k_ptr,
    ct_g_ptr,
    ct_beta_ptr,
    d_q_ptr,
    d_k_ptr,
    d_z_ptr,
    d_beta_ptr,
    d_rate_ptr,
    d_bias_ptr,
    tokens,
    chunks,
    pieces,
    bound,
    eps,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Gradients of the tokens, and of the parameters by chunks of tokens. They may take the places
    of the ``ct``. MASKED: tokens whose ``ids`` is 0 are not read, and get 0.
    """
    c = tl.arange(0, PADDED)
    r = tl.arange(0, ROWS)
    for p in range(tl.program_id(0), pieces, tl.num_programs(0)):
        h = p % H
        chunk = (p // H) % chunks
        group = p // (H * chunks)
        rate, above = rate_of(tl.load(rate_ptr + group * H + h))
        bias = tl.load(bias_ptr + (group * H + h) * K + c, mask=c < K, other=0.0).to(tl.float32)
        # added up over rows at the end: a sum over threads in each step would wait for all
        of_bias = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        of_rate = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        for t in range(chunk * CHUNK, chunk * CHUNK + CHUNK, ROWS):
            first = (group.to(tl.int64) * tokens + t) * H + h
            there = r < tokens - t
            of_token = there
            if MASKED:
                ids = tl.load(ids_ptr + group.to(tl.int64) * tokens + t + r, mask=there, other=0)
                of_token = there & (ids > 0)
            here = of_token[:, None] & (c < K)[None, :]
            at = first * K + (r[:, None] * (H * K) + c[None, :])
            # all loads before the first store, behind which none would move
            q = tl.load(q_ptr + at, mask=here, other=0.0).to(tl.float32)
            ct_q = tl.load(ct_q_ptr + at, mask=here, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + at, mask=here, other=0.0).to(tl.float32)
            ct_k = tl.load(ct_k_ptr + at, mask=here, other=0.0).to(tl.float32)
            z = tl.load(z_ptr + at, mask=here, other=0.0).to(tl.float32) + bias[None, :]
            ct_g = tl.load(ct_g_ptr + at, mask=here, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + first + r * H, mask=of_token, other=0.0).to(tl.float32)
            ct_beta = tl.load(ct_beta_ptr + first + r * H, mask=of_token, other=0.0)
            here = there[:, None] & (c < K)[None, :]
            norm = 1.0 / tl.sqrt(tl.sum(q * q, 1) + eps)
            along = tl.sum(q * ct_q, 1) * norm * norm
            d_q = (scale * norm)[:, None] * (ct_q - along[:, None] * q)
            tl.store(d_q_ptr + at, d_q.to(d_q_ptr.dtype.element_ty), mask=here)
            norm = 1.0 / tl.sqrt(tl.sum(k * k, 1) + eps)
            along = tl.sum(k * ct_k, 1) * norm * norm
            d_k = norm[:, None] * (ct_k - along[:, None] * k)
            tl.store(d_k_ptr + at, d_k.to(d_k_ptr.dtype.element_ty), mask=here)
            gate, shut = opened(rate * z)
            d_z = ct_g * (bound * rate) * (gate * shut)
            tl.store(d_z_ptr + at, d_z.to(d_z_ptr.dtype.element_ty), mask=here)
            of_bias += d_z
            of_rate += d_z * z  # d exp(A_log) z / d A_log is the exponent itself
            gate, shut = opened(beta)
            d_beta = ct_beta.to(tl.float32) * (gate * shut)
            of_beta = d_beta_ptr + first + r * H
            tl.store(of_beta, d_beta.to(d_beta_ptr.dtype.element_ty), mask=there)
        part = (group * chunks + chunk) * H + h
        tl.store(d_bias_ptr + part.to(tl.int64) * K + c, tl.sum(of_bias, 0), mask=c < K)
        tl.store(d_rate_ptr + part, tl.where(above, 0.0, tl.sum(tl.sum(of_rate, 1), 0)))


def accepts(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float,
    eps: float,
    scale: float,
) -> str:
    """Why the kernels cannot run, or nothing."""
    del bound, eps, scale
    if q.ndim != 4 or not q.numel() or q.shape[-1] > _WIDEST:
        return f"q is [B T H K] with K at most {_WIDEST}, got {list(q.shape)}"
    if k.shape != q.shape or z.shape != q.shape or beta.shape != q.shape[:-1]:
        shapes = [list(x.shape) for x in (q, k, z, beta)]
        return f"q, k, z are [B T H K] and beta [B T H], got {shapes}"
    if A_log.shape != q.shape[2:3] or dt_bias.shape != q.shape[2:]:
        return f"A_log is [H] and dt_bias [H K], got {list(A_log.shape)} and {list(dt_bias.shape)}"
    if torch.float64 in [x.dtype for x in (q, k, z, beta, A_log, dt_bias)]:
        return "all are at most float32, got a float64"
    return ""


def kda_gates(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    bound: float,
    eps: float,
    scale: float,
) -> KdaGates:
    """The op; contract in :mod:`k31fn.kernels.kda_gates`."""
    per_token = (x.flatten(0, 1)[None] for x in (q, k, z, beta))
    outs = _gates(*per_token, A_log[None], dt_bias[None], bound, eps, scale)
    return KdaGates(*(x.squeeze(0).unflatten(0, q.shape[:2]) for x in outs))


def _fwd(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *numbers: float,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    operands = (q, k, z, beta, A_log, dt_bias)
    return grouped(functools.partial(_launch_forward, numbers), *operands), operands


def _bwd(
    bound: float,
    eps: float,
    scale: float,
    residuals: tuple[Tensor, ...],
    cts: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    return grouped(functools.partial(_launch_backward, (bound, eps, scale)), *residuals, *cts)


_gates = custom_vjp(_fwd, _bwd, nondiff_argnums=(6, 7, 8), opaque=True, name="kda_gates (triton)")


def _whole(operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Operands of each group; what samples share under vmap is copied for each."""
    groups = max(x.shape[0] for x in operands)
    return [x.expand(groups, *x.shape[1:]).contiguous() for x in operands]


def _launch_forward(numbers: tuple[float, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    q, k, z, beta, rate, bias = _whole(operands)
    q_out = torch.empty_like(q)
    k_out = torch.empty_like(k)
    g = torch.empty_like(z, dtype=torch.float32)
    beta_out = torch.empty_like(beta, dtype=torch.float32)
    tile = _TILES[q.device.type][0]
    chunks, grid, constants = _cut(tile, q)
    pieces = q.shape[0] * chunks * q.shape[2]
    kda_gates_forward[grid](
        q,
        k,
        z,
        beta,
        rate,
        bias,
        q_out,
        k_out,
        g,
        beta_out,
        q.shape[1],
        chunks,
        pieces,
        *numbers,
        **constants,
        num_warps=tile.warps,
    )
    return q_out, k_out, g, beta_out


def _launch_backward(numbers: tuple[float, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    q, k, z, beta, rate, bias, *cts = _whole(operands)
    outs = tuple(torch.empty_like(x) for x in (q, k, z, beta))
    inputs = (q, k, z, beta, rate, bias)
    return *outs, *gates_gradients(inputs, tuple(cts), outs, numbers)


def gates_gradients(
    inputs: tuple[Tensor, ...],
    cts: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of A_log and dt_bias; those of q, k, z and beta are written to ``outs``, which may
    be the ``cts``.

    ``inputs`` are the op's, each token's as ``[groups tokens H ...]``. ``ids [groups tokens]``:
    tokens of number 0 are not read, and get 0. ``numbers``: bound, eps and scale.
    """
    q, k, z, beta, rate, bias = _whole(inputs)
    tile = _TILES[q.device.type][1]
    chunks, grid, constants = _cut(tile, q)
    groups, tokens, heads, width = q.shape
    d_rate = rate.new_empty((groups, chunks, heads), dtype=torch.float32)
    d_bias = bias.new_empty((groups, chunks, heads, width), dtype=torch.float32)
    kda_gates_backward[grid](
        q,
        k,
        z,
        beta,
        rate,
        bias,
        rate if ids is None else ids,
        *cts,
        *outs,
        d_rate,
        d_bias,
        tokens,
        chunks,
        groups * chunks * heads,
        *numbers,
        **constants,
        MASKED=ids is not None,
        num_warps=tile.warps,
    )
    # Chunks in order, so that the bits depend on the lengths alone.
    return d_rate.sum(1).to(rate.dtype), d_bias.sum(1).to(bias.dtype)


def _cut(tile: Tile, q: Tensor) -> tuple[int, tuple[int], dict[str, int]]:
    """Chunks of a group, the grid, and the constants."""
    groups, tokens, heads, width = q.shape
    chunks = triton.cdiv(tokens, CHUNK)
    count = programs(q.device, 1, groups * chunks * heads, tile.per_core)
    return chunks, (count,), _constants(tile, heads, width)


def _constants(tile: Tile, heads: int, width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"H": heads, "K": width, "PADDED": padded, "ROWS": tile.rows, "CHUNK": CHUNK}


_WIDE = ("rate_ptr", "bias_ptr", "g_ptr", "beta_out_ptr", "ct_g_ptr", "ct_beta_ptr")


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads of 128 on a kind of device."""
    listed: list[Build] = []
    for low in ("bf16", "fp32"):
        for kernel, tile, masked in (
            (kda_gates_forward, _TILES[kind][0], False),
            (kda_gates_backward, _TILES[kind][1], False),
            (kda_gates_backward, _TILES[kind][1], True),
        ):
            if masked and kind != "cuda":  # in place, by kda_gated, which nobody runs elsewhere
                continue
            constants = _constants(tile, 96, 128)
            backward = kernel is kda_gates_backward
            if backward:
                constants["MASKED"] = masked
            names = [name for name in kernel.arg_names if name not in constants]
            types = {name: _type(name, low, masked) for name in names}
            title = f"{kernel.__name__} {low}" + (" masked" if masked else "")
            direction = "backward" if backward else "forward"
            listed.append(Build(title, kernel, types, constants, direction, tile))
    return listed


def _type(name: str, low: str, masked: bool) -> str:
    """Triton's type of an argument, as the layer calls the op."""
    if not name.endswith("_ptr"):
        return "fp32" if name in ("bound", "eps", "scale") else "i32"
    if name == "ids_ptr":
        return "*i64"
    if masked and name in ("ct_g_ptr", "ct_beta_ptr"):
        return f"*{low}"
    return "*fp32" if name in (*_WIDE, "d_rate_ptr", "d_bias_ptr") else f"*{low}"
