"""Gathered attention over latents, against the reference in float64.

Tolerances, relative to the largest element: float32 sums of some 50 products, 1e-5. bfloat16: five
numbers on the way to a gradient are rounded to 2^-9 (weights of the output twice, the output,
probabilities or gradients of scores, rows), which the interpreter cuts to 2^-8, all to one side.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import vjp
from k31fn.kernels.latent_attention import latent_attention, latent_probs
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.testing import assert_op_matches, live_bytes
from tests.kernels.fused import DEVICE, poisoned

op = pytest.importorskip("k31fn.kernels.latent_attention.triton.op", exc_type=ImportError)
probs = pytest.importorskip("k31fn.kernels.latent_attention.triton.probs", exc_type=ImportError)
strips = pytest.importorskip("k31fn.kernels.latent_attention.triton.strips", exc_type=ImportError)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5 * 2**-8}
T, H, R, P, SCALE = 12, 3, 20, 6, 0.4


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (1, T, H, R + P), (1, T, R + P)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def chosen(most: int, first: int = 0) -> Tensor:
    """Sets of up to ``most`` keys, of two documents if ``first`` is where the second one begins;
    every eleventh query has none, and nobody has chosen the keys 3 and 4.
    """
    slots = torch.full((1, T, most), -1, dtype=torch.int32)
    for t in range(T):
        own = [s for s in range(first if t >= first else 0, t + 1) if not 3 <= s < 5]
        some = torch.randperm(len(own))[: most if t % 11 != 5 else 0].sort().values
        slots[0, t, : len(some)] = torch.tensor(own, dtype=torch.int32)[some]
    return slots.to(DEVICE)


def same_for_all() -> Tensor:
    """One key chosen by all, and beside it by most the same others."""
    slots = torch.tensor([[0, 1, 2, 4]], dtype=torch.int32).expand(T, 4)
    own = torch.arange(T)[:, None]
    return torch.where(slots <= own, slots, -1)[None].to(DEVICE)


def results(args: list[Tensor], slots: Tensor) -> list[Tensor]:
    """Output, statistics, probabilities, and gradients to queries and keys."""

    def both(*xs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = latent_attention(*xs, slots, SCALE, R)
        return out, lse, latent_probs(*xs, lse, slots, SCALE)

    parts, pull = vjp(both, *args)
    ct = torch.linspace(-1, 1, parts[0].numel(), device=DEVICE).view(parts[0].shape)
    return [*parts, *pull((ct.to(parts[0].dtype), *map(torch.ones_like, parts[1:])))]


def fused(args: list[Tensor], slots: Tensor) -> list[Tensor]:
    chosen_impl = use_impl(latent_attention="triton", latent_probs="triton")
    with chosen_impl, record_impls() as calls, poisoned():
        found = results(args, slots)
    assert calls == {("latent_attention", "triton"): 1, ("latent_probs", "triton"): 1}
    return found


def errors(args: list[Tensor], slots: Tensor) -> list[float]:
    """Of each result, relative to its largest element."""
    exact = results([x.double() for x in args], slots)
    pairs = zip(fused(args, slots), exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


SETS = {"short": lambda: chosen(5), "documents": lambda: chosen(12, 7), "same": same_for_all}


@pytest.mark.parametrize("name", SETS)
def test_equals_the_reference(name: str):
    """Fewer keys than slots, all keys of two documents, and the same few keys for all queries."""
    assert max(errors(inputs(), SETS[name]())) < TOLERANCE[torch.float32]


def test_equals_the_reference_in_bfloat16():
    assert max(errors(inputs(torch.bfloat16), chosen(5))) < TOLERANCE[torch.bfloat16]


def test_in_strips_and_with_more_heads_than_a_program_holds(monkeypatch: pytest.MonkeyPatch):
    """Strips of one query; heads in two parts."""
    monkeypatch.setattr(strips, "_STRIP", 1)
    for module in (op, probs):
        monkeypatch.setattr(module, "HEADS", 2)
    assert max(errors(inputs(), chosen(5))) < 1e-5


def test_no_query_has_a_key():
    out, lse, of_keys, *grads = fused(inputs(), torch.full((1, T, 3), -1, device=DEVICE))
    assert torch.equal(lse, torch.full_like(lse, 1e30))
    assert not any(x.any() for x in (out, of_keys, *grads))


def test_large_scores_stay_finite():
    args = inputs()
    args[0] *= 1000
    slots = chosen(5)
    exact = results([x.double() for x in args], slots)
    ours = fused(args, slots)
    assert all(x.isfinite().all() for x in ours)
    # of scores of 10^4 float32 has 2^-24; nearly all gradients vanish
    torch.testing.assert_close(ours[:2], [x.float() for x in exact[:2]], rtol=1e-5, atol=1e-3)


def test_a_repeated_position_is_refused_as_nan():
    """For that query alone; and so is one that does not ascend."""
    args, slots = inputs(), chosen(5)
    slots[0, 8, 1] = slots[0, 8, 0]
    slots[0, 11] = slots[0, 11].flip(0)
    with use_impl(latent_attention="triton", latent_probs="triton"):
        out, lse = latent_attention(*args, slots, SCALE, R)
        of_keys = latent_probs(*args, lse, slots, SCALE)
    wrong = torch.zeros(T, dtype=torch.bool, device=DEVICE)
    wrong[[8, 11]] = True
    for x in (out, lse, of_keys):
        assert x[0, wrong].flatten(1).isnan().all()
        assert x[0, ~wrong].isfinite().all()


def test_under_vmap():
    q, kv = inputs()
    args = (q[:, :8], kv, chosen(5)[:, :8], SCALE, R)
    assert_op_matches(
        latent_attention, "triton", args, rtol=1e-5, atol=1e-5, reference_dtype=torch.float64
    )


def test_a_row_that_a_key_does_not_get_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The last one of each key: of some five."""
    right = torch.searchsorted

    def shorter(*args: Any) -> Tensor:
        starts = right(*args)
        starts[1:] = (starts[1:] - 1).clamp(min=int(starts[0]))
        return starts

    monkeypatch.setattr(torch, "searchsorted", shorter)
    assert max(errors(inputs(), chosen(5))) > 1e-2


def test_memory_is_that_of_a_strip(monkeypatch: pytest.MonkeyPatch):
    """Beside inputs and results: of a strip of 4 queries 2 H + K numbers a slot and its place in
    the order, and the keys' gradients. No tensor has a row for each query and slot.
    """
    slots, width = 32, R + P
    monkeypatch.setattr(strips, "_STRIP", 4 * slots)
    args, sets = inputs(), chosen(slots)
    with use_impl(latent_attention="triton"):
        out, pull = vjp(lambda *xs: latent_attention(*xs, sets, SCALE, R).out, *args)
        with live_bytes() as live:
            grads = pull(torch.ones_like(out))
    results = 4 * sum(x.numel() for x in (out, *grads))
    of_strip = 4 * 4 * slots * (2 * H + width) + 4 * slots * (4 + 8 + 8)
    of_keys = 4 * T * width + 8 * 2 * (T + 1)
    statistics = 4 * 4 * H
    assert live.peak <= results + of_strip + of_keys + statistics + 4 * sets.numel()
    assert live.largest.nbytes < 4 * T * slots * width


@pytest.mark.cuda
@pytest.mark.parametrize("same", [False, True], ids=["random", "same"])
def test_at_the_published_sizes(same: bool):
    """bfloat16, root mean squares; twenty repeats have the same bits, also where one key has a row
    of each query.
    """
    tokens, topk = 700, 256
    q, kv = torch.randn(1, tokens, 96, 576), torch.randn(1, tokens, 576)
    q, kv = (x.to("cuda", torch.bfloat16) for x in (q, kv))
    scores = torch.rand(1 if same else tokens, tokens).expand(tokens, tokens).tril()
    value, slots = scores.topk(topk, dim=1)
    slots = torch.where(value > 0, slots, tokens).sort(dim=1).values
    slots = torch.where(slots == tokens, -1, slots).int()[None].cuda()

    def all_results(xs: tuple[Tensor, Tensor]) -> list[Tensor]:
        def both(*xs: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = latent_attention(*xs, slots, 0.07, 512)
            return out, latent_probs(*xs, lse, slots, 0.07)

        parts, pull = vjp(both, *xs)
        ct = torch.linspace(-1, 1, parts[0].numel(), device="cuda").view(parts[0].shape)
        return [*parts, *pull((ct.to(parts[0].dtype), torch.zeros_like(parts[1])))]

    exact = all_results((q.double(), kv.double()))
    with use_impl(latent_attention="triton", latent_probs="triton"), poisoned():
        ours = all_results((q, kv))
        for _ in range(20):
            assert all(map(torch.equal, all_results((q, kv)), ours))
    found = [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]
    assert max(found[:2]) < 5e-3, found
    assert max(found[2:]) < 1e-2, found
