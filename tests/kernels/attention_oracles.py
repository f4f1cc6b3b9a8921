"""Attention, index scores, choices and KL one query at a time: slow, obvious, and without any mask
arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def seen_keys(rows: list[list[int]], length: int) -> list[list[list[int]]]:
    """Per row and query, the keys it may attend to, from the lengths of the row's documents."""
    seen: list[list[list[int]]] = []
    for lengths in rows:
        row: list[list[int]] = []
        for n in lengths:
            first = len(row)
            row += [list(range(first, first + i + 1)) for i in range(n)]
        seen.append(row + [[] for _ in range(length - len(row))])
    return seen


def bounds(seen: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """``(start, stop)`` of contiguous sets of keys; (0, 0) for an empty one."""
    start = [[keys[0] if keys else 0 for keys in row] for row in seen]
    stop = [[keys[-1] + 1 if keys else 0 for keys in row] for row in seen]
    return torch.tensor(start), torch.tensor(stop)


def attention(
    q: Tensor, k: Tensor, k_shared: Tensor, v: Tensor, seen: list[list[list[int]]], scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[B T H V]``, and probabilities ``[B T H S]``, zero where unseen."""
    B, T, H, _ = q.shape
    out, probs = q.new_zeros(B, T, H, v.shape[-1]), q.new_zeros(B, T, H, k.shape[1])
    for b in range(B):
        for t in range(T):
            for h in range(H):
                if keys := seen[b][t]:
                    full = [torch.cat([k[b, s, h], k_shared[b, s]]) for s in keys]
                    weights = torch.stack(
                        [(scale * (q[b, t, h] * key).sum()).exp() for key in full]
                    )
                    weights = weights / weights.sum()
                    probs[b, t, h, keys] = weights
                    out[b, t, h] = sum(
                        (p * v[b, s, h] for p, s in zip(weights, keys, strict=True)),
                        torch.zeros(()),
                    )
    return out, probs


def index_scores(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    """``sum_j w relu(scale <q, k>)`` of every pair, ``[B T S]``."""
    pairs = scale * torch.einsum("btji,bsi->btjs", q, k)
    return torch.einsum("btj,btjs->bts", w, torch.maximum(pairs, torch.zeros_like(pairs)))


def choose(scores: Tensor, seen: list[list[list[int]]], topk: int) -> list[list[list[int]]]:
    """The best seen keys of each query by Python's sort, lowest position first among equals;
    ascending positions.
    """
    return [
        [
            sorted(sorted(keys, key=lambda s: (-float(scores[b, t, s]), s))[:topk])
            for t, keys in enumerate(row)
        ]
        for b, row in enumerate(seen)
    ]


def kl(probs: Tensor, scores: Tensor, chosen: list[list[list[int]]]) -> float:
    """``sum_t KL(p_t || softmax(I_t))`` over the chosen keys, p the mean over heads of ``probs [B T
    H S]``.
    """
    total = 0.0
    for b, row in enumerate(chosen):
        for t, keys in enumerate(row):
            if keys:
                p = [float(probs[b, t, :, s].mean()) for s in keys]
                log_sum = math.log(sum(math.exp(float(scores[b, t, s])) for s in keys))
                pairs = zip(p, keys, strict=True)
                total += sum(
                    a * (math.log(a) - float(scores[b, t, s]) + log_sum) for a, s in pairs if a > 0
                )
    return total


def as_sets(topk_idx: Tensor) -> list[list[list[int]]]:
    """Chosen keys of each query in ascending order, without -1; a key chosen twice is an error."""
    sets = [[sorted(s for s in row if s >= 0) for row in batch] for batch in topk_idx.tolist()]
    assert all(len(set(s)) == len(s) for batch in sets for s in batch)
    return sets


def as_slots(sets: list[list[list[int]]], num: int) -> Tensor:
    """``topk_idx [B T num]`` from sets: a -1 first, to show that slots of -1 may lie anywhere."""
    return torch.tensor([[([-1] * (num - len(s)) + s) for s in row] for row in sets])
