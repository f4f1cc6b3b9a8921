# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
"""The teacher of the indexer: a gathered tile of scores of all heads, and their probabilities'
sum.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from k31fn.autodiff.custom_vjp import detached
from k31fn.kernels.latent_attention.triton.scores import latent_head_probs
from k31fn.kernels.latent_attention.triton.strips import (
    HEADS,
    TILES,
    accepts,
    fold,
    options,
    sizes_of,
    strips,
)
from k31fn.kernels.launch import Build, grouped, looping_grid

__all__ = ["accepts", "builds", "latent_probs"]


def latent_probs(q: Tensor, kv: Tensor, lse: Tensor, topk_idx: Tensor, scale: float) -> Tensor:
    """The op; contract in :mod:`k31fn.kernels.latent_attention`."""

    def launch(*operands: Tensor) -> tuple[Tensor, ...]:
        return (_launch_probs(scale, *operands),)

    parts = []
    q, kv, topk_idx, lse = detached((q, kv, topk_idx, lse))
    for some, statistics in zip(q.split(HEADS, dim=2), lse.split(HEADS, dim=2), strict=True):
        operands = (x[None] for x in (some, kv, topk_idx, statistics))
        parts.append(grouped(launch, *operands)[0].squeeze(0))
    return functools.reduce(torch.add, parts)


def _launch_probs(scale: float, *operands: Tensor) -> Tensor:
    slots = operands[2].shape[-1]
    groups, tiles, (q, kv, sets, lse) = fold(*operands)
    out = torch.zeros_like(sets, dtype=torch.float32)
    tile = tiles.scores
    for strip, _, (lse_strip, out_strip) in strips(q, kv, sets, lse, out):
        pieces = strip.pieces(tile)
        latent_head_probs[looping_grid(pieces)](
            *strip,
            lse_strip,
            out_strip,
            sets.shape[2],
            pieces,
            scale,
            **strip.sizes(tile),
            **options(tile),
        )
    return out[..., :slots].unflatten(0, (groups, -1))


def builds(kind: str) -> list[Build]:
    """What is compiled for 96 heads over latents of 512 + 64 dims on a kind of device."""
    types = {"slots": "i32", "pieces": "i32", "scale": "fp32", "topk_ptr": "*i32"}
    types |= dict.fromkeys(("lse_ptr", "out_ptr"), "*fp32")
    found = []
    for dtype, itemsize in (("bf16", 2),) if kind == "cuda" else (("bf16", 2), ("fp32", 4)):
        tile = TILES[kind, itemsize].scores
        known = types | dict.fromkeys(("q_ptr", "kv_ptr"), f"*{dtype}")
        signature = {n: known[n] for n in latent_head_probs.arg_names if n in known}
        constants = {**sizes_of(96, 576, tile), "WIDE": False}
        name = f"latent_head_probs {dtype}"
        found.append(Build(name, latent_head_probs, signature, constants, "forward", tile))
    return found
