# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
"""The residual attention in one pass over the sources: norm, score, online softmax and mix of a token in one program.

The backward keeps the scores and the reciprocal norms (two numbers per token and source), the result, and for bfloat16
what was rounded off it: ``sum_j p_j <ct, v_j> = <ct, out>`` is known before the sources are read, and one pass gives
all gradients. Where a token does not fit (Ascend), two kernels read the sources twice and need no result. The gradient
of the key is summed over a program's tokens in registers and over programs in a fixed order: no atomics, the same bits
in every run. First order only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn import _functorch
from k31fn.autodiff import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["MOST_SOURCES", "attn_res", "attn_res_accepts", "builds"]

MOST_SOURCES = 12
_WIDEST = 16384
_OF_TILE = 8192  # features for which _TILES has warps and programs per core
_SHARED = 200 * 2**10  # bytes of shared memory of a core for sources on their way
_ALIGNED = ("width", "source_group", "key_group", "out_group", "ct_group")

# per device kind: (forward, backward). With columns, a token that is wider is read in pieces of so many features.
_TILES = {
    "cuda": (Tile(warps=4, per_core=2, stages=4), Tile(warps=8, per_core=1, stages=4)),
    "npu": (Tile(per_core=2, columns=4096), Tile(per_core=2, columns=4096)),
    "cpu": (Tile(), Tile()),
}


@triton.jit
def _at(I: tl.constexpr, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11):
    """The pointer of number I, known when compiled: no branch is left."""
    if I == 0:
        p = p0
    if I == 1:
        p = p1
    if I == 2:
        p = p2
    if I == 3:
        p = p3
    if I == 4:
        p = p4
    if I == 5:
        p = p5
    if I == 6:
        p = p6
    if I == 7:
        p = p7
    if I == 8:
        p = p8
    if I == 9:
        p = p9
    if I == 10:
        p = p10
    if I == 11:
        p = p11
    return p


@triton.jit
def _pick(i, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, N: tl.constexpr):
    """The pointer of number i; 0 to N - 1 are told apart."""
    p = p0
    if N > 1:
        p = tl.where(i == 1, p1, p)
    if N > 2:
        p = tl.where(i == 2, p2, p)
    if N > 3:
        p = tl.where(i == 3, p3, p)
    if N > 4:
        p = tl.where(i == 4, p4, p)
    if N > 5:
        p = tl.where(i == 5, p5, p)
    if N > 6:
        p = tl.where(i == 6, p6, p)
    if N > 7:
        p = tl.where(i == 7, p7, p)
    if N > 8:
        p = tl.where(i == 8, p8, p)
    if N > 9:
        p = tl.where(i == 9, p9, p)
    if N > 10:
        p = tl.where(i == 10, p10, p)
    if N > 11:
        p = tl.where(i == 11, p11, p)
    return p


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def attn_res_forward(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    key_ptr, out_ptr, low_ptr, score_ptr, rrms_ptr,
    tokens, width, per_group, source_group, key_group, eps,
    N: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    first = tl.program_id(0) % per_group
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
    # what is loaded follows from at, what it is used for from token and i: the compiler's pipeline would carry each
    # number that both need through all of its stages, a move for each stage and number
    largest = -1.0e30
    total = 0.0
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    token = group * 0 + first  # 64 bits
    i = first * 0
    for at in tl.range(0, tl.cdiv(tokens - first, per_group) * N, num_stages=STAGES):
        loads = first * 0 + at % N
        row = group * source_group + (group * 0 + first + (at // N) * per_group) * width
        source = _pick(loads, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, N)
        value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
        square, product = tl.reduce((value * value, value * key), 0, _add)
        rrms = 1.0 / tl.sqrt(square / width + eps)
        score = product * rrms
        tl.store(score_ptr + (group * N + i) * tokens + token, score)
        tl.store(rrms_ptr + (group * N + i) * tokens + token, rrms)
        largest = tl.where(i == 0, -1.0e30, largest)
        now = tl.maximum(largest, score)
        before = tl.exp(largest - now)
        weight = tl.exp(score - now)
        total = total * before + weight
        mixed = mixed * before + value * weight
        largest = now
        i += 1
        if i == N:
            mixed = mixed * (1.0 / total)
            out = mixed.to(out_ptr.dtype.element_ty)
            written = (group * tokens + token) * width + columns
            tl.store(out_ptr + written, out, mask=inside)
            if LOW:
                tl.store(low_ptr + written, (mixed - out.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)
            token += per_group
            i = first * 0


@triton.jit
def attn_res_backward(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11,
    key_ptr, score_ptr, rrms_ptr, out_ptr, low_ptr, ct_ptr, d_key_ptr,
    tokens, width, per_group, source_group, key_group, stat_group, out_group, ct_group,
    N: tl.constexpr, PADDED: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HEAD: tl.constexpr = 3 if LOW else 2
    group = (tl.program_id(0) // per_group).to(tl.int64)
    first = tl.program_id(0) % per_group
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.arange(0, PADDED)
    key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    ct = tl.zeros((BLOCK,), dtype=ct_ptr.dtype.element_ty)
    mean = 0.0
    scores = tl.zeros((PADDED,), dtype=tl.float32)
    rrms = tl.zeros((PADDED,), dtype=tl.float32)
    probs = tl.zeros((PADDED,), dtype=tl.float32)
    token = group * 0 + first  # 64 bits
    i = first * 0 - HEAD
    # per token: the cotangent, the result (with LOW, what was rounded off it first), and the sources 0 .. N - 1
    for at in tl.range(0, tl.cdiv(tokens - first, per_group) * (N + HEAD), num_stages=STAGES):
        loads = first * 0 + at % (N + HEAD) - HEAD
        source = _pick(loads, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, N)
        source = tl.where(loads == -1, out_ptr, tl.where(loads == -HEAD, ct_ptr, source))
        if LOW:
            source = tl.where(loads == -2, low_ptr, source)
        row = group * tl.where(loads == -HEAD, ct_group, tl.where(loads < 0, out_group, source_group))
        row += (group * 0 + first + (at // (N + HEAD)) * per_group) * width
        loaded = tl.load(source + row + columns, mask=inside, other=0.0)
        if i == -HEAD:
            ct = loaded
            mean = 0.0
            stats = (group * stat_group + token) + numbers * tokens
            scores = tl.load(score_ptr + stats, mask=numbers < N, other=-1.0e30)
            rrms = tl.load(rrms_ptr + stats, mask=numbers < N, other=0.0)
        else:
            value = loaded.to(tl.float32)
            product = tl.sum(ct.to(tl.float32) * value, axis=0)
            if i < 0:  # <ct, out> = sum_j p_j <ct, v_j>, before the sources are read
                mean += product
                probs = tl.exp(scores - tl.max(scores, axis=0))
                probs = probs / tl.sum(probs, axis=0)
            else:
                this = numbers == i
                of_ct = tl.sum(tl.where(this, probs, 0.0), axis=0)
                of_key = of_ct * (product - mean) * tl.sum(tl.where(this, rrms, 0.0), axis=0)
                of_value = of_key * tl.sum(tl.where(this, scores * rrms, 0.0), axis=0) / width
                d_key += of_key * value
                d_source = _pick(i, d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, N)
                y = of_ct * ct.to(tl.float32) + of_key * key - of_value * value
                written = (group * tokens + token) * width
                tl.store(d_source + written + columns, y.to(d_source.dtype.element_ty), mask=inside)
        i += 1
        if i == N:
            token += per_group
            i = first * 0 - HEAD
    tl.store(d_key_ptr + tl.program_id(0).to(tl.int64) * width + columns, d_key, mask=inside)


@triton.jit
def attn_res_forward_pieces(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    key_ptr, out_ptr, score_ptr, rrms_ptr,
    tokens, width, per_group, source_group, key_group, eps,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        squares = tl.zeros((PADDED,), dtype=tl.float32)
        products = tl.zeros((PADDED,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            row = group * source_group + token * width
            key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
            for i in tl.static_range(N):
                source = _at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
                value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
                squares = tl.where(numbers == i, squares + tl.sum(value * value, axis=0), squares)
                products = tl.where(numbers == i, products + tl.sum(value * key, axis=0), products)
        rrms = 1.0 / tl.sqrt(squares / width + eps)
        scores = products * rrms
        stats = (group * N + numbers) * tokens + token
        tl.store(score_ptr + stats, scores, mask=numbers < N)
        tl.store(rrms_ptr + stats, rrms, mask=numbers < N)
        scores = tl.where(numbers < N, scores, -1.0e30)
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            row = group * source_group + token * width
            mixed = tl.zeros((BLOCK,), dtype=tl.float32)
            for i in tl.static_range(N):
                source = _at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
                value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
                mixed += value * tl.sum(tl.where(numbers == i, probs, 0.0), axis=0)
            out = mixed.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (group * tokens + token) * width + columns, out, mask=inside)


@triton.jit
def attn_res_backward_scores(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    score_ptr, ct_ptr, d_score_ptr,
    tokens, width, per_group, source_group, stat_group, ct_group,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        d_probs = tl.zeros((PADDED,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            row = group * source_group + token * width
            ct = tl.load(ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0).to(tl.float32)
            for i in tl.static_range(N):
                source = _at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
                value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
                d_probs = tl.where(numbers == i, d_probs + tl.sum(ct * value, axis=0), d_probs)
        scores = tl.load(score_ptr + group * stat_group + numbers * tokens + token, mask=numbers < N, other=-1.0e30)
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        d_scores = probs * (d_probs - tl.sum(probs * d_probs, axis=0))
        tl.store(d_score_ptr + (group * N + numbers) * tokens + token, d_scores, mask=numbers < N)


@triton.jit
def attn_res_backward_sources(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11,
    key_ptr, score_ptr, rrms_ptr, d_score_ptr, ct_ptr, d_key_ptr,
    tokens, width, splits, pieces, source_group, key_group, stat_group, ct_group,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // (splits * pieces)).to(tl.int64)
    split = (tl.program_id(0) // pieces) % splits
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.arange(0, PADDED)
    key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(split, tokens, splits):
        token = group * 0 + t  # 64 bits
        row = group * source_group + token * width
        written = (group * tokens + token) * width
        ct = tl.load(ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0).to(tl.float32)
        stats = (group * stat_group + token) + numbers * tokens
        scores = tl.load(score_ptr + stats, mask=numbers < N, other=-1.0e30)
        rrms = tl.load(rrms_ptr + stats, mask=numbers < N, other=0.0)
        d_scores = tl.load(d_score_ptr + (group * N + numbers) * tokens + token, mask=numbers < N, other=0.0)
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        along_key = d_scores * rrms
        along_value = d_scores * scores * rrms * rrms / width
        for i in tl.static_range(N):
            source = _at(i, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)
            value = tl.load(source + row + columns, mask=inside, other=0.0).to(tl.float32)
            of_ct = tl.sum(tl.where(numbers == i, probs, 0.0), axis=0)
            of_key = tl.sum(tl.where(numbers == i, along_key, 0.0), axis=0)
            of_value = tl.sum(tl.where(numbers == i, along_value, 0.0), axis=0)
            d_key += of_key * value
            d_source = _at(i, d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11) + written
            y = of_ct * ct + of_key * key - of_value * value
            tl.store(d_source + columns, y.to(d0.dtype.element_ty), mask=inside)
    tl.store(d_key_ptr + (group * splits + split) * width + columns, d_key, mask=inside)


def attn_res_accepts(sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float) -> str:
    """Why :func:`attn_res` cannot run, or nothing."""
    del eps
    if not 1 <= len(sources) <= MOST_SOURCES:
        return f"it mixes 1 to {MOST_SOURCES} sources, got {len(sources)}"
    if len({s.dtype for s in sources}) > 1:
        return f"the sources have one dtype, got {sorted({str(s.dtype) for s in sources})}"
    if sources[0].shape[-1] > _WIDEST:
        return f"a token is held whole: at most {_WIDEST} features, got {sources[0].shape[-1]}"
    if len({s.shape for s in sources}) > 1 or not query.shape == norm_weight.shape == sources[0].shape[-1:]:
        found = ", ".join(str(list(x.shape)) for x in (query, norm_weight, *sources))
        return f"the sources have one shape, and query and norm_weight their width, got {found}"
    return ""


def attn_res(sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The op; scores, softmax and sums in float32."""
    key = (query.to(torch.float32) * norm_weight.to(torch.float32))[None]
    differentiated = torch.is_grad_enabled() and any(map(_functorch.is_tracked, (*sources, query, norm_weight)))
    out = _mix(tuple(s.flatten(0, 1)[None] for s in sources), key, eps, differentiated)
    return out.view(sources[0].shape)


def _mix_fwd(
    sources: tuple[Tensor, ...], key: Tensor, eps: float, differentiated: bool
) -> tuple[Tensor, tuple[object, ...]]:
    out, *rest = grouped(functools.partial(_launch_forward, eps, differentiated), *sources, key)
    return out, (sources, key, out, tuple(rest))


def _mix_bwd(
    eps: float, differentiated: bool, residuals: tuple[Any, ...], ct: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    del eps, differentiated  # eps is in rrms
    sources, key, out, rest = residuals
    *d_sources, d_key = grouped(_launch_backward, *sources, key, out, *rest, ct)
    return tuple(d_sources), d_key


_mix = custom_vjp(_mix_fwd, nondiff_argnums=(2, 3), opaque=True, name="attn_res (triton)").defvjp(_mix_fwd, _mix_bwd)


def _launch_forward(eps: float, differentiated: bool, *operands: Tensor) -> tuple[Tensor, ...]:
    """The result, scores, reciprocal norms, and what was rounded off the result, of no size if nothing needs it."""
    *given, key = operands
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), given[0].shape
    sources, key = _alike(given), key.contiguous()
    n, tile = len(sources), _TILES[key.device.type][0]
    out = key.new_empty((groups, tokens, width), dtype=sources[0].dtype)
    rounded = differentiated and out.itemsize == 2 and not tile.columns
    low = torch.empty_like(out) if rounded else out.new_empty((groups, 0))
    scores, rrms = (key.new_empty((groups, n, tokens)) for _ in range(2))
    sizes, steps = (tokens, width), (step(sources[0]), step(key), eps)
    if tile.columns:
        per_group = programs(key.device, groups, tokens, tile.per_core)
        attn_res_forward_pieces[(groups * per_group,)](
            *_padded(sources), key, out, scores, rrms, *sizes, per_group, *steps,
            N=n, PADDED=_power(n), BLOCK=tile.columns,
        )  # fmt: skip
    else:
        per_core, whole = _whole(tile, width, out.itemsize)
        per_group = programs(key.device, groups, tokens, per_core)
        attn_res_forward[(groups * per_group,)](
            *_padded(sources), key, out, low, scores, rrms, *sizes, per_group, *steps, N=n, LOW=rounded, **whole
        )
    return out, scores, rrms, low


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, key, out, scores, rrms, low, ct = operands
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), given[0].shape
    sources = _alike(given)
    key, out, scores, rrms, low, ct = (x.contiguous() for x in (key, out, scores, rrms, low, ct))
    n, tile = len(sources), _TILES[key.device.type][1]
    d_sources = [s.new_empty((groups, tokens, width)) for s in sources]
    pointers = (*_padded(sources), *_padded(d_sources), key, scores, rrms)
    steps = (step(sources[0]), step(key), step(scores))
    if not tile.columns:
        per_core, whole = _whole(tile, width, ct.itemsize)
        per_group = programs(key.device, groups, tokens, per_core)
        d_key = key.new_empty((groups, per_group, width))
        attn_res_backward[(groups * per_group,)](
            *pointers, out, low, ct, d_key, tokens, width, per_group, *steps, step(out), step(ct),
            N=n, PADDED=_power(n), LOW=low.numel() > 0, **whole,
        )  # fmt: skip
        return *d_sources, d_key.sum(1)
    cut = {"N": n, "PADDED": _power(n), "BLOCK": tile.columns}
    d_scores = key.new_empty((groups, n, tokens))
    per_group = programs(key.device, groups, tokens, tile.per_core)
    attn_res_backward_scores[(groups * per_group,)](
        *_padded(sources), scores, ct, d_scores, tokens, width, per_group, steps[0], steps[2], step(ct), **cut
    )
    pieces = triton.cdiv(width, tile.columns)
    splits = programs(key.device, groups * pieces, tokens, tile.per_core)
    d_key = key.new_empty((groups, splits, width))
    attn_res_backward_sources[(groups * splits * pieces,)](
        *pointers, d_scores, ct, d_key, tokens, width, splits, pieces, *steps, step(ct), **cut
    )
    return *d_sources, d_key.sum(1)


def _whole(tile: Tile, width: int, itemsize: int) -> tuple[int, dict[str, int]]:
    """Programs per core and constants where a token is held whole.

    The tile is that of 8192 features; shared memory has the sources on their way.
    """
    block = _power(width)
    per_core = tile.per_core * max(1, min(8, _OF_TILE // block))
    ring = _SHARED // (per_core * block * itemsize)
    warps = max(1, min(16, tile.warps * block // _OF_TILE))
    return per_core, {"BLOCK": block, "STAGES": max(1, min(tile.stages, 1 + ring)), "num_warps": warps}


def _alike(sources: list[Tensor]) -> list[Tensor]:
    """Contiguous, and all per group if one is."""
    groups = max(s.shape[0] for s in sources)
    same = all(s.shape[0] == groups and s.is_contiguous() for s in sources)
    return sources if same else [s.expand(groups, -1, -1).contiguous() for s in sources]


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """As many pointers as the kernel has; those past the sources are not read."""
    return tensors + [tensors[0]] * (MOST_SOURCES - len(tensors))


def _power(n: int) -> int:
    return triton.next_power_of_2(n)


def builds(kind: str) -> list[Build]:
    """What is compiled for the shapes of K3.1 (hidden size 7168, up to 9 sources) on a kind of device."""
    one, other = _TILES[kind]
    found = []
    for dtype, size, n in (("bf16", 2, 9), ("fp32", 4, 2)):
        at = f"{dtype} N{n} D7168"
        sources, gradients = ({f"{c}{i}": f"*{dtype}" for i in range(MOST_SOURCES)} for c in "sd")
        key, stats, ct = {"key_ptr": "*fp32"}, {"score_ptr": "*fp32", "rrms_ptr": "*fp32"}, {"ct_ptr": f"*{dtype}"}
        forward = {**sources, **key, "out_ptr": f"*{dtype}", **stats}
        low = {"low_ptr": f"*{dtype}"}
        forward |= _integers("tokens width per_group source_group key_group") | {"eps": "fp32"}
        steps = _integers("source_group key_group stat_group ct_group")
        d_key, d_scores = {"d_key_ptr": "*fp32"}, {"d_score_ptr": "*fp32"}
        if one.columns:
            cut = {"N": n, "PADDED": _power(n), "BLOCK": one.columns}
            scores = {**sources, "score_ptr": "*fp32", **ct, **d_scores}
            scores |= _integers("tokens width per_group source_group stat_group ct_group")
            last = {**sources, **gradients, **key, **stats, **d_scores, **ct, **d_key}
            last |= _integers("tokens width splits pieces") | steps
            found += [
                Build(f"attn_res_forward_pieces {at}", attn_res_forward_pieces, forward, cut, "forward", one, _ALIGNED),
                Build(
                    f"attn_res_backward_scores {at}", attn_res_backward_scores, scores, cut, "backward", other, _ALIGNED
                ),
                Build(
                    f"attn_res_backward_sources {at}", attn_res_backward_sources, last, cut, "backward", other, _ALIGNED
                ),
            ]
        else:
            forward |= low
            cut = {"N": n, "LOW": size == 2} | {k: v for k, v in _whole(one, 7168, size)[1].items() if k != "num_warps"}
            backward = {**sources, **gradients, **key, **stats, "out_ptr": f"*{dtype}", **low, **ct, **d_key}
            backward |= _integers("tokens width per_group out_group") | steps
            found.append(Build(f"attn_res_forward {at}", attn_res_forward, forward, cut, "forward", one, _ALIGNED))
            cut = cut | {"PADDED": _power(n), "STAGES": _whole(other, 7168, size)[1]["STAGES"]}
            found += [Build(f"attn_res_backward {at}", attn_res_backward, backward, cut, "backward", other, _ALIGNED)]
    return found


def _integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")
