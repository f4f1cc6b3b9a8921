"""What :mod:`tests.npu.test_backend` runs in a process of its own: k31fn on a device ``npu``,
against the CPU.

Raises on the first difference. ``python -m tests.npu.on_backend FOLDER`` (an empty one for some
text).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from k31fn import config, device, model, params, random, segments, trainer, tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.registry import record_impls, use_impl
from tests import small
from tests.npu import backend
from tests.trainer import runs

NPU = backend.install()
CPU = torch.device("cpu")
# the stand-ins run for these; Triton cannot
ADAPTED = {"rms_norm", "gated_norm", "attention"}
IN_TRITON = dict.fromkeys(("attn_res", "kda", "kda_gated", "kda_gates", "short_conv"), "reference")
REFERENCE = {**dict.fromkeys(ADAPTED, "reference"), **IN_TRITON, "grouped_matmul": "ragged"}


def devices() -> None:
    """k31fn.device finds and uses it."""
    one = device.parse("npu:1")
    assert device.default().type == one.type == "npu"
    assert one.index == 1
    with pytest.raises(ValueError, match=r"not on this machine \(2 of kind 'npu'\)"):
        device.parse("npu:2")
    before = device.memory_allocated(one)
    device.reset_peak_memory(one)
    kept = torch.zeros(1 << 20, dtype=torch.uint8, device=one)
    assert device.memory_allocated(one) == before + kept.nbytes
    torch.ones(1 << 21, dtype=torch.uint8, device=one)
    assert device.memory_allocated(one) == before + kept.nbytes
    assert device.peak_memory(one) >= before + kept.nbytes + (1 << 21)
    device.synchronize(one)
    assert NPU.npu.synchronized == 1
    assert device.num_cores(one) == 24
    assert device.peak_rates(one) is None


def equal(found: Any, expected: Any, where: torch.device, tolerance: float = 0.0) -> None:
    """Bit for bit, or within the tolerance of the largest element; and every tensor on the
    device.
    """
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.device.type == where.type, (a.device, a.shape)
            a, b = a.cpu().double(), b.double()
            worst = float((a - b).abs().max()) if a.numel() else 0.0
            assert worst <= tolerance * float(b.abs().max() if b.numel() else 0), (worst, a.shape)


def gradient(where: torch.device, dtype: torch.dtype, **impls: str) -> tuple[Any, Counter[Any]]:
    """Initial weights, a sum over the hidden states, and its gradient, of a model with KDA and
    Gated MLA.
    """
    attention = small.config().sublayers["full_attention"].attn
    cfg = small.config(full_attention=attention, num_layers=2, full_attention_layers=(1,))
    with use_impl(**impls), record_impls() as ran:
        weights = params.init(model.specs(cfg), random.key(0, device=where), dtype=dtype)
        tokens = small.tokens(2, 9).to(where)
        packed = segments.from_lengths([[5, 3], [9]], 9, device=where)
        balance = model.init_balance(cfg, device=where)

        def loss(weights: Any) -> torch.Tensor:
            out = model.apply(weights, tokens, cfg, balance=balance, segments=packed, remat="layer")
            along = torch.linspace(-1, 1, out.hidden.numel(), device=where).view(out.hidden.shape)
            return (out.hidden.to(torch.float32) * along).sum()

        value, grads = value_and_grad(loss)(weights)
    return (weights, value, grads), ran


def step(recipe: config.Recipe, rows: Any, where: torch.device) -> tuple[Any, Any, Any]:
    """A state, the one after a step, and its metrics, all by references."""
    with use_impl(**REFERENCE):
        state = trainer.init_state(trainer.lay_out(recipe), where)
        before = tree.map(torch.clone, state)
        return before, *trainer.make_step(trainer.lay_out(recipe))(
            state, trainer.make_batches(recipe, rows, where), 0.02
        )


def main(folder: Path) -> None:
    """All of it."""
    devices()
    npu = torch.device("npu", 0)
    expected, _ = gradient(CPU, torch.float32)
    found, ran = gradient(npu, torch.float32, **REFERENCE)
    equal(found, expected, npu)
    assert {name for _, name in ran} == {"reference", "ragged"}
    found, ran = gradient(npu, torch.float32, **IN_TRITON)
    equal(
        found, expected, npu, 1e-4
    )  # flash attention and norms in another order of sums, through two layers
    assert {op for op, name in ran if name == "npu"} == ADAPTED
    found, ran = gradient(npu, torch.bfloat16, **IN_TRITON)
    assert {op for op, name in ran if name == "npu"} == {*ADAPTED, "grouped_matmul"}
    assert all(bool(g.cpu().isfinite().all()) for g in tree.leaves(found))

    recipe = runs.recipe(
        runs.write_text(folder),
        optimizer=config.Optimizer(kind="adamw", peak_lr=0.02, warmup_steps=0),
    )
    rows = trainer.load_corpus(recipe).dataset.batch_at(0)
    (first, after, metrics), (_, expected, numbers) = (
        step(recipe, rows, npu),
        step(recipe, rows, CPU),
    )
    equal(metrics, numbers, npu)
    equal(after, expected, npu, 1e-6)  # the CPU has a kernel that fuses AdamW
    pairs = zip(tree.leaves(first.params), tree.leaves(after.params), strict=True)
    moved = [not torch.equal(a, b) for a, b in pairs]
    assert sum(moved) > 0.9 * len(moved)
    print("equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
