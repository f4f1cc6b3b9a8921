# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The kernels of the short convolutions.

A program walks down ``CHUNK`` tokens of a row with some channels of one input and holds the last
three values in registers, so that each is read once. The backward holds the last three gradients
of the sums too: an input's own gradient is complete three tokens later.

Where a chunk and what lies beside it are of one document, as most are, no token is compared with
another's document (``WHOLE``): these kernels compute nearly as long as they read. Without ``SPLIT``
all chunks are walked with the comparisons.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["short_conv_backward", "short_conv_forward"]


@triton.jit
def _sigmoid(a):
    # exp overflows to infinity where a is below -88, and 1 / inf is the 0 that is wanted
    return 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def _pick(i, first, second, third):
    """The pointer, or the number, of input i."""
    # A chain of selects, since pointers in an array would be loaded from memory first.
    return tl.where(i == 2, third, tl.where(i == 1, second, first))


@triton.jit
def _place(block, channels0, channels1, channels2, BLOCK: tl.constexpr):
    """The input that a block of channels is of, its channels, the block's first one there, and the
    channels of the inputs before.
    """
    until0 = tl.cdiv(channels0, BLOCK)
    until1 = until0 + tl.cdiv(channels1, BLOCK)
    i = tl.where(block >= until1, 2, tl.where(block >= until0, 1, 0))
    channels = _pick(i, channels0, channels1, channels2)
    first = (block - _pick(i, 0, until0, until1)) * BLOCK
    return i, channels, first, _pick(i, 0, channels0, channels0 + channels1)


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
def _of(document, other, x, WHOLE: tl.constexpr):
    """``x``, of a token of another document, as one of this document sees it."""
    # A select and no product with 0: another document's input may not be finite.
    if WHOLE:
        seen = x
    else:
        seen = tl.where(other == document, x, 0.0)
    return seen


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
    tl.constexpr, WHOLE: tl.constexpr,
):
# fmt: on
    """The input at a token and its document; 0 and -1 outside of the row and its history.

    A token before the row belongs to the document of the row's first token, as the contract says.
    Padding is not read: it may hold NaN.
    """
    if WHOLE:
        document = tl.full((), 1, dtype=tl.int32)
        x = tl.load(x_ptr + token * channels + channel, mask=channel < channels, other=0.0)
        x = x.to(tl.float32)
    else:
        here = (token >= 0) & (token < length)
        document = tl.load(ids_ptr + tl.minimum(tl.maximum(token, 0), length - 1)).to(tl.int32)
        known = here
        if HISTORY:
            earlier = (token < 0) & (token > -W)
            at = history_ptr + (token + W - 1) * channels
            read = channel < tl.where(earlier, channels, 0)
            before = tl.load(at + channel, mask=read, other=0.0).to(tl.float32)
            known = here | earlier
        document = tl.where(known, document, -1)
        # A bound of 0 channels masks all: the interpreter spoils a scalar mask that meets a tile's.
        read = channel < tl.where(here & (document > 0), channels, 0)
        x = tl.load(x_ptr + token * channels + channel, mask=read, other=0.0).to(tl.float32)
        if HISTORY:
            x += before
    return x, document


@triton.jit
def _sum(w0, w1, w2, w3, x, d, x1, d1, x2, d2, x3, d3, WHOLE: tl.constexpr):
    """The taps times the inputs of a token's own document, before SiLU."""
    z = w0 * x + w1 * _of(d, d1, x1, WHOLE)
    return z + (w2 * _of(d, d2, x2, WHOLE) + w3 * _of(d, d3, x3, WHOLE))


# fmt: off
@triton.jit
def _write_silu(
    out, z, document, token, end, channel, channels, WHOLE: tl.constexpr,
):
# fmt: on
    y = z * _sigmoid(z)
    within = channels
    if not WHOLE:
        y = tl.where(document > 0, y, 0.0)
        within = tl.where(token < end, channels, 0)
    tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=channel < within)


# fmt: off
@triton.jit
def _walk_forward(
    x_row, history, ids, out, w0, w1, w2, w3, first, end, channel, length, channels, W:
    tl.constexpr, HISTORY: tl.constexpr, WHOLE: tl.constexpr,
):
# fmt: on
    """Writes the outputs of the tokens from first to end."""
    x3, d3 = _input(x_row, history, ids, first - 3, channel, length, channels, W, HISTORY, WHOLE)
    x2, d2 = _input(x_row, history, ids, first - 2, channel, length, channels, W, HISTORY, WHOLE)
    x1, d1 = _input(x_row, history, ids, first - 1, channel, length, channels, W, HISTORY, WHOLE)
    # Four tokens a round: their reads are on the way together, before the first write.
    for t in range(first, end, 4):
        token = first * 0 + t  # a tensor of 64 bits in the interpreter too
        # fmt: off
        xa, da = _input(x_row, history, ids, token, channel, length, channels, W, HISTORY, WHOLE)
        xb, db = _input(
            x_row, history, ids, token + 1, channel, length, channels, W, HISTORY, WHOLE)
        xc, dc = _input(
            x_row, history, ids, token + 2, channel, length, channels, W, HISTORY, WHOLE)
        xd, dd = _input(
            x_row, history, ids, token + 3, channel, length, channels, W, HISTORY, WHOLE)
        # fmt: on
        za = _sum(w0, w1, w2, w3, xa, da, x1, d1, x2, d2, x3, d3, WHOLE)
        zb = _sum(w0, w1, w2, w3, xb, db, xa, da, x1, d1, x2, d2, WHOLE)
        zc = _sum(w0, w1, w2, w3, xc, dc, xb, db, xa, da, x1, d1, WHOLE)
        zd = _sum(w0, w1, w2, w3, xd, dd, xc, dc, xb, db, xa, da, WHOLE)
        _write_silu(out, za, da, token, end, channel, channels, WHOLE)
        _write_silu(out, zb, db, token + 1, end, channel, channels, WHOLE)
        _write_silu(out, zc, dc, token + 2, end, channel, channels, WHOLE)
        _write_silu(out, zd, dd, token + 3, end, channel, channels, WHOLE)
        x1, d1 = xd, dd
        x2, d2 = xc, dc
        x3, d3 = xb, db


# fmt: off
@triton.jit
def short_conv_forward(
    x0_ptr, x1_ptr, x2_ptr, weight0_ptr, weight1_ptr, weight2_ptr, ids_ptr, history0_ptr,
    history1_ptr, history2_ptr, y0_ptr, y1_ptr, y2_ptr, channels0, channels1, channels2, batch,
    length, per_group, x_apart, weight_apart, ids_apart, history_apart, W: tl.constexpr, CHUNK:
    tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr, SPLIT: tl.constexpr,
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
        i, channels, begin, _ = _place(p % across, channels0, channels1, channels2, BLOCK)
        channel = begin + tl.arange(0, BLOCK)
        inside = channel < channels
        x_row = _pick(i, x0_ptr, x1_ptr, x2_ptr)
        x_row += (group * x_apart * batch + row) * length * channels
        history = _pick(i, history0_ptr, history1_ptr, history2_ptr)
        history += (group * history_apart * batch + row) * (W - 1) * channels
        ids = ids_ptr + (group * ids_apart * batch + row) * length
        out = _pick(i, y0_ptr, y1_ptr, y2_ptr) + (group * batch + row) * length * channels
        taps = _pick(i, weight0_ptr, weight1_ptr, weight2_ptr)
        taps += group * weight_apart * channels * W
        w0 = _tap(taps, channel, inside, 0, W)
        w1 = _tap(taps, channel, inside, 1, W)
        w2 = _tap(taps, channel, inside, 2, W)
        w3 = _tap(taps, channel, inside, 3, W)
        end = tl.minimum(first + CHUNK, length)
        # fmt: off
        if SPLIT:
            if _one_document(ids, first, length, CHUNK, 0):
                _walk_forward(
                    x_row, history, ids, out, w0, w1, w2, w3, first, end, channel, length,
                    channels, W, HISTORY, True)
            else:
                _walk_forward(
                    x_row, history, ids, out, w0, w1, w2, w3, first, end, channel, length,
                    channels, W, HISTORY, False)
        else:
            _walk_forward(
                x_row, history, ids, out, w0, w1, w2, w3, first, end, channel, length, channels,
                W, HISTORY, False)
        # fmt: on


# fmt: off
@triton.jit
def _sum_grad(
    ct_row, z, document, token, length, channel, channels, WHOLE: tl.constexpr,
):
# fmt: on
    """The gradient of a token's sum: its cotangent times the slope of SiLU; 0 where it has none."""
    within = channels
    if not WHOLE:
        within = tl.where((token >= 0) & (token < length) & (document > 0), channels, 0)
    ct = tl.load(ct_row + token * channels + channel, mask=channel < within, other=0.0)
    opened = _sigmoid(z)
    return ct.to(tl.float32) * (opened * (1.0 + z * (1.0 - opened)))


# fmt: off
@triton.jit
def _write_input_grad(
    d_x_row, d_history_row, w0, w1, w2, w3, document, g, g1, d1, g2, d2, g3, d3, token, first, end,
    channel, channels, W: tl.constexpr, HISTORY: tl.constexpr, WHOLE: tl.constexpr,
):
# fmt: on
    """Writes the gradient of a token's input: of its own sum, and of three later ones."""
    d_x = w0 * g + w1 * _of(document, d1, g1, WHOLE)
    d_x += w2 * _of(document, d2, g2, WHOLE) + w3 * _of(document, d3, g3, WHOLE)
    complete = (token >= first) & (token < end)
    tl.store(
        d_x_row + token * channels + channel,
        d_x.to(d_x_row.dtype.element_ty),
        mask=channel < tl.where(complete & (token >= 0), channels, 0),
    )
    if HISTORY and not WHOLE:
        tl.store(
            d_history_row + (token + W - 1) * channels + channel,
            d_x.to(d_history_row.dtype.element_ty),
            mask=channel < tl.where(complete & (token < 0), channels, 0),
        )


# fmt: off
@triton.jit
def _round_backward(
    x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, x1, d1, g1, x2, d2, g2,
    x3, d3, g3, v0, v1, v2, v3, token, first, end, channel, length, channels, W: tl.constexpr,
    HISTORY: tl.constexpr, WHOLE: tl.constexpr,
):
    """Four tokens from ``token`` on: writes the gradients of the inputs that are complete now, and
    gives the last three inputs, documents and gradients of sums, and the taps' gradients so far.
    """
    xa, da = _input(x_row, history, ids, token, channel, length, channels, W, HISTORY, WHOLE)
    xb, db = _input(x_row, history, ids, token + 1, channel, length, channels, W, HISTORY, WHOLE)
    xc, dc = _input(x_row, history, ids, token + 2, channel, length, channels, W, HISTORY, WHOLE)
    xd, dd = _input(x_row, history, ids, token + 3, channel, length, channels, W, HISTORY, WHOLE)
    za = _sum(w0, w1, w2, w3, xa, da, x1, d1, x2, d2, x3, d3, WHOLE)
    zb = _sum(w0, w1, w2, w3, xb, db, xa, da, x1, d1, x2, d2, WHOLE)
    zc = _sum(w0, w1, w2, w3, xc, dc, xb, db, xa, da, x1, d1, WHOLE)
    zd = _sum(w0, w1, w2, w3, xd, dd, xc, dc, xb, db, xa, da, WHOLE)
    ga = _sum_grad(ct_row, za, da, token, length, channel, channels, WHOLE)
    gb = _sum_grad(ct_row, zb, db, token + 1, length, channel, channels, WHOLE)
    gc = _sum_grad(ct_row, zc, dc, token + 2, length, channel, channels, WHOLE)
    gd = _sum_grad(ct_row, zd, dd, token + 3, length, channel, channels, WHOLE)
    v0 += (ga * xa + gb * xb) + (gc * xc + gd * xd)
    v1 += ga * _of(da, d1, x1, WHOLE) + gb * _of(db, da, xa, WHOLE)
    v1 += gc * _of(dc, db, xb, WHOLE) + gd * _of(dd, dc, xc, WHOLE)
    v2 += ga * _of(da, d2, x2, WHOLE) + gb * _of(db, d1, x1, WHOLE)
    v2 += gc * _of(dc, da, xa, WHOLE) + gd * _of(dd, db, xb, WHOLE)
    v3 += ga * _of(da, d3, x3, WHOLE) + gb * _of(db, d2, x2, WHOLE)
    v3 += gc * _of(dc, d1, x1, WHOLE) + gd * _of(dd, da, xa, WHOLE)
    # Gradients of the inputs from three tokens before this round to its first.
    _write_input_grad(
        d_x_row, d_history_row, w0, w1, w2, w3, d3, g3, g2, d2, g1, d1, ga, da, token - 3, first,
        end, channel, channels, W, HISTORY, WHOLE)
    _write_input_grad(
        d_x_row, d_history_row, w0, w1, w2, w3, d2, g2, g1, d1, ga, da, gb, db, token - 2, first,
        end, channel, channels, W, HISTORY, WHOLE)
    _write_input_grad(
        d_x_row, d_history_row, w0, w1, w2, w3, d1, g1, ga, da, gb, db, gc, dc, token - 1, first,
        end, channel, channels, W, HISTORY, WHOLE)
    _write_input_grad(
        d_x_row, d_history_row, w0, w1, w2, w3, da, ga, gb, db, gc, dc, gd, dd, token, first, end,
        channel, channels, W, HISTORY, WHOLE)
    return xd, dd, gd, xc, dc, gc, xb, db, gb, v0, v1, v2, v3


@triton.jit
def _walk_backward(
    x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, first, end, channel,
    length, channels, W: tl.constexpr, HISTORY: tl.constexpr, WHOLE: tl.constexpr,
):
    """Writes the gradients of the inputs from first to end, and gives those of the taps."""
    x3, d3 = _input(x_row, history, ids, first - 3, channel, length, channels, W, HISTORY, WHOLE)
    x2, d2 = _input(x_row, history, ids, first - 2, channel, length, channels, W, HISTORY, WHOLE)
    x1, d1 = _input(x_row, history, ids, first - 1, channel, length, channels, W, HISTORY, WHOLE)
    g1 = w0 * 0.0
    g2 = g1
    g3 = g1
    v0 = g1
    v1 = g1
    v2 = g1
    v3 = g1
    token = first
    for _ in range(0, tl.cdiv(end - first, 4)):
        x1, d1, g1, x2, d2, g2, x3, d3, g3, v0, v1, v2, v3 = _round_backward(
            x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, x1, d1, g1, x2,
            d2, g2, x3, d3, g3, v0, v1, v2, v3, token, first, end, channel, length, channels, W,
            HISTORY, WHOLE)
        token += 4
    # Tokens past the chunk read its last inputs. Their part of the taps' gradients, which would be
    # the next four results, is in the sum of the next chunk.
    _round_backward(
        x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, x1, d1, g1, x2, d2,
        g2, x3, d3, g3, v0, v1, v2, v3, token, first, end, channel, length, channels, W, HISTORY,
        WHOLE)
    return v0, v1, v2, v3


@triton.jit
def short_conv_backward(
    x0_ptr, x1_ptr, x2_ptr, weight0_ptr, weight1_ptr, weight2_ptr, ids_ptr, history0_ptr,
    history1_ptr, history2_ptr, ct0_ptr, ct1_ptr, ct2_ptr, d_x0_ptr, d_x1_ptr, d_x2_ptr,
    d_history0_ptr, d_history1_ptr, d_history2_ptr, part_ptr, channels0, channels1, channels2,
    batch, length, per_group, x_apart, weight_apart, ids_apart, history_apart, ct_apart, W:
    tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr, SPLIT:
    tl.constexpr,
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
        i, channels, begin, past = _place(p % across, channels0, channels1, channels2, BLOCK)
        channel = begin + tl.arange(0, BLOCK)
        inside = channel < channels
        x_row = _pick(i, x0_ptr, x1_ptr, x2_ptr)
        x_row += (group * x_apart * batch + row) * length * channels
        history = _pick(i, history0_ptr, history1_ptr, history2_ptr)
        history += (group * history_apart * batch + row) * (W - 1) * channels
        ids = ids_ptr + (group * ids_apart * batch + row) * length
        ct_row = _pick(i, ct0_ptr, ct1_ptr, ct2_ptr)
        ct_row += (group * ct_apart * batch + row) * length * channels
        d_x_row = _pick(i, d_x0_ptr, d_x1_ptr, d_x2_ptr)
        d_x_row += (group * batch + row) * length * channels
        d_history_row = _pick(i, d_history0_ptr, d_history1_ptr, d_history2_ptr)
        d_history_row += (group * batch + row) * (W - 1) * channels
        taps = _pick(i, weight0_ptr, weight1_ptr, weight2_ptr)
        taps += group * weight_apart * channels * W
        w0 = _tap(taps, channel, inside, 0, W)
        w1 = _tap(taps, channel, inside, 1, W)
        w2 = _tap(taps, channel, inside, 2, W)
        w3 = _tap(taps, channel, inside, 3, W)
        if SPLIT:
            # Four tokens past the chunk, as the last round has.
            if _one_document(ids, first, length, CHUNK, 4):
                v0, v1, v2, v3 = _walk_backward(
                    x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, first,
                    end, channel, length, channels, W, HISTORY, True)
            else:
                v0, v1, v2, v3 = _walk_backward(
                    x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, first,
                    end, channel, length, channels, W, HISTORY, False)
        else:
            v0, v1, v2, v3 = _walk_backward(
                x_row, ct_row, history, ids, d_x_row, d_history_row, w0, w1, w2, w3, first, end,
                channel, length, channels, W, HISTORY, False)
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
