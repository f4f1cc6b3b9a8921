# pyright: reportMissingImports=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""The residual attention in one pass over the sources: norm, score, online softmax and mix of a token in one program.

The backward keeps the scores and the reciprocal norms (two numbers per token and source). It reads the sources once
for ``<ct, v_i>`` and, from the cache where the device has one, again for the gradients. The gradient of the key is
summed over a program's tokens in registers and over programs in a fixed order: no atomics, the same bits in every run.
First order only.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from k31fn.autodiff import custom_vjp
from k31fn.kernels.launch import Build, Tile, grouped, programs, step

__all__ = ["MOST_SOURCES", "attn_res", "attn_res_accepts", "builds"]

MOST_SOURCES = 12
_WIDEST = 16384
_ALIGNED = ("width", "source_group", "key_group", "ct_group")

# per device kind: (forward, backward). With columns, a token that is wider is read in pieces of so many features.
_TILES = {
    "cuda": (Tile(warps=16, per_core=2), Tile(warps=16, per_core=1)),
    "npu": (Tile(per_core=2, columns=4096), Tile(per_core=2, columns=4096)),
    "cpu": (Tile(), Tile()),
}


@triton.jit
def _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, I: tl.constexpr):
    if I == 0:
        x = tl.load(s0 + row + columns, mask=inside, other=0.0)
    if I == 1:
        x = tl.load(s1 + row + columns, mask=inside, other=0.0)
    if I == 2:
        x = tl.load(s2 + row + columns, mask=inside, other=0.0)
    if I == 3:
        x = tl.load(s3 + row + columns, mask=inside, other=0.0)
    if I == 4:
        x = tl.load(s4 + row + columns, mask=inside, other=0.0)
    if I == 5:
        x = tl.load(s5 + row + columns, mask=inside, other=0.0)
    if I == 6:
        x = tl.load(s6 + row + columns, mask=inside, other=0.0)
    if I == 7:
        x = tl.load(s7 + row + columns, mask=inside, other=0.0)
    if I == 8:
        x = tl.load(s8 + row + columns, mask=inside, other=0.0)
    if I == 9:
        x = tl.load(s9 + row + columns, mask=inside, other=0.0)
    if I == 10:
        x = tl.load(s10 + row + columns, mask=inside, other=0.0)
    if I == 11:
        x = tl.load(s11 + row + columns, mask=inside, other=0.0)
    return x


@triton.jit
def attn_res_forward(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    key_ptr, out_ptr, score_ptr, rrms_ptr,
    tokens, width, per_group, source_group, key_group, eps,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        row = group * source_group + token * width
        largest = -1.0e30
        total = 0.0
        mixed = tl.zeros((BLOCK,), dtype=tl.float32)
        ahead = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, 0)
        for i in tl.static_range(N):
            value = ahead.to(tl.float32)
            if i + 1 < N:  # on its way while this one is reduced
                ahead = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i + 1)
            rrms = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
            score = tl.sum(value * key, axis=0) * rrms
            tl.store(score_ptr + (group * N + i) * tokens + token, score)
            tl.store(rrms_ptr + (group * N + i) * tokens + token, rrms)
            now = tl.maximum(largest, score)
            before = tl.exp(largest - now)
            weight = tl.exp(score - now)
            total = total * before + weight
            mixed = mixed * before + value * weight
            largest = now
        out = (mixed / total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (group * tokens + token) * width + columns, out, mask=inside)


@triton.jit
def attn_res_backward(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11,
    key_ptr, score_ptr, rrms_ptr, ct_ptr, d_key_ptr,
    tokens, width, per_group, source_group, key_group, stat_group, ct_group,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.arange(0, PADDED)
    key = tl.load((key_ptr + group * key_group) + columns, mask=inside, other=0.0)
    d_key = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(tl.program_id(0) % per_group, tokens, per_group):
        token = group * 0 + t  # 64 bits
        row = group * source_group + token * width
        written = (group * tokens + token) * width
        ct = tl.load(ct_ptr + (group * ct_group + token * width) + columns, mask=inside, other=0.0).to(tl.float32)
        stats = (group * stat_group + token) + numbers * tokens
        scores = tl.load(score_ptr + stats, mask=numbers < N, other=-1.0e30)
        rrms = tl.load(rrms_ptr + stats, mask=numbers < N, other=0.0)
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        d_probs = tl.zeros((PADDED,), dtype=tl.float32)
        for i in tl.static_range(N):
            value = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i).to(tl.float32)
            d_probs = tl.where(numbers == i, tl.sum(ct * value, axis=0), d_probs)
        d_scores = probs * (d_probs - tl.sum(probs * d_probs, axis=0))
        along_key = d_scores * rrms
        along_value = d_scores * scores * rrms * rrms / width
        for i in tl.static_range(N):
            value = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i).to(tl.float32)
            of_ct = tl.sum(tl.where(numbers == i, probs, 0.0), axis=0)
            of_key = tl.sum(tl.where(numbers == i, along_key, 0.0), axis=0)
            of_value = tl.sum(tl.where(numbers == i, along_value, 0.0), axis=0)
            d_key += of_key * value
            _store(
                d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11,
                written, columns, inside, of_ct * ct + of_key * key - of_value * value, i,
            )  # fmt: skip
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
                value = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i).to(
                    tl.float32
                )
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
                value = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i).to(
                    tl.float32
                )
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
                value = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i).to(
                    tl.float32
                )
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
            value = _source(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, row, columns, inside, i).to(tl.float32)
            of_ct = tl.sum(tl.where(numbers == i, probs, 0.0), axis=0)
            of_key = tl.sum(tl.where(numbers == i, along_key, 0.0), axis=0)
            of_value = tl.sum(tl.where(numbers == i, along_value, 0.0), axis=0)
            d_key += of_key * value
            _store(
                d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11,
                written, columns, inside, of_ct * ct + of_key * key - of_value * value, i,
            )  # fmt: skip
    tl.store(d_key_ptr + (group * splits + split) * width + columns, d_key, mask=inside)


@triton.jit
def _store(d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, row, columns, inside, x, I: tl.constexpr):
    y = x.to(d0.dtype.element_ty)
    if I == 0:
        tl.store(d0 + row + columns, y, mask=inside)
    if I == 1:
        tl.store(d1 + row + columns, y, mask=inside)
    if I == 2:
        tl.store(d2 + row + columns, y, mask=inside)
    if I == 3:
        tl.store(d3 + row + columns, y, mask=inside)
    if I == 4:
        tl.store(d4 + row + columns, y, mask=inside)
    if I == 5:
        tl.store(d5 + row + columns, y, mask=inside)
    if I == 6:
        tl.store(d6 + row + columns, y, mask=inside)
    if I == 7:
        tl.store(d7 + row + columns, y, mask=inside)
    if I == 8:
        tl.store(d8 + row + columns, y, mask=inside)
    if I == 9:
        tl.store(d9 + row + columns, y, mask=inside)
    if I == 10:
        tl.store(d10 + row + columns, y, mask=inside)
    if I == 11:
        tl.store(d11 + row + columns, y, mask=inside)


def attn_res_accepts(sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float) -> str:
    """Why :func:`attn_res` cannot run, or nothing."""
    del query, norm_weight, eps
    if not 1 <= len(sources) <= MOST_SOURCES:
        return f"it mixes 1 to {MOST_SOURCES} sources, got {len(sources)}"
    if len({s.dtype for s in sources}) > 1:
        return f"the sources have one dtype, got {sorted({str(s.dtype) for s in sources})}"
    if sources[0].shape[-1] > _WIDEST:
        return f"a token is held whole: at most {_WIDEST} features, got {sources[0].shape[-1]}"
    return ""


def attn_res(sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The op; scores, softmax and sums in float32."""
    key = (query.to(torch.float32) * norm_weight.to(torch.float32))[None]
    out = _mix(tuple(s.flatten(0, 1)[None] for s in sources), key, eps)
    return out.view(sources[0].shape)


def _mix_fwd(sources: tuple[Tensor, ...], key: Tensor, eps: float) -> tuple[Tensor, tuple[object, ...]]:
    out, scores, rrms = grouped(functools.partial(_launch_forward, eps), *sources, key)
    return out, (sources, key, scores, rrms)


def _mix_bwd(
    eps: float, residuals: tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor], ct: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    del eps  # it is in rrms
    sources, key, scores, rrms = residuals
    *d_sources, d_key = grouped(_launch_backward, *sources, key, scores, rrms, ct)
    return tuple(d_sources), d_key


_mix = custom_vjp(_mix_fwd, nondiff_argnums=(2,), opaque=True, name="attn_res (triton)").defvjp(_mix_fwd, _mix_bwd)


def _launch_forward(eps: float, *operands: Tensor) -> tuple[Tensor, ...]:
    *given, key = operands
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), given[0].shape
    sources, key = _alike(given), key.contiguous()
    n, tile = len(sources), _TILES[key.device.type][0]
    out = key.new_empty((groups, tokens, width), dtype=sources[0].dtype)
    scores, rrms = (key.new_empty((groups, n, tokens)) for _ in range(2))
    per_group = programs(key.device, groups, tokens, tile.per_core)
    arguments = (*_padded(sources), key, out, scores, rrms, tokens, width, per_group, step(sources[0]), step(key), eps)
    if tile.columns and width > tile.columns:
        attn_res_forward_pieces[(groups * per_group,)](*arguments, N=n, PADDED=_power(n), BLOCK=tile.columns)
    else:
        attn_res_forward[(groups * per_group,)](*arguments, N=n, BLOCK=_power(width), num_warps=tile.warps)
    return out, scores, rrms


def _launch_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    *given, key, scores, rrms, ct = operands
    groups, (_, tokens, width) = max(x.shape[0] for x in operands), given[0].shape
    sources, key, scores, rrms, ct = _alike(given), *(x.contiguous() for x in (key, scores, rrms, ct))
    n, tile = len(sources), _TILES[key.device.type][1]
    d_sources = [s.new_empty((groups, tokens, width)) for s in sources]
    per_group = programs(key.device, groups, tokens, tile.per_core)
    pointers = (*_padded(sources), *_padded(d_sources), key, scores, rrms)
    steps = (step(sources[0]), step(key), step(scores), step(ct))
    if not tile.columns or width <= tile.columns:
        d_key = key.new_empty((groups, per_group, width))
        attn_res_backward[(groups * per_group,)](
            *pointers, ct, d_key, tokens, width, per_group, *steps,
            N=n, PADDED=_power(n), BLOCK=_power(width), num_warps=tile.warps,
        )  # fmt: skip
        return *d_sources, d_key.sum(1)
    cut = {"N": n, "PADDED": _power(n), "BLOCK": tile.columns}
    d_scores = key.new_empty((groups, n, tokens))
    attn_res_backward_scores[(groups * per_group,)](
        *_padded(sources), scores, ct, d_scores, tokens, width, per_group, steps[0], *steps[2:], **cut
    )
    pieces = triton.cdiv(width, tile.columns)
    splits = programs(key.device, groups * pieces, tokens, tile.per_core)
    d_key = key.new_empty((groups, splits, width))
    attn_res_backward_sources[(groups * splits * pieces,)](
        *pointers, d_scores, ct, d_key, tokens, width, splits, pieces, *steps, **cut
    )
    return *d_sources, d_key.sum(1)


def _alike(sources: list[Tensor]) -> list[Tensor]:
    """Contiguous, and all per group if one is."""
    groups = max(s.shape[0] for s in sources)
    return [s.expand(groups, -1, -1).contiguous() for s in sources]


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """As many pointers as the kernel has; those past the sources are not read."""
    return tensors + [tensors[0]] * (MOST_SOURCES - len(tensors))


def _power(n: int) -> int:
    return triton.next_power_of_2(n)


def builds(kind: str) -> list[Build]:
    """What is compiled for the shapes of K3.1 (hidden size 7168, up to 9 sources) on a kind of device."""
    one, other = _TILES[kind]
    found = []
    for dtype, n in (("bf16", 9), ("fp32", 2)):
        at = f"{dtype} N{n} D7168"
        sources, gradients = ({f"{c}{i}": f"*{dtype}" for i in range(MOST_SOURCES)} for c in "sd")
        key, stats, ct = {"key_ptr": "*fp32"}, {"score_ptr": "*fp32", "rrms_ptr": "*fp32"}, {"ct_ptr": f"*{dtype}"}
        forward = {**sources, **key, "out_ptr": f"*{dtype}", **stats}
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
            cut = {"N": n, "BLOCK": _power(7168)}
            backward = {**sources, **gradients, **key, **stats, **ct, **d_key}
            backward |= _integers("tokens width per_group") | steps
            found.append(Build(f"attn_res_forward {at}", attn_res_forward, forward, cut, "forward", one, _ALIGNED))
            cut = cut | {"PADDED": _power(n)}
            found.append(
                Build(f"attn_res_backward {at}", attn_res_backward, backward, cut, "backward", other, _ALIGNED)
            )
    return found


def _integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")
