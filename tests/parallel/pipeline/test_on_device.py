"""Pipelines on GPUs: ranks as threads that share one, and NCCL where there are two."""

from __future__ import annotations

import pytest
import torch

from k31fn import tree
from k31fn.testing import assert_close_trees, spawn_ranks
from tests.parallel.pipeline import toy

pytestmark = pytest.mark.cuda

CASES = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]


@pytest.mark.parametrize(("kind", "chunks"), CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_threads_on_one_gpu_give_the_cpu_s_results(ranks, kind, chunks):
    batches = [b.cuda() for b in toy.micro_batches(4)]
    results, _ = toy.on_threads(ranks, kind, batches, chunks)
    got = tree.map(lambda x: x.cpu(), toy.together(results))
    assert_close_trees(got, toy.expected(toy.micro_batches(4)), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs needed")
def test_nccl_gives_the_cpu_s_results():
    reference = toy.expected(toy.micro_batches(4))
    with spawn_ranks(2, device="cuda") as ranks:
        for kind, chunks in CASES:
            for tensors, info in ranks.run(toy.on_process, 2, kind, chunks, "cuda"):
                expected = [reference[1][a:b] for a, b in info["layers"]]
                assert_close_trees(tensors[1:], tree.leaves(expected), rtol=1e-10, atol=1e-12)
