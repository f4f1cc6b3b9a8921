"""Gated MLA and Gated DSA as the conformance suite sees them.

A check that pins no values sees through stop_gradient, so Gated DSA is two cases: its output as a
function of everything, and its indexer's loss as a function of the indexer's parameters, with the
trunk that teaches it held fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from k31fn import params, random
from k31fn.layers import dsa, indexer, mla
from k31fn.segments import Segments
from tests.conformance.case import Case

B, T, D = 2, 5, 6
MLA = mla.Config(
    D,
    num_heads=2,
    q_lora_rank=4,
    kv_lora_rank=3,
    qk_nope_head_dim=2,
    qk_rope_head_dim=2,
    v_head_dim=3,
    init_std=0.5,
)
INDEXER = indexer.Config(D, q_lora_rank=4, num_heads=2, head_dim=3, init_std=0.5)
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _dsa(stage: Literal["dense_warmup", "sparse"]) -> dsa.Config:
    return dsa.Config(MLA, INDEXER, topk=2, stage=stage)


def _tokens(key: Tensor, dtype: torch.dtype, length: int = T) -> Tensor:
    return random.normal(random.fold_in(key, 1), (B, length, D)).to(dtype)


def _mla(key: Tensor, dtype: torch.dtype) -> Made:
    def f(p: mla.Params[Tensor], x: Tensor, *, segments: Segments | None = None) -> Tensor:
        return mla.apply(p, x, MLA, segments=segments).y

    return f, (params.init(mla.specs(MLA), key, dtype=dtype), _tokens(key, dtype))


def _output(stage: Literal["dense_warmup", "sparse"]) -> Callable[[Tensor, torch.dtype], Made]:
    def make(key: Tensor, dtype: torch.dtype) -> Made:
        cfg = _dsa(stage)

        def f(p: dsa.Params[Tensor], x: Tensor, *, segments: Segments | None = None) -> Tensor:
            return dsa.apply(p, x, cfg, segments=segments).y

        return f, (params.init(dsa.specs(cfg), key, dtype=dtype), _tokens(key, dtype))

    return make


def _kl(stage: Literal["dense_warmup", "sparse"]) -> Callable[[Tensor, torch.dtype], Made]:
    def make(key: Tensor, dtype: torch.dtype) -> Made:
        cfg = _dsa(stage)
        whole, x = params.init(dsa.specs(cfg), key, dtype=dtype), _tokens(key, dtype)

        def f(p: indexer.Params[Tensor], *, segments: Segments | None = None) -> Tensor:
            return dsa.apply(dsa.Params(whole.attn, p), x, cfg, segments=segments).aux.kl

        return f, (whole.indexer,)

    return make


def _extend(key: Tensor, dtype: torch.dtype) -> Made:
    cfg = _dsa("sparse")

    def f(p: dsa.Params[Tensor], x: Tensor) -> Tensor:
        y, state = dsa.extend(p, x[:, :3], cfg, dsa.init_state(cfg, B, dtype=dtype))
        return torch.cat([y, dsa.extend(p, x[:, 3:], cfg, state)[0]], dim=1)

    return f, (params.init(dsa.specs(cfg), key, dtype=dtype), _tokens(key, dtype))


CASES = [
    Case("mla", _mla),
    Case("dsa_sparse_output", _output("sparse")),
    Case("dsa_sparse_kl", _kl("sparse")),
    Case("dsa_warmup_output", _output("dense_warmup")),
    Case("dsa_warmup_kl", _kl("dense_warmup")),
    Case("dsa_extend", _extend, packed=False),
]
