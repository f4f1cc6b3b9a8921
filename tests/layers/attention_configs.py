"""Small configs, parameters and packings for the tests of Gated MLA and Gated DSA."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.layers import dsa, indexer, mla

MLA = mla.Config(
    hidden_size=10,
    num_heads=2,
    q_lora_rank=7,
    kv_lora_rank=6,
    qk_nope_head_dim=4,
    qk_rope_head_dim=3,
    v_head_dim=5,
    init_std=0.4,
)
INDEXER = indexer.Config(hidden_size=10, q_lora_rank=7, num_heads=3, head_dim=4, init_std=0.4)


def dsa_config(topk: int, stage: Literal["dense_warmup", "sparse"] = "sparse") -> dsa.Config:
    return dsa.Config(MLA, INDEXER, topk=topk, stage=stage)


def drawn(specs: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Parameters of which none is special: norm weights and biases are random too."""
    key = random.key(seed)
    values = params.init(specs, key, dtype=dtype)
    index = iter(range(10**6))

    def shake(p: Tensor) -> Tensor:
        return p + 0.2 * random.normal(random.fold_in(key, next(index)), p.shape).to(p.dtype)

    return tree.map(shake, values)


def tokens(batch: int, length: int, dtype: torch.dtype = torch.float64, width: int = 10) -> Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64).to(dtype)


def projected(p: mla.Params[Tensor], x: Tensor, cfg: mla.Config) -> tuple[Tensor, mla.Heads]:
    """The query latent, and what the attention takes, of one document per row on one device."""
    cq, kv = mla.latents(p, x, cfg)
    return cq, mla.project(p, cq, kv, cfg)[0]


def pieces(rows: list[list[int]]) -> list[tuple[int, slice]]:
    """``(row, tokens)`` of each document."""
    found: list[tuple[int, slice]] = []
    for row, lengths in enumerate(rows):
        end = 0
        for n in lengths:
            found.append((row, slice(end, end + n)))
            end += n
    return found


def random_rows(batch: int, length: int) -> list[list[int]]:
    """Documents of random lengths; about half of the rows end in padding."""
    rows: list[list[int]] = []
    for _ in range(batch):
        cuts = sorted({int(c) for c in torch.randint(1, length, (3,))} | {length})
        lengths = [b - a for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
        rows.append(lengths if len(lengths) == 1 or torch.rand(()) < 0.5 else lengths[:-1])
    return rows
