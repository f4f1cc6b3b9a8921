"""The chunked form against the recurrence of KDA, which knows neither tiles nor a range, with one
decay for all channels of a head.
"""

import pytest
import torch
from torch import Tensor

from k31fn.kernels.gdn import gdn, gdn_fragment, reference
from k31fn.kernels.kda import KdaFragment, KdaOut, recurrence
from k31fn.segments import from_lengths, whole
from k31fn.testing import live_bytes

H, K, V = 2, 8, 6
NAMES = ("q", "k", "v", "g", "beta", "state")


def inputs(
    batch: int, length: int, dtype=torch.float64, decay: float | None = None
) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, g, beta) and a state. ``decay``: of every token; None: from weak to -40 beside each
    other.
    """
    q, k = (
        torch.nn.functional.normalize(torch.randn(batch, length, H, K, dtype=dtype), dim=-1)
        for _ in range(2)
    )
    v, beta = (
        torch.randn(batch, length, H, V, dtype=dtype),
        torch.rand(batch, length, H, dtype=dtype),
    )
    g = -40 * torch.rand(batch, length, H, dtype=dtype).pow(8)
    g = g if decay is None else torch.full_like(g, decay)
    return [q, k, v, g, beta], torch.randn(batch, H, K, V, dtype=dtype)


def by_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor, *state: Tensor
) -> KdaOut:
    return KdaOut(*recurrence(q, k, v, g[..., None].expand_as(k), beta, ids, *state))


def with_gradients(op, xs, ids, state, cts):
    """Outputs, and gradients with respect to xs and the state."""
    leaves = [x.detach().clone().requires_grad_() for x in (*xs, state)]
    out = op(*leaves[:-1], ids, leaves[-1])
    return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, cts)]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("decay", [None, -30.0, 0.0], ids=["random", "hard", "none"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_equals_the_recurrence(length, decay):
    """float64; the two differ by the order of sums."""
    xs, state = inputs(2, length, decay=decay)
    ids = whole(2, length).ids
    for initial in ((), (state,)):
        for actual, expected in zip(
            gdn(*xs, ids, *initial), by_recurrence(*xs, ids, *initial), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


PACKINGS = [
    ([[5, 3]], 8),
    # whole; four documents; padding; nothing but padding
    ([[170], [64, 1, 63, 20], [3, 10, 70], []], 170),
    # documents over, and on, the edges of tiles; the last row is longer than a slab of 512
    ([[1, 530], [64, 448, 9], [511, 20]], 531),
]


@pytest.mark.parametrize(("lengths", "length"), PACKINGS)
def test_packed_values_and_gradients_equal_the_recurrence(lengths, length):
    xs, state = inputs(len(lengths), length)
    ids = from_lengths(lengths, length).ids
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    actual, expected = (with_gradients(op, xs, ids, state, cts) for op in (gdn, by_recurrence))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_second_derivatives_equal_those_of_the_recurrence():
    xs, state = inputs(1, 70)
    ids = from_lengths([[7, 60]], 70).ids
    directions = [torch.randn_like(x) for x in (*xs, state)]

    def along(op):
        leaves = [x.clone().requires_grad_() for x in (*xs, state)]
        o, final = op(*leaves[:-1], ids, leaves[-1])
        first = torch.autograd.grad(
            o.square().sum() + final.pow(3).sum(), leaves, create_graph=True
        )
        inner = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        return torch.autograd.grad(inner, leaves)

    for name, actual, expected in zip(NAMES, along(gdn), along(by_recurrence), strict=True):
        assert relative(actual, expected) < 1e-12, name


def test_a_weak_decay_behind_a_hard_one_keeps_float32_accuracy():
    """A difference of two running sums of 3000 would be off by 2e-4 here."""
    xs, state = inputs(2, 130, decay=-0.01)
    xs[3][:, :30] = -100.0
    ids = from_lengths([[130], [13, 100]], 130).ids
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    exact = with_gradients(by_recurrence, xs, ids, state, cts)
    low = [x.float() for x in (*xs, state)]
    rounded = with_gradients(gdn, low[:-1], ids, low[-1], [c.float() for c in cts])
    for name, actual, expected in zip(("o", "final", *NAMES), rounded, exact, strict=True):
        if expected.norm() > 1e-30:  # what a decay of e^-100 a token leaves of the state before it
            assert relative(actual.double(), expected) < 3e-6, name


# -------------------------------------------------------------------- isolation, causality, padding


def changed(xs: list[Tensor], tokens: slice) -> list[Tensor]:
    """Other random values for these tokens of every row."""
    others, _ = inputs(xs[0].shape[0], xs[0].shape[1], dtype=xs[0].dtype)
    inside = torch.zeros(xs[0].shape[1], dtype=torch.bool)
    inside[tokens] = True
    return [
        torch.where(inside.reshape(1, -1, *[1] * (x.ndim - 2)), o, x)
        for x, o in zip(xs, others, strict=True)
    ]


@pytest.mark.parametrize(("lengths", "length"), [([[5, 3]], 8), ([[50, 100]], 150)])
def test_documents_do_not_reach_each_other_by_a_bit(lengths, length):
    """Outputs and gradients of one document, whatever the other holds."""
    xs, state = inputs(1, length, dtype=torch.float32)
    ids, cut = from_lengths(lengths, length).ids, lengths[0][0]
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    base = with_gradients(gdn, xs, ids, state, cts)
    for tokens, kept in ((slice(0, cut), slice(cut, length)), (slice(cut, length), slice(0, cut))):
        o, *grads, state_grad = with_gradients(gdn, changed(xs, tokens), ids, state, cts)
        assert torch.equal(o[:, kept], base[0][:, kept])
        assert all(
            torch.equal(g[:, kept], b[:, kept]) for g, b in zip(grads[1:], base[2:-1], strict=True)
        )
        assert torch.equal(grads[0], base[1]) == (tokens.start == 0)  # the final state
        assert torch.equal(state_grad, base[-1]) == (tokens.start != 0)
    assert not torch.equal(grads[1][:, tokens], base[2][:, tokens])


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_no_token_changes_an_earlier_output_by_a_bit(cut):
    xs, state = inputs(1, 150, dtype=torch.float32)
    ids = from_lengths([[80, 65]], 150).ids
    later = gdn(*changed(xs, slice(cut, 150)), ids, state)
    assert torch.equal(later.o[:, :cut], gdn(*xs, ids, state).o[:, :cut])


def test_padding_neither_enters_nor_produces_anything():
    xs, state = inputs(2, 40, dtype=torch.float32)
    ids = from_lengths([[9, 12], []], 40).ids
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    out = with_gradients(gdn, xs, ids, state, cts)
    filled = [torch.where((ids > 0).reshape(2, 40, *[1] * (x.ndim - 2)), x, -1e4) for x in xs]
    for actual, expected in zip(with_gradients(gdn, filled, ids, state, cts), out, strict=True):
        assert torch.equal(actual, expected)
    o, final, *grads, state_grad = out
    assert not o[ids == 0].any()
    assert not any(g[ids == 0].any() for g in grads)
    assert torch.equal(final[1], state[1])
    assert torch.equal(state_grad[1], cts[1][1])


def test_without_the_document_mask_it_is_wrong(monkeypatch):
    xs, _ = inputs(1, 32, decay=-0.1)
    ids = from_lengths([[13, 19]], 32).ids
    right = gdn(*xs, ids).o
    monkeypatch.setattr(
        reference,
        "make_masks",
        lambda ids, *a, make=reference.make_masks: make((ids > 0).long(), *a),
    )
    wrong = gdn(*xs, ids).o
    torch.testing.assert_close(wrong[:, :13], right[:, :13], rtol=0, atol=1e-12)
    assert (wrong[:, 13:] - right[:, 13:]).abs().max() > 1e-2


# ----------------------------------------------------------------------------------- dtypes, memory


def test_bfloat16_inputs_are_computed_in_float32():
    xs, state = inputs(2, 35, dtype=torch.float32)
    low = [x.bfloat16() for x in xs[:3]]
    ids = whole(2, 35).ids
    leaves = [x.requires_grad_() for x in low]
    out = gdn(*leaves, *xs[3:], ids, state)
    wide = gdn(*[x.float() for x in low], *xs[3:], ids, state)
    assert out.o.dtype == torch.bfloat16
    assert torch.equal(out.o, wide.o.bfloat16())
    assert torch.equal(out.state, wide.state)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(out.o.sum(), leaves))


def kept(length: int) -> int:
    """Bytes that live between forward and backward besides the inputs."""
    xs, _ = inputs(1, length, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in xs]
    ids = whole(1, length).ids
    with live_bytes() as live:
        out = gdn(*leaves, ids)
        held = live.current
        torch.autograd.grad(out.o, leaves, torch.ones_like(out.o))
    return held


@pytest.mark.slow
def test_one_state_per_slab_is_kept(monkeypatch):
    monkeypatch.setattr(reference, "_TILE", 16)
    monkeypatch.setattr(reference, "_SLAB", 2)
    once = kept(128)
    state, masks = 4 * H * K * V, 4 * (2 * 16 + 8) + 64
    assert kept(256) - once <= 128 * (4 * H * V + masks) + 128 // 32 * state
    # leaves the backward to autograd
    monkeypatch.setattr(reference, "_with_outputs", reference._slab)
    assert kept(128) > 3 * once


# ------------------------------------------------------------------------------------- the fragment


def fragment_by_recurrence(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor
) -> KdaFragment:
    """Token by token: from zero, and from an identity with nothing written (v = 0)."""
    start = torch.eye(K, dtype=g.dtype).expand(k.shape[0], H, K, K)
    transition = by_recurrence(k, k, torch.zeros_like(k), g, beta, ids, start).state
    return KdaFragment(by_recurrence(k, k, v, g, beta, ids).state, transition)


def test_a_fragment_equals_the_recurrence():
    """One document, with and without padding; a document that begins inside; nothing but padding.
    The decays are weak enough for the transition to be seen.
    """
    lengths = [[130], [100], [70, 60], []]
    (_, k, v, g, beta), state = inputs(len(lengths), 130, decay=-0.003)
    xs, ids = [k, v, g, 0.05 * beta], from_lengths(lengths, 130).ids
    cts = [torch.randn(len(lengths), H, K, n, dtype=torch.float64) for n in (V, K)]

    def run(op):
        leaves = [x.detach().clone().requires_grad_() for x in xs]
        out = op(*leaves, ids)
        return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, cts)]

    actual, expected = run(gdn_fragment), run(fragment_by_recurrence)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)
    made, transition = actual[:2]
    assert transition[:2].abs().amax() > 1e-3
    assert not transition[2].any()
    assert torch.equal(transition[3], torch.eye(K, dtype=torch.float64).expand(H, K, K))
    assert not made[3].any()
    final = gdn(k, *xs, ids, state).state
    torch.testing.assert_close(transition @ state + made, final, rtol=0, atol=1e-12)


def test_no_tokens_change_no_state():
    k = torch.randn(2, 0, 1, 4).double()
    beta, ids = k[..., 0], torch.zeros(2, 0, dtype=torch.int64)
    state = torch.randn(2, 1, 4, 4).double()
    out = gdn(k, k, k, beta, beta, ids, state)
    assert out.o.shape == k.shape
    assert torch.equal(out.state, state)
    found = gdn_fragment(k, k, beta, beta, ids)
    assert not found.state.any()
    assert torch.equal(found.transition, torch.eye(4).double().expand(2, 1, 4, 4))
