# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
"""The residual attention in one pass over the sources: norm, score, online softmax and mix of a
token in one program.

The backward keeps the scores and the reciprocal norms, two numbers per token and source. Where a
program holds all sources of a token (:mod:`~.few_sources`), that is all. Where they are too many,
it keeps the result ``o`` too: ``sum_j p_j <ct, v_j> = <ct, o>`` is known before the sources are
read, and one pass gives all gradients. Where not even one fits (Ascend), two kernels read the
sources twice and need no result (:mod:`~.wide_tokens`). The gradient of the key is summed over a
program's tokens in registers and over programs in a fixed order: no atomics, the same bits in every
run. First order only.

The result is the rounded one, ``o_d (1 + e_d)`` with ``|e_d| <= u`` (2^-9 for bfloat16, 2^-24 for
float32), as in FlashAttention's backward. So ``<ct, o>`` is off by at most ``E = u sum_d |ct_d
o_d|`` and the gradient of score ``j`` by ``p_j E``, as rounding one source by ``u`` does to ``<ct,
v_j>``; the gradient of source ``j`` by at most ``p_j E rho_j |key - s_j rho_j v_j / D|``. Roundings
have signs of their own, so what is seen is ``u sqrt(sum_d (ct_d o_d)^2)`` in place of ``E``. The
key's gradient, a sum over all tokens, is off by neither: when all sources are read, ``sum_j p_j
<ct, v_j> - <ct, o>`` is known, and what it did is taken back.

The width is a constant of the kernels that hold a token: it is seldom a power of two, as their
tiles are, and what lies past it takes no register.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.attn_res.triton.few_sources import attn_res_backward_whole
from k31fn.kernels.attn_res.triton.sources import (
    add_pairs,
    alike,
    build,
    named,
    odd_shapes,
    padded,
    pick,
    staged,
)
from k31fn.kernels.attn_res.triton.weight_gradients import (
    attn_res_d_weights,
    build_of_weights,
    of_weights,
)
from k31fn.kernels.attn_res.triton.wide_tokens import (
    attn_res_backward_scores,
    attn_res_backward_sources,
    attn_res_forward_pieces,
)
from k31fn.kernels.launch import Build, Tile, grid, grouped, programs, share, step

__all__ = ["attn_res", "attn_res_accepts", "builds"]

_WIDEST = 16384  # features: wider tokens do not fit into a program's registers
_OF_TILE = 8192  # features for which _TILES has warps and programs per core
_HELD = 4  # sources of _OF_TILE features that a program of the backward holds, where it does

# chosen by measurement on an H200 (benchmarks/attn_res.py --tune); on Ascend by its memory.
# per device kind: forward, backward, and, where a program can hold all sources of a token, the
# backward that does. With columns, a token that is wider is read in pieces of so many features.
_TILES = {
    "cuda": (
        Tile(warps=4, per_core=2, stages=4),
        Tile(warps=8, per_core=1, stages=4),
        Tile(warps=8, per_core=1, stages=3),
    ),
    "npu": (Tile(per_core=2, columns=4096), Tile(per_core=2, columns=4096)),
    "cpu": (Tile(), Tile(), Tile()),
}


@triton.jit
def attn_res_forward(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    s8,
    s9,
    s10,
    s11,
    query_ptr,
    norm_ptr,
    out_ptr,
    score_ptr,
    rrms_ptr,
    tokens,
    width: tl.constexpr,
    per_group,
    source_group,
    query_group,
    norm_group,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    first = tl.program_id(0) % per_group
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load((query_ptr + group * query_group) + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    key *= tl.load((norm_ptr + group * norm_group) + columns, mask=inside, other=0.0).to(tl.float32)
    # what is loaded follows from at, what it is used for from token and i: the compiler's pipeline
    # would carry each number that both need through all of its stages, a move for each stage and
    # number
    # one loop over tokens times sources, not two nested ones: only a single loop is pipelined
    largest = -1.0e30  # finite: the first rescaling is exp(-1e30 - s), which is 0 and not NaN
    total = 0.0
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    token = group * 0 + first  # 64 bits
    i = first * 0
    for at in tl.range(0, tl.cdiv(tokens - first, per_group) * N, num_stages=STAGES):
        loads = first * 0 + at % N
        row = group * source_group + (group * 0 + first + (at // N) * per_group) * width
        source = pick(loads, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, N)
        value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
        square, product = tl.reduce((value * value, value * key), 0, add_pairs)
        rrms = 1.0 / tl.sqrt(square / width + eps)
        score = product * rrms
        tl.store(score_ptr + (group * N + i) * tokens + token, score)
        tl.store(rrms_ptr + (group * N + i) * tokens + token, rrms)
        # the first source of a token: exp(-1e30 - now) below clears the sums of the last token
        largest = tl.where(i == 0, -1.0e30, largest)
        now = tl.maximum(largest, score)
        before = tl.exp(largest - now)
        weight = tl.exp(score - now)
        total = total * before + weight
        mixed = mixed * before + value * weight
        largest = now
        i += 1
        if i == N:
            out = (mixed * (1.0 / total)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (group * tokens + token) * width + columns, out, mask=inside)
            token += per_group
            i = first * 0


@triton.jit
def attn_res_backward(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    s8,
    s9,
    s10,
    s11,
    d0,
    d1,
    d2,
    d3,
    d4,
    d5,
    d6,
    d7,
    d8,
    d9,
    d10,
    d11,
    query_ptr,
    norm_ptr,
    score_ptr,
    rrms_ptr,
    out_ptr,
    ct_ptr,
    d_key_ptr,
    tokens,
    width: tl.constexpr,
    per_group,
    source_group,
    query_group,
    norm_group,
    stat_group,
    out_group,
    ct_group,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = (tl.program_id(0) // per_group).to(tl.int64)
    first = tl.program_id(0) % per_group
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.arange(0, PADDED)
    key = tl.load((query_ptr + group * query_group) + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    key *= tl.load((norm_ptr + group * norm_group) + columns, mask=inside, other=0.0).to(tl.float32)
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    along = tl.zeros((BLOCK,), dtype=tl.float32)
    ct = tl.zeros((BLOCK,), dtype=ct_ptr.dtype.element_ty)
    mean = 0.0
    excess = 0.0
    scores = tl.zeros((PADDED,), dtype=tl.float32)
    rrms = tl.zeros((PADDED,), dtype=tl.float32)
    probs = tl.zeros((PADDED,), dtype=tl.float32)
    token = group * 0 + first  # 64 bits
    i = first * 0 - 2
    # per token: the cotangent (-2), the result (-1), and the sources 0 .. N - 1
    for at in tl.range(0, tl.cdiv(tokens - first, per_group) * (N + 2), num_stages=STAGES):
        loads = first * 0 + at % (N + 2) - 2
        source = pick(loads, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, N)
        source = tl.where(loads == -1, out_ptr, tl.where(loads == -2, ct_ptr, source))
        row = group * tl.where(loads == -2, ct_group, tl.where(loads < 0, out_group, source_group))
        row += (group * 0 + first + (at // (N + 2)) * per_group) * width
        loaded = tl.load(source + row + columns, mask=inside, other=0.0)
        if i == -2:
            ct = loaded
            along = tl.zeros((BLOCK,), dtype=tl.float32)
            stats = (group * stat_group + token) + numbers * tokens
            scores = tl.load(score_ptr + stats, mask=numbers < N, other=-1.0e30)
            rrms = tl.load(rrms_ptr + stats, mask=numbers < N, other=0.0)
        else:
            value = loaded.to(tl.float32)
            product = tl.sum(ct.to(tl.float32) * value, axis=0)
            if i < 0:  # <ct, out> = sum_j p_j <ct, v_j>, before the sources are read
                mean = product
                excess = -product
                probs = tl.exp(scores - tl.max(scores, axis=0))
                probs = probs / tl.sum(probs, axis=0)
            else:
                this = numbers == i  # the i-th number of a vector, by a masked sum
                of_ct = tl.sum(tl.where(this, probs, 0.0), axis=0)
                of_value = of_ct * tl.sum(tl.where(this, rrms, 0.0), axis=0)
                of_key = of_value * (product - mean)
                along += of_value * value
                excess += of_ct * product
                of_value = of_key * tl.sum(tl.where(this, scores * rrms, 0.0), axis=0) / width
                d_key += of_key * value
                d_source = pick(i, d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, N)
                y = of_ct * ct.to(tl.float32) + of_key * key - of_value * value
                written = (group * tokens + token) * width
                tl.store(d_source + written + columns, y.to(d_source.dtype.element_ty), mask=inside)
        i += 1
        if i == N:
            # what the rounding of the result did to <ct, out> is known now, and taken back
            d_key -= excess * along
            token += per_group
            i = first * 0 - 2
    tl.store(d_key_ptr + tl.program_id(0).to(tl.int64) * width + columns, d_key, mask=inside)


def attn_res_accepts(
    sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float
) -> str:
    """Why :func:`attn_res` cannot run, or nothing."""
    del eps
    if sources and sources[0].shape[-1] > _WIDEST:
        return f"a token is held whole: at most {_WIDEST} features, got {sources[0].shape[-1]}"
    return odd_shapes(sources, (query, norm_weight))


def attn_res(sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The op; scores, softmax and sums in float32."""
    flat = tuple(s.flatten(0, 1)[None] for s in sources)
    return _mix(flat, query[None], norm_weight[None], eps).view(sources[0].shape)


def _mix_fwd(
    sources: tuple[Tensor, ...], query: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, tuple[object, ...]]:
    out, *stats = grouped(functools.partial(_launch_forward, eps), *sources, query, norm)
    # the result is a residual only where the backward reads it: a tensor [B T D] less to keep
    result = () if _holds(sources) else (out,)
    return out, (sources, query, norm, *stats, *result)


def _mix_bwd(
    eps: float, residuals: tuple[Any, ...], ct: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    del eps  # it is in rrms
    sources, *rest = residuals
    launch = _launch_backward_whole if _holds(sources) else _launch_backward
    *d_sources, d_query, d_norm = grouped(launch, *sources, *rest, ct)
    return tuple(d_sources), d_query, d_norm


_mix = custom_vjp(_mix_fwd, _mix_bwd, nondiff_argnums=(3,), opaque=True, name="attn_res (triton)")


def _holds(sources: Sequence[Tensor]) -> bool:
    """Whether a program of the backward holds all sources of a token."""
    few = len(sources) <= _HELD and sources[0].shape[-1] <= _OF_TILE
    return few and len(_TILES[sources[0].device.type]) > 2


def _groups(operands: Sequence[Tensor]) -> int:
    """Samples under ``vmap``; an operand that they share has a group of 1."""
    return max(x.shape[0] for x in operands)


def _key(query: Tensor, norm: Tensor) -> Tensor:
    return query.to(torch.float32) * norm.to(torch.float32)


def _launch_forward(eps: float, *operands: Tensor) -> tuple[Tensor, ...]:
    *given, query, norm = operands
    groups = _groups(operands)
    _, tokens, width = given[0].shape
    n = len(given)
    sources = alike(given)
    tile = _TILES[query.device.type][0]
    out = sources[0].new_empty((groups, tokens, width))
    scores = query.new_empty((groups, n, tokens), dtype=torch.float32)
    rrms = torch.empty_like(scores)
    # a program that holds a token makes the key itself, which saves a launch; in pieces it would
    # make it twice for each token
    weights = (_key(query, norm),) if tile.columns else (query.contiguous(), norm.contiguous())
    per_core, cut = _cut(tile, n, width, out.itemsize, beside=1)
    per_group = programs(query.device, groups, tokens, per_core)
    kernel = attn_res_forward_pieces if tile.columns else attn_res_forward
    kernel[(groups * per_group,)](
        *padded(sources),
        *weights,
        out,
        scores,
        rrms,
        tokens,
        width,
        per_group,
        *map(step, (sources[0], *weights)),
        eps,
        **named(kernel, cut),
    )
    return out, scores, rrms


def _launch_backward_whole(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, query, norm, scores, rrms, ct = operands
    groups = _groups(operands)
    _, tokens, width = given[0].shape
    n = len(given)
    sources = alike(given)
    query, norm, scores, rrms, ct = map(Tensor.contiguous, (query, norm, scores, rrms, ct))
    d_sources = [s.new_empty((groups, tokens, width)) for s in sources]
    per_core, cut = _held(_TILES[query.device.type][2], n, width, ct.itemsize)
    per_group = programs(query.device, groups, tokens, per_core)
    d_key = scores.new_empty((groups, per_group, width))
    attn_res_backward_whole[(groups * per_group,)](
        *padded(sources),
        *padded(d_sources),
        query,
        norm,
        scores,
        rrms,
        ct,
        d_key,
        tokens,
        width,
        per_group,
        *map(step, (sources[0], query, norm, scores, ct)),
        **cut,
    )
    return *d_sources, *of_weights(query.device.type, attn_res_d_weights, d_key, query, norm)


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, query, norm, scores, rrms, out, ct = operands
    groups = _groups(operands)
    _, tokens, width = given[0].shape
    n = len(given)
    sources = alike(given)
    tile = _TILES[query.device.type][1]
    query, norm, scores, rrms, out, ct = map(Tensor.contiguous, operands[n:])
    d_sources = [s.new_empty((groups, tokens, width)) for s in sources]
    weights = (_key(query, norm),) if tile.columns else (query, norm)
    pointers = (*padded(sources), *padded(d_sources), *weights, scores, rrms)
    steps = tuple(map(step, (sources[0], *weights, scores)))
    per_core, cut = _cut(tile, n, width, ct.itemsize, beside=0)
    per_group = programs(query.device, groups, tokens, per_core)
    if not tile.columns:
        d_key = scores.new_empty((groups, per_group, width))
        attn_res_backward[(groups * per_group,)](
            *pointers, out, ct, d_key, tokens, width, per_group, *steps, step(out), step(ct), **cut
        )
        return *d_sources, *of_weights(query.device.type, attn_res_d_weights, d_key, query, norm)
    d_scores = scores.new_empty((groups, n, tokens))
    attn_res_backward_scores[(groups * per_group,)](
        *padded(sources),
        scores,
        ct,
        d_scores,
        tokens,
        width,
        per_group,
        steps[0],
        steps[-1],
        step(ct),
        **cut,
    )
    # the tokens are split as often as fills the device beside the pieces of the features
    pieces = triton.cdiv(width, tile.columns)
    splits = share(query.device, groups * pieces, tokens, tile.per_core)
    d_key = scores.new_empty((groups, splits, width))
    attn_res_backward_sources[grid(groups * splits * pieces, groups)](
        *pointers, d_scores, ct, d_key, tokens, width, splits, pieces, *steps, step(ct), **cut
    )
    return *d_sources, *of_weights(query.device.type, attn_res_d_weights, d_key, query, norm)


def _held(tile: Tile, n: int, width: int, itemsize: int) -> tuple[int, dict[str, int]]:
    """Programs per core, and what the kernel that holds a token is compiled with.

    The tile is that of the largest token. A thread has the features of the sources, and of four
    rows besides.
    """
    block = triton.next_power_of_2(width)
    rows = triton.next_power_of_2(n)
    # of the largest token's registers: narrower tokens have more programs and fewer warps each
    registers = (triton.next_power_of_2(_HELD) + 4) * _OF_TILE
    share = registers // triton.next_power_of_2((rows + 4) * block)
    per_core = tile.per_core * min(8, share)
    stages = staged(tile.stages, per_core, (rows + 1) * block * itemsize)
    warps = max(1, tile.warps // share)
    return per_core, {"N": n, "PADDED": rows, "BLOCK": block, "STAGES": stages, "num_warps": warps}


def _cut(
    tile: Tile, n: int, width: int, itemsize: int, *, beside: int
) -> tuple[int, dict[str, int]]:
    """Programs per core, and what the kernels of ``n`` sources are compiled with.

    Where a token is held whole, the tile is that of 8192 features; shared memory has the sources on
    their way, but for so many ``beside``: the forward's last stage, none of the backward's.
    """
    if tile.columns:
        return tile.per_core, {"N": n, "PADDED": triton.next_power_of_2(n), "BLOCK": tile.columns}
    block = triton.next_power_of_2(width)
    per_core = tile.per_core * max(1, min(8, _OF_TILE // block))
    warps = max(1, min(16, tile.warps * block // _OF_TILE))
    stages = staged(tile.stages, per_core, block * itemsize, beside=beside)
    constants = {"N": n, "PADDED": triton.next_power_of_2(n), "BLOCK": block, "STAGES": stages}
    return per_core, {**constants, "num_warps": warps}


def builds(kind: str) -> list[Build]:
    """Kernels to compile on a kind of device: for K3.1 (hidden size 7168, up to 9 sources), and the
    widest tokens.
    """
    one, other, *held = _TILES[kind]
    in_pieces = bool(one.columns)
    forward = attn_res_forward_pieces if in_pieces else attn_res_forward
    backward = [attn_res_backward]
    if in_pieces:
        backward = [attn_res_backward_scores, attn_res_backward_sources]
    shapes = [("bf16", 2, 9, 7168), ("fp32", 4, 2, 7168)]
    if not in_pieces:
        shapes.append(("fp32", 4, 2, _WIDEST))
    listed = []
    for dtype, itemsize, n, width in shapes:
        at = f"{dtype} N{n} D{width}"
        fixed = {} if in_pieces else {"width": width}
        cut = fixed | _cut(one, n, width, itemsize, beside=1)[1]
        listed.append(build(forward, at, cut, "forward", one))
        cut = fixed | _cut(other, n, width, itemsize, beside=0)[1]
        for kernel in backward:
            listed.append(build(kernel, at, cut, "backward", other))
        for tile in held if width <= _OF_TILE else ():
            few = min(n, _HELD)
            at = f"{dtype} N{few} D{width}"
            cut = fixed | _held(tile, few, width, itemsize)[1]
            listed.append(build(attn_res_backward_whole, at, cut, "backward", tile))
    return [*listed, build_of_weights(kind, "fp32 D7168", 132)]
