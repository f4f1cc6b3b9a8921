# pyright: reportMissingImports=false
"""``attention`` by CANN's flash attention and its gradient operator, all documents in one call.
First order only.

The operator takes packed sequences (layout ``TND``) of queries and of their keys, as the tokens
where each ends, on the host: the bounds are read there once per call, and the device is waited for.
A sequence is a run of queries of one document, whose last one sees all its keys: a document, the
part of one in a slice of the context, or the next tokens in decoding. A run of padding goes along
as one more; its output and cotangent are set to zero. The shared dims of the keys are copied to
each head, and the result is rounded to the dtype of ``q`` before it is widened.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch_npu
from torch import Tensor

from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.precision import upcast

__all__ = ["attention", "attention_accepts", "pack", "packed_attention"]

# limits of the operator's layout TND, from CANN's documentation
_MOST_HEADS = 256
_WIDEST_HEAD = 768
_MOST_SEQUENCES = 1024
_COMPRESSED = 2048  # side of the triangle that stands for a causal mask of any size
_CAUSAL = 3  # sparse_mode: the diagonal ends in the lower right corner of each sequence


def attention_accepts(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> str:
    """Why :func:`attention` cannot run, or nothing."""
    del start, stop, scale
    if q.shape[1] > k.shape[1]:
        return (
            f"it takes queries that are among the keys, got {q.shape[1]} queries and {k.shape[1]} "
            "keys"
        )
    dtypes = {x.dtype for x in (q, k, k_shared, v)}
    if len(dtypes) > 1:
        return f"it takes one dtype, got {', '.join(sorted(map(str, dtypes)))}"
    if q.shape[2] > _MOST_HEADS or q.shape[3] > _WIDEST_HEAD:
        return f"at most {_MOST_HEADS} heads of {_WIDEST_HEAD}, got {q.shape[2]} of {q.shape[3]}"
    if v.shape[3] > q.shape[3]:
        return f"values may not be wider than keys, got {v.shape[3]} and {q.shape[3]}"
    return "" if q.numel() else "the operator takes no empty tensor"


def attention(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> Tensor:
    """Causal attention inside documents; contract in :mod:`k31fn.kernels.attention`.

    Raises:
        ValueError: more than 1024 runs of queries that see ever one key more.
    """
    return packed_attention(
        q, k, k_shared, v, start, stop, scale, pack(start, stop, k.shape[1], causal=True)
    )


class _Packing(NamedTuple):
    """Sequences of all rows, one after the other.

    Attributes:
        query_ends: one past the last query of each.
        key_ends: one past its last key.
        keys: the keys of all in this order; () if that is all keys in theirs.
        causal: whether a query sees one key more than the one before it; else all of a sequence see
            the same.
    """

    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    keys: Tensor | tuple[()]
    causal: bool


def pack(start: Tensor, stop: Tensor, num_keys: int, *, causal: bool) -> _Packing:
    """The runs of queries that see the same keys (or ever one more), with these keys; padding, with
    as many keys.

    Raises:
        ValueError: as of :func:`attention`.
    """
    # one copy for both: each would wait for the device
    start, stop = torch.stack([start, stop]).cpu().to(torch.int64)
    padding = start >= stop
    begins = torch.ones_like(padding)
    goes_on = (start[:, 1:] == start[:, :-1]) & (stop[:, 1:] == stop[:, :-1] + causal)
    # the bounds of padding mean nothing: it goes on as long as it is padding
    begins[:, 1:] = torch.where(
        padding[:, 1:] | padding[:, :-1], padding[:, 1:] != padding[:, :-1], ~goes_on
    )
    first = begins.flatten().nonzero().flatten()
    ends = torch.cat([first[1:], first.new_tensor([begins.numel()])])
    if len(ends) > _MOST_SEQUENCES:
        raise ValueError(
            f"attention (npu): {len(ends)} documents or images in a batch, at most "
            f"{_MOST_SEQUENCES}; use fewer rows, or use_impl with 'reference'"
        )
    empty = padding.flatten()[first]
    opens = torch.where(empty, num_keys - (ends - first), start.flatten()[first])
    closes = torch.where(empty, num_keys, stop.flatten()[ends - 1])
    row = first // start.shape[1] * num_keys
    ranges = list(map(torch.arange, (row + opens).tolist(), (row + closes).tolist()))
    keys = torch.cat(ranges)
    # in training all keys are used in their own order: then nothing needs to be gathered
    whole = torch.equal(keys, torch.arange(start.shape[0] * num_keys))
    key_ends = tuple(itertools.accumulate(map(len, ranges)))
    return _Packing(tuple(ends.tolist()), key_ends, () if whole else keys, causal)


def _packed(q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, packing: _Packing) -> list[Tensor]:
    shared = k_shared[:, :, None].expand(-1, -1, k.shape[2], -1)
    queries = q.flatten(0, 1).contiguous()
    keys = torch.cat([k, shared], -1).flatten(0, 1).contiguous()
    values = v.flatten(0, 1).contiguous()
    if isinstance(packing.keys, Tensor):
        index = packing.keys.to(keys.device)
        keys = keys.index_select(0, index)
        values = values.index_select(0, index)
    return [queries, keys, values]


def _unpacked(x: Tensor, like: Tensor, packing: _Packing) -> Tensor:
    """The gradient of what was packed, ``[B S Hk *]``: keys that are in no sequence have zero."""
    if isinstance(packing.keys, Tensor):
        zeros = x.new_zeros((like.shape[0] * like.shape[1], *x.shape[1:]))
        # added: the keys of a document in two slices of the context are in two sequences
        x = zeros.index_add(0, packing.keys.to(x.device), x)
    return x.view(*like.shape[:3], -1)


def _options(like: Tensor, packing: _Packing) -> dict[str, Any]:
    ends = {"actual_seq_qlen": packing.query_ends, "actual_seq_kvlen": packing.key_ends}
    if not packing.causal:
        return ends
    hidden = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=like.device).triu(1)
    return {"atten_mask": hidden, "sparse_mode": _CAUSAL, **ends}


def _fwd(*args: Any) -> tuple[Tensor, Any]:
    q, k, k_shared, v, start, stop, scale, packing = args
    packed = _packed(q, k, k_shared, v, packing)
    out, largest, total, *_ = torch_npu.npu_fusion_attention(
        *packed, q.shape[2], "TND", scale=scale, **_options(q, packing)
    )
    # padding went along as a sequence of its own, whose output is a number but not 0
    has_keys = (start < stop)[..., None, None]
    result = torch.where(has_keys, upcast(out).view(*q.shape[:3], -1), 0.0)
    return result, (q, k, k_shared, v, start, stop, out, largest, total)


def _bwd(scale: float, packing: _Packing, residuals: Any, ct: Tensor) -> tuple[Any, ...]:
    q, k, k_shared, v, start, stop, out, largest, total = residuals
    d_out = torch.where((start < stop)[..., None, None], ct, 0.0).to(q.dtype).flatten(0, 1)
    d_q, d_keys, d_v, *_ = torch_npu.npu_fusion_attention_grad(
        *_packed(q, k, k_shared, v, packing),
        d_out,
        q.shape[2],
        "TND",
        softmax_max=largest,
        softmax_sum=total,
        attention_in=out,
        scale_value=scale,
        **_options(q, packing),
    )
    d_k, d_shared = _unpacked(d_keys, k, packing).split((k.shape[3], k_shared.shape[2]), -1)
    # over the heads in float32, and rounded once
    d_shared = upcast(d_shared).sum(2).to(k_shared.dtype)
    return d_q.view(q.shape), d_k, d_shared, _unpacked(d_v, v, packing), None, None


packed_attention = custom_vjp(
    _fwd, _bwd, nondiff_argnums=(6, 7), opaque=True, name="attention (npu)"
)
