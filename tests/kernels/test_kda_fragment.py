"""What a fragment does to the state, against the recurrence: its state from zero, and its
transition of an identity.
"""

import pytest
import torch
from torch import Tensor

from k31fn.kernels.kda import KdaFragment, fragment, kda, kda_fragment, recurrence
from k31fn.kernels.kda.chunks import SLAB
from k31fn.kernels.kda.recurrence import TILE
from k31fn.segments import from_lengths, whole
from k31fn.testing import live_bytes
from tests.kernels.test_kda import H, K, V, inputs, relative


def by_recurrence(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor) -> KdaFragment:
    """Token by token: from zero, and from an identity with nothing written (v = 0)."""
    start = torch.eye(K, dtype=g.dtype).expand(k.shape[0], H, K, K)
    transition = recurrence(k, k, torch.zeros_like(k), g, beta, ids, start).state
    return KdaFragment(recurrence(k, k, v, g, beta, ids).state, transition)


def with_gradients(op, xs, ids, cts):
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    out = op(*leaves, ids)
    return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, cts)]


def cotangents(batch: int) -> list[Tensor]:
    return [torch.randn(batch, H, K, n, dtype=torch.float64) for n in (V, K)]


@pytest.mark.parametrize("decay", [None, -5.0, 0.0], ids=["random", "hard", "none"])
@pytest.mark.parametrize("length", [1, 15, 17, 70, 257])
def test_values_and_gradients_equal_the_recurrence(length, decay):
    """257 is longer than a slab of 16 tiles."""
    (_, *xs), _ = inputs(2, length, decay=decay)
    ids, cts = whole(2, length).ids, cotangents(2)
    actual, expected = (with_gradients(op, xs, ids, cts) for op in (kda_fragment, by_recurrence))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


LENGTHS = [[300], [280], [255, 30], [1, 299], [7, 16, 20], []]
"""One document, with and without padding; documents that begin inside; nothing but padding."""


def test_packed_values_and_gradients_equal_the_recurrence():
    """The decays are weak enough for the transition of 300 tokens to be seen."""
    (_, k, v, g, beta), state = inputs(len(LENGTHS), 300)
    xs, cts = [k, v, 1e-3 * g, 0.05 * beta], cotangents(len(LENGTHS))
    ids = from_lengths(LENGTHS, 300).ids
    actual, expected = (with_gradients(op, xs, ids, cts) for op in (kda_fragment, by_recurrence))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)
    made, transition = actual[:2]
    one, several, padding = slice(0, 2), slice(2, 5), 5
    assert transition[one].abs().amax() > 1e-3
    assert not transition[several].any()
    assert torch.equal(transition[padding], torch.eye(K, dtype=torch.float64).expand(H, K, K))
    assert not made[padding].any()
    assert not any(x[ids == 0].any() for x in actual[2:])
    final = kda(k, *xs, ids, state).state
    torch.testing.assert_close(transition @ state + made, final, rtol=0, atol=1e-12)


def test_fragments_of_a_row_compose_to_the_whole():
    """Wherever it is cut, also inside a tile and where a document begins."""
    (_, k, v, g, beta), _ = inputs(2, 60)
    xs = [k, v, 0.1 * g, beta]
    ids = from_lengths([[60], [30, 25]], 60).ids
    all_tokens = kda_fragment(*xs, ids)
    for cuts in ([1, 59], [7, 20, 33], [31, 29], [16, 16, 28]):
        state, transition = (
            torch.zeros(2, H, K, V, dtype=torch.float64),
            torch.eye(K, dtype=torch.float64),
        )
        first = ids[:, 0]
        for *parts, part_ids in zip(
            *(x.split([*cuts, 60 - sum(cuts)], dim=1) for x in (*xs, ids)), strict=True
        ):
            if not part_ids.shape[1]:
                continue
            part = kda_fragment(*parts, part_ids)
            # the state before a part belongs to the document of its first token, or to none that is
            # left
            keeps = ((part_ids[:, 0] == first) | (part_ids[:, 0] == 0))[:, None, None, None]
            m = torch.where(keeps, part.transition, 0)
            state, transition = m @ state + part.state, m @ transition
            first = torch.where(part_ids[:, -1] > 0, part_ids[:, -1], first)
        torch.testing.assert_close(state, all_tokens.state, rtol=0, atol=1e-12)
        torch.testing.assert_close(transition, all_tokens.transition, rtol=0, atol=1e-12)


def test_second_derivatives_equal_those_of_the_recurrence():
    (_, *xs), _ = inputs(1, 20)
    ids = from_lengths([[19]], 20).ids
    xs[2] = 0.1 * xs[2]
    directions = [torch.randn_like(x) for x in xs]

    def along(op):
        leaves = [x.clone().requires_grad_() for x in xs]
        made, transition = op(*leaves, ids)
        first = torch.autograd.grad(
            made.square().sum() + transition.pow(3).sum(), leaves, create_graph=True
        )
        inner = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        return torch.autograd.grad(inner, leaves)

    for name, actual, expected in zip(
        ("k", "v", "g", "beta"), along(kda_fragment), along(by_recurrence), strict=True
    ):
        assert relative(actual, expected) < 1e-12, name


def test_float32_and_bfloat16_inputs():
    (_, *xs), _ = inputs(2, 70, decay=-5.0)
    ids, cts = from_lengths([[70], [13, 30]], 70).ids, cotangents(2)
    exact = with_gradients(by_recurrence, xs, ids, cts)
    rounded = with_gradients(kda_fragment, [x.float() for x in xs], ids, [c.float() for c in cts])
    for actual, expected in zip(rounded, exact, strict=True):
        if expected.norm() > 1e-30:  # e^-350 per channel
            assert relative(actual.double(), expected) < 2e-6
    low, gates = [x.bfloat16() for x in xs[:2]], [0.01 * x.float() for x in xs[2:]]
    out = kda_fragment(*low, *gates, ids)
    wide = kda_fragment(*[x.float() for x in low], *gates, ids)
    assert out.state.dtype == out.transition.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(out, wide, strict=True))


def kept(length: int) -> int:
    """Bytes that live between forward and backward besides the inputs."""
    (_, *xs), _ = inputs(1, length, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in xs]
    ids = whole(1, length).ids
    with live_bytes() as live:
        out = kda_fragment(*leaves, ids)
        held = live.current
        torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
    return held


def test_one_state_per_slab_is_kept(monkeypatch):
    state, masks = 4 * H * K * (V + K), 4 * (2 * TILE + 8) + 8
    once = kept(256)
    assert kept(512) - once <= 256 * masks + 256 // (SLAB * TILE) * state
    monkeypatch.setattr(
        fragment, "_slab", lambda *args: fragment._slab_fwd(*args)[0]
    )  # leaves the backward to autograd
    assert kept(256) > 3 * once


def test_without_the_document_mask_it_is_wrong(monkeypatch):
    (_, k, v, g, beta), _ = inputs(1, 32)
    xs, ids = [k, v, 0.02 * g, beta], from_lengths([[13, 19]], 32).ids
    right = kda_fragment(*xs, ids)
    monkeypatch.setattr(
        fragment, "make_masks", lambda ids, *a, make=fragment.make_masks: make((ids > 0).long(), *a)
    )
    for wrong, expected in zip(kda_fragment(*xs, ids), right, strict=True):
        assert (wrong - expected).abs().max() > 1e-2


def test_no_tokens_change_no_state():
    k, g = torch.randn(2, 2, 0, H, K).double()
    v, beta, ids = g[..., :V], g[..., 0], torch.zeros(2, 0, dtype=torch.int64)
    state = torch.randn(2, H, K, v.shape[-1]).double().requires_grad_()
    out = kda(k, k, v, g, beta, ids, state)
    assert out.o.shape == v.shape
    assert torch.equal(out.state, state)
    assert torch.equal(torch.autograd.grad(out.state.sum(), state)[0], torch.ones_like(state))
    found = kda_fragment(k, v, g, beta, ids)
    assert not found.state.any()
    assert torch.equal(found.transition, torch.eye(K).double().expand(2, H, K, K))
