# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The kernels of the short convolutions.

A program walks down ``CHUNK`` tokens of a row with some channels of one input and holds the last
three values in registers, so that each is read once. The backward holds the last three gradients
of the sums too: an input's own gradient is complete three tokens later.

There are two walks. One compares the documents of tokens. The other is for a chunk that lies in one
document with what is beside it, as most do: it takes four tokens a round, and the reads of later
rounds are under way meanwhile (``STAGES``). These kernels compute nearly as long as they read.
Without ``SPLIT`` there is the first walk only.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["short_conv_backward", "short_conv_forward"]


@triton.jit
def _pick(i, first, second, third, SEVERAL: tl.constexpr):
    """The pointer, or the number, of input i."""
    picked = first
    # A chain of selects, since pointers in an array would be loaded from memory first.
    if SEVERAL:
        picked = tl.where(i == 2, third, tl.where(i == 1, second, first))
    return picked


@triton.jit
def _place(block, channels0, channels1, channels2, BLOCK: tl.constexpr, SEVERAL: tl.constexpr):
    """The input that a block of channels is of, its channels, the block's first one there, and the
    channels of the inputs before.
    """
    until0 = tl.cdiv(channels0, BLOCK)
    until1 = until0 + tl.cdiv(channels1, BLOCK)
    i = tl.where(block >= until1, 2, tl.where(block >= until0, 1, 0))
    channels = _pick(i, channels0, channels1, channels2, SEVERAL)
    first = (block - _pick(i, 0, until0, until1, SEVERAL)) * BLOCK
    return i, channels, first, _pick(i, 0, channels0, channels0 + channels1, SEVERAL)


@triton.jit
def _one_document(ids, first, length, CHUNK: tl.constexpr, AFTER: tl.constexpr):
    """Whether a chunk, three tokens before it and some after it lie in the row, in one document."""
    lane = tl.arange(0, 2 * CHUNK)
    count = 3 + CHUNK + AFTER
    inside = (first >= 3) & (first + CHUNK + AFTER <= length)
    own = tl.load(ids + tl.minimum(tl.maximum(first, 0), length - 1)).to(tl.int32)
    read = lane < tl.where(inside, count, 0)
    documents = tl.load(ids + (first - 3) + lane, mask=read, other=0).to(tl.int32)
    return (own > 0) & (tl.sum((documents == own).to(tl.int32), axis=0) == count)


@triton.jit
def _of(document, other, x):
    """``x``, of a token of another document, as one of this document sees it."""
    # A select and no product with 0: another document's input may not be finite.
    return tl.where(other == document, x, 0.0)


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
    x_row, history, ids, token, channel, length, channels, W: tl.constexpr, HISTORY: tl.constexpr,
):
# fmt: on
    """The input at a token and its document; 0 and -1 outside of the row and its history.

    A token before the row belongs to the document of the row's first token, as the contract says.
    Padding is not read: it may hold NaN.
    """
    here = (token >= 0) & (token < length)
    document = tl.load(ids + tl.minimum(tl.maximum(token, 0), length - 1)).to(tl.int32)
    known = here
    if HISTORY:
        earlier = (token < 0) & (token > -W)
        at = history + (token + W - 1) * channels
        read = channel < tl.where(earlier, channels, 0)
        before = tl.load(at + channel, mask=read, other=0.0).to(tl.float32)
        known = here | earlier
    document = tl.where(known, document, -1)
    # A bound of 0 channels masks all: the interpreter spoils a scalar mask that meets a tile's.
    read = channel < tl.where(here & (document > 0), channels, 0)
    x = tl.load(x_row + token * channels + channel, mask=read, other=0.0).to(tl.float32)
    if HISTORY:
        x += before
    return x, document


@triton.jit
def _sum(w0, w1, w2, w3, x, x1, x2, x3):
    """The taps times a token's input and the three before it: before SiLU."""
    # From left to right: three of the four additions are part of a product's instruction.
    return w0 * x + w1 * x1 + w2 * x2 + w3 * x3


@triton.jit
def _silu(z):
    # The exponential overflows to infinity below -88: z / inf is the 0 that is wanted.
    return z / (1.0 + tl.exp(-z))


@triton.jit
def _slope(z):
    """The derivative of SiLU."""
    opened = 1.0 / (1.0 + tl.exp(-z))
    return opened * (1.0 + z * (1.0 - opened))


# fmt: off
@triton.jit
def _forward_by_token(
    x_row, history, ids, out, w0, w1, w2, w3, first, end, channel, length, channels, W:
    tl.constexpr, HISTORY: tl.constexpr,
):
    """Writes the outputs of the tokens from first to end, of any documents."""
    x3, d3 = _input(x_row, history, ids, first - 3, channel, length, channels, W, HISTORY)
    x2, d2 = _input(x_row, history, ids, first - 2, channel, length, channels, W, HISTORY)
    x1, d1 = _input(x_row, history, ids, first - 1, channel, length, channels, W, HISTORY)
    for t in range(first, end):
        token = first * 0 + t  # a tensor of 64 bits in the interpreter too
        x, d = _input(x_row, history, ids, token, channel, length, channels, W, HISTORY)
        z = _sum(w0, w1, w2, w3, x, _of(d, d1, x1), _of(d, d2, x2), _of(d, d3, x3))
        y = tl.where(d > 0, _silu(z), 0.0)
        to = out + token * channels + channel
        tl.store(to, y.to(out.dtype.element_ty), mask=channel < channels)
        x3, d3 = x2, d2
        x2, d2 = x1, d1
        x1, d1 = x, d
# fmt: on


@triton.jit
def _read(row, token, channel, channels):
    at = row + token * channels + channel
    return tl.load(at, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _write(row, value, token, channel, within, channels):
    at = row + token * channels + channel
    tl.store(at, value.to(row.dtype.element_ty), mask=channel < within)


# fmt: off
@triton.jit
def _forward_by_round(
    x_row, out, w0, w1, w2, w3, first, channel, channels, CHUNK: tl.constexpr, STAGES:
    tl.constexpr,
):
# fmt: on
    """Writes the outputs of a chunk of one document, four tokens a round."""
    x3 = _read(x_row, first - 3, channel, channels)
    x2 = _read(x_row, first - 2, channel, channels)
    x1 = _read(x_row, first - 1, channel, channels)
    for i in tl.range(0, CHUNK, 4, num_stages=STAGES):
        token = first + i
        xa = _read(x_row, token, channel, channels)
        xb = _read(x_row, token + 1, channel, channels)
        xc = _read(x_row, token + 2, channel, channels)
        xd = _read(x_row, token + 3, channel, channels)
        za = _sum(w0, w1, w2, w3, xa, x1, x2, x3)
        zb = _sum(w0, w1, w2, w3, xb, xa, x1, x2)
        zc = _sum(w0, w1, w2, w3, xc, xb, xa, x1)
        zd = _sum(w0, w1, w2, w3, xd, xc, xb, xa)
        _write(out, _silu(za), token, channel, channels, channels)
        _write(out, _silu(zb), token + 1, channel, channels, channels)
        _write(out, _silu(zc), token + 2, channel, channels, channels)
        _write(out, _silu(zd), token + 3, channel, channels, channels)
        x1 = xd
        x2 = xc
        x3 = xb


# fmt: off
@triton.jit
def short_conv_forward(
    x0_ptr, x1_ptr, x2_ptr, weight0_ptr, weight1_ptr, weight2_ptr, ids_ptr, history0_ptr,
    history1_ptr, history2_ptr, y0_ptr, y1_ptr, y2_ptr, channels0, channels1, channels2, batch,
    length, per_group, x_apart, weight_apart, ids_apart, history_apart, W: tl.constexpr, CHUNK:
    tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, SEVERAL: tl.constexpr,
):
# fmt: on
    """``SiLU(conv(x))`` of up to three inputs; ``apart``: 1 where each group has its own, else
    0.
    """
    group = (tl.program_id(0) // per_group).to(tl.int64)
    across = tl.cdiv(channels0, BLOCK) + tl.cdiv(channels1, BLOCK) + tl.cdiv(channels2, BLOCK)
    chunks = tl.cdiv(length, CHUNK)
    for p in range(tl.program_id(0) % per_group, batch * chunks * across, per_group):
        # Neighbouring programs take neighbouring channels of the same tokens.
        row = group * 0 + p // (chunks * across)  # 64 bits
        first = group * 0 + (p // across) % chunks * CHUNK
        block = p % across
        i, channels, begin, _ = _place(block, channels0, channels1, channels2, BLOCK, SEVERAL)
        channel = begin + tl.arange(0, BLOCK)
        inside = channel < channels
        x_row = _pick(i, x0_ptr, x1_ptr, x2_ptr, SEVERAL)
        x_row += (group * x_apart * batch + row) * length * channels
        history = _pick(i, history0_ptr, history1_ptr, history2_ptr, SEVERAL)
        history += (group * history_apart * batch + row) * (W - 1) * channels
        ids = ids_ptr + (group * ids_apart * batch + row) * length
        out = _pick(i, y0_ptr, y1_ptr, y2_ptr, SEVERAL) + (group * batch + row) * length * channels
        taps = _pick(i, weight0_ptr, weight1_ptr, weight2_ptr, SEVERAL)
        taps += group * weight_apart * channels * W
        w0 = _tap(taps, channel, inside, 0, W)
        w1 = _tap(taps, channel, inside, 1, W)
        w2 = _tap(taps, channel, inside, 2, W)
        w3 = _tap(taps, channel, inside, 3, W)
        end = tl.minimum(first + CHUNK, length)
        whole = False
        if SPLIT:
            whole = _one_document(ids, first, length, CHUNK, 0)
        # fmt: off
        if whole:
            _forward_by_round(
                x_row, out, w0, w1, w2, w3, first, channel, channels, CHUNK, STAGES)
        else:
            _forward_by_token(
                x_row, history, ids, out, w0, w1, w2, w3, first, end, channel, length, channels,
                W, HISTORY)
        # fmt: on


# fmt: off
@triton.jit
def _write_input_grad(
    d_x_row, d_history, d_x, token, first, end, channel, channels, W: tl.constexpr, HISTORY:
    tl.constexpr,
):
# fmt: on
    """Writes the gradient of an input of the chunk, which may be one of the history."""
    complete = (token >= first) & (token < end)
    tl.store(
        d_x_row + token * channels + channel,
        d_x.to(d_x_row.dtype.element_ty),
        mask=channel < tl.where(complete & (token >= 0), channels, 0),
    )
    if HISTORY:
        tl.store(
            d_history + (token + W - 1) * channels + channel,
            d_x.to(d_history.dtype.element_ty),
            mask=channel < tl.where(complete & (token < 0), channels, 0),
        )


# fmt: off
@triton.jit
def _backward_by_token(
    x_row, history, ids, ct_row, d_x_row, d_history, w0, w1, w2, w3, first, end, channel, length,
    channels, W: tl.constexpr, HISTORY: tl.constexpr,
):
    """Writes the gradients of the inputs from first to end, of any documents, and gives those of
    the taps.
    """
    x3, d3 = _input(x_row, history, ids, first - 3, channel, length, channels, W, HISTORY)
    x2, d2 = _input(x_row, history, ids, first - 2, channel, length, channels, W, HISTORY)
    x1, d1 = _input(x_row, history, ids, first - 1, channel, length, channels, W, HISTORY)
    # Each its own zeros: two names of one value would not both be carried through the loop.
    g1 = tl.zeros(w0.shape, dtype=tl.float32)
    g2 = tl.zeros(w0.shape, dtype=tl.float32)
    g3 = tl.zeros(w0.shape, dtype=tl.float32)
    v0 = tl.zeros(w0.shape, dtype=tl.float32)
    v1 = tl.zeros(w0.shape, dtype=tl.float32)
    v2 = tl.zeros(w0.shape, dtype=tl.float32)
    v3 = tl.zeros(w0.shape, dtype=tl.float32)
    # Three tokens past the chunk: they read its last inputs.
    for t in range(first, end + 3):
        token = first * 0 + t  # a tensor of 64 bits in the interpreter too
        x, d = _input(x_row, history, ids, token, channel, length, channels, W, HISTORY)
        seen1 = _of(d, d1, x1)
        seen2 = _of(d, d2, x2)
        seen3 = _of(d, d3, x3)
        z = _sum(w0, w1, w2, w3, x, seen1, seen2, seen3)
        read = channel < tl.where((token >= 0) & (token < length) & (d > 0), channels, 0)
        ct = tl.load(ct_row + token * channels + channel, mask=read, other=0.0)
        g = ct.to(tl.float32) * _slope(z)
        # A token past the chunk is in the sum of the next one.
        counted = tl.where(token < end, g, 0.0)
        v0 += counted * x
        v1 += counted * seen1
        v2 += counted * seen2
        v3 += counted * seen3
        # The input three tokens before is in four sums, the last of which this is.
        d_x = _sum(w0, w1, w2, w3, g3, _of(d3, d2, g2), _of(d3, d1, g1), _of(d3, d, g))
        _write_input_grad(
            d_x_row, d_history, d_x, token - 3, first, end, channel, channels, W, HISTORY)
        x3, d3, g3 = x2, d2, g2
        x2, d2, g2 = x1, d1, g1
        x1, d1, g1 = x, d, g
    return v0, v1, v2, v3


@triton.jit
def _backward_by_round(
    x_row, ct_row, d_x_row, w0, w1, w2, w3, first, channel, channels, CHUNK: tl.constexpr, STAGES:
    tl.constexpr,
):
# fmt: on
    """Writes the gradients of the inputs of a chunk of one document, four tokens a round, and gives
    those of the taps.
    """
    x3 = _read(x_row, first - 3, channel, channels)
    x2 = _read(x_row, first - 2, channel, channels)
    x1 = _read(x_row, first - 1, channel, channels)
    # Those of the tokens before the chunk are not used: their inputs belong to the chunk before.
    # Each its own zeros: two names of one value would not both be carried through the loop.
    g1 = tl.zeros(w0.shape, dtype=tl.float32)
    g2 = tl.zeros(w0.shape, dtype=tl.float32)
    g3 = tl.zeros(w0.shape, dtype=tl.float32)
    v0 = tl.zeros(w0.shape, dtype=tl.float32)
    v1 = tl.zeros(w0.shape, dtype=tl.float32)
    v2 = tl.zeros(w0.shape, dtype=tl.float32)
    v3 = tl.zeros(w0.shape, dtype=tl.float32)
    for i in tl.range(0, CHUNK, 4, num_stages=STAGES):
        token = first + i
        xa = _read(x_row, token, channel, channels)
        xb = _read(x_row, token + 1, channel, channels)
        xc = _read(x_row, token + 2, channel, channels)
        xd = _read(x_row, token + 3, channel, channels)
        ga = _read(ct_row, token, channel, channels)
        gb = _read(ct_row, token + 1, channel, channels)
        gc = _read(ct_row, token + 2, channel, channels)
        gd = _read(ct_row, token + 3, channel, channels)
        ga *= _slope(_sum(w0, w1, w2, w3, xa, x1, x2, x3))
        gb *= _slope(_sum(w0, w1, w2, w3, xb, xa, x1, x2))
        gc *= _slope(_sum(w0, w1, w2, w3, xc, xb, xa, x1))
        gd *= _slope(_sum(w0, w1, w2, w3, xd, xc, xb, xa))
        v0 = v0 + ga * xa + gb * xb + gc * xc + gd * xd
        v1 = v1 + ga * x1 + gb * xa + gc * xb + gd * xc
        v2 = v2 + ga * x2 + gb * x1 + gc * xa + gd * xb
        v3 = v3 + ga * x3 + gb * x2 + gc * x1 + gd * xa
        # Of the first round only the last of these is an input of the chunk.
        within = tl.where(token > first, channels, 0)
        _write(d_x_row, _sum(w0, w1, w2, w3, g3, g2, g1, ga), token - 3, channel, within, channels)
        _write(d_x_row, _sum(w0, w1, w2, w3, g2, g1, ga, gb), token - 2, channel, within, channels)
        _write(d_x_row, _sum(w0, w1, w2, w3, g1, ga, gb, gc), token - 1, channel, within, channels)
        _write(d_x_row, _sum(w0, w1, w2, w3, ga, gb, gc, gd), token, channel, channels, channels)
        x1 = xd
        x2 = xc
        x3 = xb
        g1 = gd
        g2 = gc
        g3 = gb
    # Three tokens past the chunk read its last inputs; their part of the taps' sums is the next
    # chunk's.
    token = first + CHUNK
    xa = _read(x_row, token, channel, channels)
    xb = _read(x_row, token + 1, channel, channels)
    xc = _read(x_row, token + 2, channel, channels)
    ga = _read(ct_row, token, channel, channels)
    gb = _read(ct_row, token + 1, channel, channels)
    gc = _read(ct_row, token + 2, channel, channels)
    ga *= _slope(_sum(w0, w1, w2, w3, xa, x1, x2, x3))
    gb *= _slope(_sum(w0, w1, w2, w3, xb, xa, x1, x2))
    gc *= _slope(_sum(w0, w1, w2, w3, xc, xb, xa, x1))
    _write(d_x_row, _sum(w0, w1, w2, w3, g3, g2, g1, ga), token - 3, channel, channels, channels)
    _write(d_x_row, _sum(w0, w1, w2, w3, g2, g1, ga, gb), token - 2, channel, channels, channels)
    _write(d_x_row, _sum(w0, w1, w2, w3, g1, ga, gb, gc), token - 1, channel, channels, channels)
    return v0, v1, v2, v3


# fmt: off
@triton.jit
def short_conv_backward(
    x0_ptr, x1_ptr, x2_ptr, weight0_ptr, weight1_ptr, weight2_ptr, ids_ptr, history0_ptr,
    history1_ptr, history2_ptr, ct0_ptr, ct1_ptr, ct2_ptr, d_x0_ptr, d_x1_ptr, d_x2_ptr,
    d_history0_ptr, d_history1_ptr, d_history2_ptr, part_ptr, channels0, channels1, channels2,
    batch, length, per_group, x_apart, weight_apart, ids_apart, history_apart, ct_apart, W:
    tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr, SPLIT:
    tl.constexpr, STAGES: tl.constexpr, SEVERAL: tl.constexpr,
):
    """Gradients of inputs and histories, and of the taps by chunk of tokens."""
    group = (tl.program_id(0) // per_group).to(tl.int64)
    across = tl.cdiv(channels0, BLOCK) + tl.cdiv(channels1, BLOCK) + tl.cdiv(channels2, BLOCK)
    # With a history the first chunk begins with the tokens before the row.
    lead = (W - 1) if HISTORY else 0
    chunks = tl.cdiv(length + lead, CHUNK)
    for p in range(tl.program_id(0) % per_group, batch * chunks * across, per_group):
        row = group * 0 + p // (chunks * across)  # 64 bits
        chunk = group * 0 + (p // across) % chunks
        first = chunk * CHUNK - lead
        end = tl.minimum(first + CHUNK, length)
        block = p % across
        i, channels, begin, past = _place(block, channels0, channels1, channels2, BLOCK, SEVERAL)
        channel = begin + tl.arange(0, BLOCK)
        inside = channel < channels
        x_row = _pick(i, x0_ptr, x1_ptr, x2_ptr, SEVERAL)
        x_row += (group * x_apart * batch + row) * length * channels
        history = _pick(i, history0_ptr, history1_ptr, history2_ptr, SEVERAL)
        history += (group * history_apart * batch + row) * (W - 1) * channels
        ids = ids_ptr + (group * ids_apart * batch + row) * length
        ct_row = _pick(i, ct0_ptr, ct1_ptr, ct2_ptr, SEVERAL)
        ct_row += (group * ct_apart * batch + row) * length * channels
        d_x_row = _pick(i, d_x0_ptr, d_x1_ptr, d_x2_ptr, SEVERAL)
        d_x_row += (group * batch + row) * length * channels
        d_history = _pick(i, d_history0_ptr, d_history1_ptr, d_history2_ptr, SEVERAL)
        d_history += (group * batch + row) * (W - 1) * channels
        taps = _pick(i, weight0_ptr, weight1_ptr, weight2_ptr, SEVERAL)
        taps += group * weight_apart * channels * W
        w0 = _tap(taps, channel, inside, 0, W)
        w1 = _tap(taps, channel, inside, 1, W)
        w2 = _tap(taps, channel, inside, 2, W)
        w3 = _tap(taps, channel, inside, 3, W)
        whole = False
        if SPLIT:
            whole = _one_document(ids, first, length, CHUNK, 3)
        if whole:
            v0, v1, v2, v3 = _backward_by_round(
                x_row, ct_row, d_x_row, w0, w1, w2, w3, first, channel, channels, CHUNK, STAGES)
        else:
            v0, v1, v2, v3 = _backward_by_token(
                x_row, history, ids, ct_row, d_x_row, d_history, w0, w1, w2, w3, first, end,
                channel, length, channels, W, HISTORY)
        # fmt: on
        # By tap, and the channels of all inputs side by side.
        total = channels0 + channels1 + channels2
        part = part_ptr + ((group * batch + row) * chunks + chunk) * W * total + past
        tl.store(part + (W - 1) * total + channel, v0, mask=inside)
        tl.store(part + (W - 2) * total + channel, v1, mask=inside)
        if W > 2:
            tl.store(part + (W - 3) * total + channel, v2, mask=inside)
        if W > 3:
            tl.store(part + channel, v3, mask=inside)
