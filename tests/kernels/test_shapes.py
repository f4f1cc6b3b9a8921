"""Operators that only make shapes: those of their references, with gradients for the same
arguments.
"""

import pytest
import torch

from k31fn import tree
from k31fn.autodiff import record_decisions, vjp
from k31fn.kernels.experts import grouped_matmul
from k31fn.kernels.indexer_kl import indexer_kl
from k31fn.kernels.kda import kda
from k31fn.kernels.shapes import shapes_only
from k31fn.kernels.sparse_attention import sparse_attention

B, T, H, K, M = 2, 200, 3, 8, 5


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


IDS, SET = meta(B, T, dtype=torch.int64), meta(B, T, M, dtype=torch.int32)
CALLS = {
    "kda": (kda, [meta(B, T, H, K) for _ in range(4)] + [meta(B, T, H), IDS], {}),
    "sparse_attention": (
        sparse_attention,
        [meta(B, T, H, K + 2), meta(B, T, H, K), meta(B, T, 2), meta(B, T, H, K), SET, 0.3],
        {},
    ),
    "indexer_kl": (
        indexer_kl,
        [
            meta(B, T, H, K),
            meta(B, T, K),
            meta(B, T, H),
            meta(B, T, M, dtype=torch.float32),
            SET,
            0.3,
        ],
        {},
    ),
    "grouped_matmul": (grouped_matmul, [meta(T, K), meta(4, K, 6), meta(4, dtype=torch.int64)], {}),
}


def results(op, args, kwargs):
    """Shapes and dtypes of the results, and which floating arguments a gradient comes to."""
    leaves = [
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in args
    ]
    out = op(*leaves, **kwargs)
    described = [(tuple(x.shape), x.dtype, x.requires_grad) for x in tree.leaves(out)]
    ends = [x for x in tree.leaves(out) if x.requires_grad]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    grads = torch.autograd.grad(
        ends, wanted, [torch.empty_like(x) for x in ends], allow_unused=True
    )
    return described, [None if g is None else (tuple(g.shape), g.dtype) for g in grads]


@pytest.mark.parametrize("name", CALLS)
def test_as_the_reference_says(name):
    op, args, kwargs = CALLS[name]
    expected = results(op, args, kwargs)
    with shapes_only():
        assert results(op, args, kwargs) == expected
        assert results(op, args, kwargs) == expected  # from what is known now


def test_the_reference_runs_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        grouped_matmul, "reference", lambda x, w, sizes: calls.append(0) or meta(T, 6)
    )
    op, args, _ = CALLS["grouped_matmul"]
    with shapes_only():
        for _ in range(3):
            op(*args)
        op(meta(T + 1, K), *args[1:])  # another kind of arguments
    assert len(calls) == 2
    op(*args)  # and outside it always runs
    assert len(calls) == 3


def test_an_enclosing_remat_records_nothing_of_it():
    """What a replay would not do again."""
    op, args, kwargs = CALLS["sparse_attention"]
    with shapes_only(), record_decisions() as made:
        vjp(lambda q: op(q, *args[1:], **kwargs).out, args[0])
    assert made == []
