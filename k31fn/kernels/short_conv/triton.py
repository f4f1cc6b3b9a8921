# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The short convolution and SiLU in one launch each way; the backward keeps the inputs only.

First order only. A program walks down ``CHUNK`` tokens of a row with some channels and holds the
last three inputs in registers, so that each is read once. The backward holds the last three
gradients of the sums too: an input's own gradient is complete three tokens later.

The gradient of the taps is a sum over tokens. Each program sums its chunk in order, and torch adds
the chunks: the bits depend on the shape alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step
from k31fn.kernels.mhc_pre.triton.arithmetic import sigmoid

__all__ = ["accepts", "builds", "short_conv"]

CHUNK = 128
"""Tokens of a row that a program walks down, and that one partial sum of the taps covers.

A multiple of 4, the tokens of a round.
"""

_LAGS = 3  # inputs before a token that the kernels hold; a narrower filter has taps of zero

# Per kind of device: (forward, backward).
_TILES = {
    "cuda": (
        Tile(warps=2, per_core=32, columns=256),
        Tile(warps=2, per_core=16, columns=256),
    ),
    "npu": (Tile(per_core=1, columns=1024), Tile(per_core=1, columns=64)),
    "cpu": (Tile(columns=16), Tile(columns=16)),
}


@triton.jit
def _tap(weight_ptr, channel, inside, LAG: tl.constexpr, W: tl.constexpr):
    """The tap that meets the input ``LAG`` tokens before; 0 where the filter is narrower."""
    if LAG < W:
        at = channel * W + (W - 1 - LAG)
        tap = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        tap = tl.zeros(channel.shape, dtype=tl.float32)
    return tap


# fmt: off
@triton.jit
def _input(
    x_ptr, history_ptr, ids_ptr, token, channel, length, channels, W: tl.constexpr, HISTORY:
    tl.constexpr,
):
# fmt: on
    """The input at a token and its document; 0 and -1 outside of the row and its history.

    A token before the row belongs to the document of the row's first token, as the contract says.
    Padding is not read: it may hold NaN.
    """
    here = (token >= 0) & (token < length)
    document = tl.load(ids_ptr + tl.minimum(tl.maximum(token, 0), length - 1)).to(tl.int32)
    if HISTORY:
        earlier = (token < 0) & (token > -W)
        at = history_ptr + (token + W - 1) * channels
        read = channel < tl.where(earlier, channels, 0)
        before = tl.load(at + channel, mask=read, other=0.0).to(tl.float32)
        document = tl.where(here | earlier, document, -1)
    else:
        document = tl.where(here, document, -1)
    # A bound of 0 channels masks all: the interpreter spoils a scalar mask that meets a tile's.
    read = channel < tl.where(here & (document > 0), channels, 0)
    x = tl.load(x_ptr + token * channels + channel, mask=read, other=0.0).to(tl.float32)
    if HISTORY:
        x += before
    return x, document


@triton.jit
def _sum(w0, w1, w2, w3, x, d, x1, d1, x2, d2, x3, d3):
    """The taps times the inputs of a token's own document, before SiLU."""
    # Selects and no products with 0: another document's input may not be finite.
    z = w0 * x + w1 * tl.where(d1 == d, x1, 0.0)
    return z + (w2 * tl.where(d2 == d, x2, 0.0) + w3 * tl.where(d3 == d, x3, 0.0))


@triton.jit
def _write_silu(out, z, document, token, end, channel, channels):
    y = tl.where(document > 0, z * sigmoid(z), 0.0)
    to = out + token * channels + channel
    mask = channel < tl.where(token < end, channels, 0)
    tl.store(to, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_grad(ct_row, z, document, token, length, channel, channels):
    """The gradient of a token's sum: its cotangent times the slope of SiLU; 0 where it has none."""
    valid = (token >= 0) & (token < length) & (document > 0)
    read = channel < tl.where(valid, channels, 0)
    ct = tl.load(ct_row + token * channels + channel, mask=read, other=0.0).to(tl.float32)
    opened = sigmoid(z)
    return ct * (opened * (1.0 + z * (1.0 - opened)))


# fmt: off
@triton.jit
def _write_input_grad(
    d_x_row, d_history_row, w0, w1, w2, w3, document, g, g1, d1, g2, d2, g3, d3, token, first, end,
    channel, channels, W: tl.constexpr, HISTORY: tl.constexpr,
):
# fmt: on
    """Writes the gradient of a token's input: of its own sum, and of three later ones."""
    d_x = w0 * g + w1 * tl.where(d1 == document, g1, 0.0)
    d_x += w2 * tl.where(d2 == document, g2, 0.0) + w3 * tl.where(d3 == document, g3, 0.0)
    complete = (token >= first) & (token < end)
    tl.store(
        d_x_row + token * channels + channel,
        d_x.to(d_x_row.dtype.element_ty),
        mask=channel < tl.where(complete & (token >= 0), channels, 0),
    )
    if HISTORY:
        tl.store(
            d_history_row + (token + W - 1) * channels + channel,
            d_x.to(d_history_row.dtype.element_ty),
            mask=channel < tl.where(complete & (token < 0), channels, 0),
        )


# fmt: off
@triton.jit
def short_conv_forward(
    x_ptr, history_ptr, ids_ptr, weight_ptr, y_ptr, batch, length, channels, per_group, x_group,
    history_group, ids_group, weight_group, W: tl.constexpr, CHUNK: tl.constexpr, BLOCK:
    tl.constexpr, HISTORY: tl.constexpr,
):
# fmt: on
    group = (tl.program_id(0) // per_group).to(tl.int64)
    across = tl.cdiv(channels, BLOCK)
    chunks = tl.cdiv(length, CHUNK)
    for p in range(tl.program_id(0) % per_group, batch * chunks * across, per_group):
        # Neighbouring programs take neighbouring channels of the same tokens.
        row = group * 0 + p // (chunks * across)  # 64 bits
        first = group * 0 + (p // across) % chunks * CHUNK
        channel = p % across * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        x_row = x_ptr + (group * x_group + row * length * channels)
        history = history_ptr + (group * history_group + row * (W - 1) * channels)
        ids = ids_ptr + (group * ids_group + row * length)
        out = y_ptr + (group * batch + row) * length * channels
        taps = weight_ptr + group * weight_group
        w0 = _tap(taps, channel, inside, 0, W)
        w1 = _tap(taps, channel, inside, 1, W)
        w2 = _tap(taps, channel, inside, 2, W)
        w3 = _tap(taps, channel, inside, 3, W)
        x3, d3 = _input(x_row, history, ids, first - 3, channel, length, channels, W, HISTORY)
        x2, d2 = _input(x_row, history, ids, first - 2, channel, length, channels, W, HISTORY)
        x1, d1 = _input(x_row, history, ids, first - 1, channel, length, channels, W, HISTORY)
        end = tl.minimum(first + CHUNK, length)
        # Four tokens a round: their reads are on the way together, before the first write.
        for t in range(first, end, 4):
            token = group * 0 + t  # a tensor in the interpreter too
            xa, da = _input(x_row, history, ids, token, channel, length, channels, W, HISTORY)
            xb, db = _input(x_row, history, ids, token + 1, channel, length, channels, W, HISTORY)
            xc, dc = _input(x_row, history, ids, token + 2, channel, length, channels, W, HISTORY)
            xd, dd = _input(x_row, history, ids, token + 3, channel, length, channels, W, HISTORY)
            za = _sum(w0, w1, w2, w3, xa, da, x1, d1, x2, d2, x3, d3)
            zb = _sum(w0, w1, w2, w3, xb, db, xa, da, x1, d1, x2, d2)
            zc = _sum(w0, w1, w2, w3, xc, dc, xb, db, xa, da, x1, d1)
            zd = _sum(w0, w1, w2, w3, xd, dd, xc, dc, xb, db, xa, da)
            _write_silu(out, za, da, token, end, channel, channels)
            _write_silu(out, zb, db, token + 1, end, channel, channels)
            _write_silu(out, zc, dc, token + 2, end, channel, channels)
            _write_silu(out, zd, dd, token + 3, end, channel, channels)
            x1, d1 = xd, dd
            x2, d2 = xc, dc
            x3, d3 = xb, db


# fmt: off
@triton.jit
def short_conv_backward(
    x_ptr, history_ptr, ids_ptr, weight_ptr, ct_ptr, d_x_ptr, d_history_ptr, part_ptr, batch,
    length, channels, per_group, x_group, history_group, ids_group, weight_group, ct_group, W:
    tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr,
):
# fmt: on
    group = (tl.program_id(0) // per_group).to(tl.int64)
    across = tl.cdiv(channels, BLOCK)
    # With a history the first chunk begins with the tokens before the row.
    lead = (W - 1) if HISTORY else 0
    chunks = tl.cdiv(length + lead, CHUNK)
    for p in range(tl.program_id(0) % per_group, batch * chunks * across, per_group):
        row = group * 0 + p // (chunks * across)  # 64 bits
        chunk = group * 0 + (p // across) % chunks
        first = chunk * CHUNK - lead
        end = tl.minimum(first + CHUNK, length)
        channel = p % across * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        x_row = x_ptr + (group * x_group + row * length * channels)
        history = history_ptr + (group * history_group + row * (W - 1) * channels)
        ids = ids_ptr + (group * ids_group + row * length)
        ct_row = ct_ptr + (group * ct_group + row * length * channels)
        d_x_row = d_x_ptr + (group * batch + row) * length * channels
        d_history_row = d_history_ptr + (group * batch + row) * (W - 1) * channels
        taps = weight_ptr + group * weight_group
        w0 = _tap(taps, channel, inside, 0, W)
        w1 = _tap(taps, channel, inside, 1, W)
        w2 = _tap(taps, channel, inside, 2, W)
        w3 = _tap(taps, channel, inside, 3, W)
        x3, d3 = _input(x_row, history, ids, first - 3, channel, length, channels, W, HISTORY)
        x2, d2 = _input(x_row, history, ids, first - 2, channel, length, channels, W, HISTORY)
        x1, d1 = _input(x_row, history, ids, first - 1, channel, length, channels, W, HISTORY)
        g1 = tl.zeros((BLOCK,), dtype=tl.float32)
        g2 = tl.zeros((BLOCK,), dtype=tl.float32)
        g3 = tl.zeros((BLOCK,), dtype=tl.float32)
        v0 = tl.zeros((BLOCK,), dtype=tl.float32)
        v1 = tl.zeros((BLOCK,), dtype=tl.float32)
        v2 = tl.zeros((BLOCK,), dtype=tl.float32)
        v3 = tl.zeros((BLOCK,), dtype=tl.float32)
        # Three tokens past the chunk: they read its last inputs. Four tokens a round, as forward.
        for t in range(first, end + 3, 4):
            token = group * 0 + t  # a tensor in the interpreter too
            xa, da = _input(x_row, history, ids, token, channel, length, channels, W, HISTORY)
            xb, db = _input(x_row, history, ids, token + 1, channel, length, channels, W, HISTORY)
            xc, dc = _input(x_row, history, ids, token + 2, channel, length, channels, W, HISTORY)
            xd, dd = _input(x_row, history, ids, token + 3, channel, length, channels, W, HISTORY)
            za = _sum(w0, w1, w2, w3, xa, da, x1, d1, x2, d2, x3, d3)
            zb = _sum(w0, w1, w2, w3, xb, db, xa, da, x1, d1, x2, d2)
            zc = _sum(w0, w1, w2, w3, xc, dc, xb, db, xa, da, x1, d1)
            zd = _sum(w0, w1, w2, w3, xd, dd, xc, dc, xb, db, xa, da)
            ga = _sum_grad(ct_row, za, da, token, length, channel, channels)
            gb = _sum_grad(ct_row, zb, db, token + 1, length, channel, channels)
            gc = _sum_grad(ct_row, zc, dc, token + 2, length, channel, channels)
            gd = _sum_grad(ct_row, zd, dd, token + 3, length, channel, channels)
            # A token past the chunk is in the sum of the next one.
            ca = tl.where(token < end, ga, 0.0)
            cb = tl.where(token + 1 < end, gb, 0.0)
            cc = tl.where(token + 2 < end, gc, 0.0)
            cd = tl.where(token + 3 < end, gd, 0.0)
            v0 += (ca * xa + cb * xb) + (cc * xc + cd * xd)
            v1 += ca * tl.where(d1 == da, x1, 0.0) + cb * tl.where(da == db, xa, 0.0)
            v1 += cc * tl.where(db == dc, xb, 0.0) + cd * tl.where(dc == dd, xc, 0.0)
            v2 += ca * tl.where(d2 == da, x2, 0.0) + cb * tl.where(d1 == db, x1, 0.0)
            v2 += cc * tl.where(da == dc, xa, 0.0) + cd * tl.where(db == dd, xb, 0.0)
            v3 += ca * tl.where(d3 == da, x3, 0.0) + cb * tl.where(d2 == db, x2, 0.0)
            v3 += cc * tl.where(d1 == dc, x1, 0.0) + cd * tl.where(da == dd, xa, 0.0)
            # Gradients of the inputs from three tokens before this round to its first.
            # fmt: off
            _write_input_grad(
                d_x_row, d_history_row, w0, w1, w2, w3, d3, g3, g2, d2, g1, d1, ga, da, token - 3,
                first, end, channel, channels, W, HISTORY,
            )
            _write_input_grad(
                d_x_row, d_history_row, w0, w1, w2, w3, d2, g2, g1, d1, ga, da, gb, db, token - 2,
                first, end, channel, channels, W, HISTORY,
            )
            _write_input_grad(
                d_x_row, d_history_row, w0, w1, w2, w3, d1, g1, ga, da, gb, db, gc, dc, token - 1,
                first, end, channel, channels, W, HISTORY,
            )
            _write_input_grad(
                d_x_row, d_history_row, w0, w1, w2, w3, da, ga, gb, db, gc, dc, gd, dd, token,
                first, end, channel, channels, W, HISTORY,
            )
            # fmt: on
            x1, d1, g1 = xd, dd, gd
            x2, d2, g2 = xc, dc, gc
            x3, d3, g3 = xb, db, gb
        part = part_ptr + ((group * batch + row) * chunks + chunk) * channels * W
        at = part + channel * W + (W - 1)
        tl.store(at, v0, mask=inside)
        tl.store(at - 1, v1, mask=inside)
        if W > 2:
            tl.store(at - 2, v2, mask=inside)
        if W > 3:
            tl.store(at - 3, v3, mask=inside)


def accepts(x: Tensor, weight: Tensor, ids: Tensor, history: Tensor | tuple[()] = ()) -> str:
    """Why :func:`short_conv` cannot run, or nothing."""
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        return f"x is [B T channels], weight [channels W], got {[*x.shape]} and {[*weight.shape]}"
    if ids.shape != x.shape[:2]:
        return f"ids must be {[*x.shape[:2]]} for x {[*x.shape]}, got {[*ids.shape]}"
    if not 2 <= weight.shape[1] <= _LAGS + 1:
        return f"a filter has 2 to {_LAGS + 1} taps, got {weight.shape[1]}"
    wanted = (x.shape[0], weight.shape[1] - 1, x.shape[2])
    if isinstance(history, Tensor) and history.shape != wanted:
        return f"history must be {[*wanted]}, got {[*history.shape]}"
    if not x.shape[1]:
        return "a row has at least one token"
    return ""


def short_conv(x: Tensor, weight: Tensor, ids: Tensor, history: Tensor | tuple[()] = ()) -> Tensor:
    """The op."""
    if isinstance(history, tuple):
        return _without(x[None], weight[None], ids[None])[0]
    return _with(x[None], weight[None], ids[None], history[None])[0]


def _fwd(*args: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    (y,) = grouped(_launch_forward, *args)
    return y, args


def _bwd(residuals: tuple[Tensor, ...], ct: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_weight, *d_history = grouped(_launch_backward, ct, *residuals)
    return d_x, d_weight, None, *d_history


_without = custom_vjp(_fwd, _bwd, opaque=True, name="short_conv (triton)")
_with = custom_vjp(_fwd, _bwd, opaque=True, name="short_conv with a history (triton)")


def _operands(*given: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, ids = (a.contiguous() for a in given[:3])
    # Without a history no pointer to one is read.
    history = given[3].contiguous() if len(given) > 3 else x
    return x, history, ids, weight


def _launch_forward(*given: Tensor) -> tuple[Tensor, ...]:
    operands = _operands(*given)
    x, _, _, weight = operands
    groups = max(a.shape[0] for a in given)
    _, batch, length, channels = x.shape
    y = x.new_empty((groups, batch, length, channels))
    tile = _TILES[x.device.type][0]
    work = batch * triton.cdiv(length, CHUNK) * triton.cdiv(channels, tile.columns)
    per_group = programs(x.device, groups, work, tile.per_core)
    # fmt: off
    short_conv_forward[(groups * per_group,)](
        *operands, y, batch, length, channels, per_group, *map(step, operands), W=weight.shape[2],
        CHUNK=CHUNK, BLOCK=tile.columns, HISTORY=len(given) > 3, num_warps=tile.warps,
    )
    # fmt: on
    return (y,)


def _launch_backward(ct: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    operands = _operands(*given)
    x, history, _, weight = operands
    ct = ct.contiguous()
    groups = max(a.shape[0] for a in (ct, *given))
    _, batch, length, channels = x.shape
    width, with_history = weight.shape[2], len(given) > 3
    d_x = x.new_empty((groups, batch, length, channels))
    d_history = history.new_empty((groups, batch, width - 1, channels)) if with_history else d_x
    chunks = triton.cdiv(length + (width - 1 if with_history else 0), CHUNK)
    parts = x.new_empty((groups, batch * chunks, channels, width), dtype=torch.float32)
    tile = _TILES[x.device.type][1]
    work = batch * chunks * triton.cdiv(channels, tile.columns)
    per_group = programs(x.device, groups, work, tile.per_core)
    # fmt: off
    short_conv_backward[(groups * per_group,)](
        *operands, ct, d_x, d_history, parts, batch, length, channels, per_group, *map(step,
        (*operands, ct)), W=width, CHUNK=CHUNK, BLOCK=tile.columns, HISTORY=with_history,
        num_warps=tile.warps,
    )
    # fmt: on
    d_weight = parts.sum(1).to(weight.dtype)
    return (d_x, d_weight, d_history) if with_history else (d_x, d_weight)


def builds(kind: str) -> list[Build]:
    """What is compiled for 4 taps on a kind of device, with a history and without."""
    one, other = _TILES[kind]
    groups = ("x_group", "history_group", "ids_group", "weight_group")
    found = []
    for dtype in ("bf16", "fp32"):
        operands = {
            "x_ptr": f"*{dtype}",
            "history_ptr": f"*{dtype}",
            "ids_ptr": "*i64",
            "weight_ptr": "*fp32",
        }
        names = ("batch", "length", "channels", "per_group", *groups)
        forward = {**operands, "y_ptr": f"*{dtype}", **dict.fromkeys(names, "i32")}
        grads = {"d_x_ptr": f"*{dtype}", "d_history_ptr": f"*{dtype}", "part_ptr": "*fp32"}
        sizes = dict.fromkeys((*names, "ct_group"), "i32")
        backward = {**operands, "ct_ptr": f"*{dtype}", **grads, **sizes}
        # The history is loaded as the input is: one dtype of it says enough.
        for history in (False, True) if dtype == "bf16" else (False,):
            how = f"{dtype} W4{' history' if history else ''}"
            cut = {"W": 4, "CHUNK": CHUNK, "HISTORY": history}
            found += [
                Build(
                    f"short_conv_forward {how}",
                    short_conv_forward,
                    forward,
                    cut | {"BLOCK": one.columns},
                    "forward",
                    one,
                    ("channels", *groups),
                ),
                Build(
                    f"short_conv_backward {how}",
                    short_conv_backward,
                    backward,
                    cut | {"BLOCK": other.columns},
                    "backward",
                    other,
                    ("channels", *groups, "ct_group"),
                ),
            ]
    return found
