"""Arguments for each op with kernels that take a CPU seconds, and how near the float64 reference
its kernels come.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from k31fn import random
from k31fn.kernels.adamw import Constants
from k31fn.kernels.latent_attention.reference import latent_attention
from k31fn.kernels.philox import Draws
from k31fn.kernels.sparse_attention.reference import sparse_attention

__all__ = ["CASES", "COMPILED_ONLY", "Case"]


class Case(NamedTuple):
    """``args`` of the op, and a tolerance for values and gradients, relative to the largest
    element.
    """

    args: Callable[[], tuple[Any, ...]]
    tolerance: float


def _attn_res() -> tuple[Any, ...]:
    """Wider than a piece of 4096 features, so that there are two."""
    sources = tuple(torch.randn(1, 3, 4500) for _ in range(3))
    return sources, 0.02 * torch.randn(4500), 1 + 0.3 * torch.randn(4500), 1e-5


def _fp8_encode(scaling: str, dtype: torch.dtype, transposed: bool) -> tuple[Any, ...]:
    """Lines that no tile divides, and a row longer than is held."""
    x = torch.randn(384, 256) if scaling == "tiles" else torch.randn(37, 2944)
    x = (x * torch.randn_like(x).exp()).to(dtype)
    return (x.mT.contiguous().mT if transposed else x), scaling


def _kda() -> tuple[Any, ...]:
    """Two documents and padding over three tiles."""
    shape = (1, 40, 1, 32)
    q, k = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    g = -5 * torch.sigmoid(3 * torch.randn(shape))
    ids = torch.tensor([[1] * 19 + [2] * 18 + [0] * 3], dtype=torch.int32)
    state = 0.3 * torch.randn(1, 1, 32, 32)
    return q, k, torch.randn(shape), g, torch.rand(1, 40, 1), ids, state


def _choose_experts() -> tuple[Any, ...]:
    """Ties in every row, some of which are padding."""
    return torch.randint(0, 9, (13, 40)) / 8.0, torch.randn(40), torch.rand(13) < 0.8, 6


def _required_bias_histogram() -> tuple[Any, ...]:
    """More tokens than one product counts."""
    return torch.rand(150, 5), 1 + torch.rand(150), torch.rand(150) < 0.8, torch.randn(5), 100


def _gdn() -> tuple[Any, ...]:
    """Two documents and padding over three tiles; some decays leave nothing."""
    q, k, v, g, beta, ids, state = _kda()
    g = torch.where(torch.rand(1, 40, 1) < 0.1, -1e3, g[..., 0])
    return q, k, v, g, beta, ids, state


def _kda_fragment() -> tuple[Any, ...]:
    """One document and padding over three tiles."""
    _, k, v, g, beta, ids, _ = _kda()
    return k, v, 0.02 * g, 0.2 * beta, (ids > 0).to(ids.dtype)


def _fp8_encode_cases() -> tuple[Case, ...]:
    cases = []
    dtypes = (torch.bfloat16, torch.float32)
    for choice in itertools.product(("rows", "blocks", "tiles"), dtypes, (False, True)):
        # 0: codes are integers, and the kernel rounds as the reference does
        cases.append(Case(functools.partial(_fp8_encode, *choice), 0))
    return tuple(cases)


def _attention() -> tuple[Any, ...]:
    """Two documents over two tiles of queries and of keys."""
    q, k, v = torch.randn(1, 40, 2, 10), torch.randn(1, 40, 2, 7), torch.randn(1, 40, 2, 5)
    index = torch.arange(40)[None]
    start = torch.where(index < 13, 0, 13)
    return q, k, torch.randn(1, 40, 3), v, start, index + 1, 0.4


def _interval_attention() -> tuple[Any, ...]:
    """An image of 7 patches and one of 33."""
    q, k, _, v, *_ = _attention()
    index = torch.arange(40)[None]
    start = torch.where(index < 7, 0, 7)
    return q[..., :7], k, v, start, torch.where(index < 7, 7, 40), 0.4


def _sets() -> torch.Tensor:
    """Up to 6 earlier keys of each query, by position, then -1."""
    found = torch.full((1, 40, 6), -1, dtype=torch.int32)
    for t in range(40):
        own = torch.randperm(t + 1)[:6].sort().values
        found[0, t, : len(own)] = own.int()
    return found


def _sparse_attention() -> tuple[Any, ...]:
    return *_attention()[:4], _sets(), 0.4


def _head_probs() -> tuple[Any, ...]:
    """With the statistics of the reference."""
    q, k, k_shared, v, sets, scale = _sparse_attention()
    lse = sparse_attention(q, k, k_shared, v, sets, scale).lse
    return q, k, k_shared, lse, sets, scale


def _latent_attention() -> tuple[Any, ...]:
    """Dims that no tile divides, of which 6 are no values."""
    return torch.randn(1, 40, 2, 40), torch.randn(1, 40, 40), _sets(), 0.2, 34


def _latent_probs() -> tuple[Any, ...]:
    """With the statistics of the reference."""
    q, kv, sets, scale, rank = _latent_attention()
    return q, kv, latent_attention(q, kv, sets, scale, rank).lse, sets, scale


def _index_topk() -> tuple[Any, ...]:
    """Small integers: sums are exact, and many scores equal."""
    q, k, w = torch.randn(1, 12, 3, 6), torch.randn(1, 12, 6), torch.randn(1, 12, 3)
    stop = torch.arange(1, 13)[None]
    return *(x.round() for x in (q, k, w)), torch.zeros_like(stop), stop, 4, 0.5


def _indexer_kl() -> tuple[Any, ...]:
    q, k, w = torch.randn(1, 40, 3, 10), torch.randn(1, 40, 10), torch.randn(1, 40, 3)
    sets = _sets()
    teacher = torch.where(sets >= 0, torch.rand(1, 40, 6), 0.0)
    return q, k, w, teacher / teacher.sum(-1, keepdim=True), sets, 0.4


def _kda_gates() -> tuple[Any, ...]:
    """Two chunks of tokens, the last one short."""
    shape = (1, 131, 2, 16)
    q, k, z = (torch.randn(shape) for _ in range(3))
    parameters = (torch.randn(2), torch.randn(2, 16))
    return q, k, z, torch.randn(shape[:3]), *parameters, -5.0, 1e-6, 0.25


def _mhc_pre(dtype: torch.dtype) -> tuple[Any, ...]:
    n, width = 4, 300
    phi = torch.randn(n * width, 24) / (n * width) ** 0.5
    return torch.randn(1, 9, n, width).to(dtype), phi, torch.randn(3), torch.randn(24), 1e-6, 20


def _mhc_post() -> tuple[Any, ...]:
    return (
        torch.randn(1, 3, 4, 1100),
        torch.randn(1, 3, 1100),
        torch.randn(1, 3, 4),
        torch.randn(1, 3, 4, 4),
    )


def _routed() -> tuple[torch.Tensor, torch.Tensor]:
    """The order of three copies each of seven tokens, and its inverse."""
    order = torch.randperm(21)
    return order, order.argsort().view(7, 3)


def _dispatch() -> tuple[Any, ...]:
    """More columns than a tile."""
    return torch.randn(7, 2100), *_routed()


def _combine() -> tuple[Any, ...]:
    return torch.randn(21, 2100), torch.rand(7, 3), *_routed()


def _situ_glu() -> tuple[Any, ...]:
    """More columns than a tile; values at which both bounds count."""
    return 3 * torch.randn(2, 3, 2100), 20 * torch.randn(2, 3, 2100), 4.0, 25.0


def _rms_norm() -> tuple[Any, ...]:
    """Two chunks of rows, the last one short."""
    return torch.randn(2, 9, 300), torch.randn(300), 1e-5


def _gated_norm() -> tuple[Any, ...]:
    """More rows than a tile, the last ones outside."""
    return torch.randn(1, 37, 2, 128), torch.randn(1, 37, 2, 128), torch.randn(128), 1e-5


def _head() -> tuple[Any, ...]:
    """Columns of three tiles, the last one short; labels of no column."""
    labels = torch.tensor([0, 4999, -100, 2048, 5003])
    return torch.randn(5, 16), torch.randn(16, 5000) / 4, labels


def _short_conv(history: bool) -> tuple[Any, ...]:
    """Three documents and padding; inputs of unlike widths, that no tile divides."""
    ids = torch.tensor([[1] * 5 + [2] + [3] * 9 + [0] * 2])
    widths = (70, 9, 130)
    inputs = tuple(torch.randn(1, 17, channels) for channels in widths)
    weights = tuple(torch.randn(channels, 4) for channels in widths)
    histories = tuple(torch.randn(1, 3, channels) for channels in widths) if history else ()
    return inputs, weights, ids, histories


def _draws(shape: tuple[int, ...], starts: tuple[int, ...]) -> Draws:
    return Draws(random.key(7), shape, starts)


def _adamw() -> tuple[Any, ...]:
    """A third step, clipped."""
    p, g, mu = (torch.randn(9, 45) for _ in range(3))
    scalars = (torch.tensor(3.0), torch.tensor(0.02))
    constants = Constants(0.9, 0.95, 1e-8, 0.1)
    return p, g, mu, mu.abs(), *scalars, constants, torch.tensor(0.5), torch.tensor(False)


COMPILED_ONLY = frozenset({"adamw_rounded", "stochastic_round_blocks"})
"""Kernels whose IR, lowered for the CPU, ends in a segmentation fault of unknown cause."""

# float32 sums of thousands of products: some sqrt(5000) units of 2^-24 for each of two factors;
# bfloat16 results: 2^-9
CASES = {
    "adamw_step": (Case(_adamw, 2e-6),),  # float32 alone: see COMPILED_ONLY
    "random_bits": (Case(lambda: (_draws((20, 70), (4, 7)), (9, 45)), 0),),
    "stochastic_round": (),
    "choose_experts": (Case(_choose_experts, 0),),
    "required_bias_histogram": (Case(_required_bias_histogram, 0),),
    "attention": (Case(_attention, 2e-5),),
    "interval_attention": (Case(_interval_attention, 2e-5),),
    "sparse_attention": (Case(_sparse_attention, 2e-5),),
    "head_probs": (Case(_head_probs, 2e-5),),
    "latent_attention": (Case(_latent_attention, 2e-5),),
    "latent_probs": (Case(_latent_probs, 2e-5),),
    "index_topk": (Case(_index_topk, 0),),
    "indexer_kl": (Case(_indexer_kl, 2e-5),),
    "attn_res": (Case(_attn_res, 2e-5),),
    "fp8_encode": _fp8_encode_cases(),
    "kda": (Case(_kda, 2e-5),),
    "gdn": (Case(_gdn, 2e-5),),
    "kda_fragment": (Case(_kda_fragment, 2e-5),),
    "kda_gates": (Case(_kda_gates, 2e-5),),
    "dispatch": (Case(_dispatch, 2e-5),),
    "combine": (Case(_combine, 2e-5),),
    "situ_glu": (Case(_situ_glu, 2e-5),),
    "rms_norm": (Case(_rms_norm, 2e-5),),
    "gated_norm": (Case(_gated_norm, 2e-5),),
    "head_cross_entropy": (Case(_head, 2e-5),),
    "short_conv": tuple(
        Case(functools.partial(_short_conv, history), 2e-5) for history in (False, True)
    ),
    "mhc_post": (Case(_mhc_post, 2e-5),),
    "mhc_pre": (
        Case(lambda: _mhc_pre(torch.float32), 3e-5),
        Case(lambda: _mhc_pre(torch.bfloat16), 2**-7),
    ),
}
