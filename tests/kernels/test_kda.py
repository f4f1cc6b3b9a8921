import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn.kernels.kda import MIN_LOG_DECAY, TILE, kda, recurrence, reference
from k31fn.segments import from_cu_seqlens, from_lengths, whole
from k31fn.testing import live_bytes

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "kda.safetensors")
H, K, V = 2, 8, 6


def inputs(
    batch: int, length: int, dtype=torch.float64, decay: float | None = None
) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, g, beta) and a state. ``decay``: of every token and channel; None: random in (-5,
    0).
    """
    q, k = (
        torch.nn.functional.normalize(torch.randn(batch, length, H, K, dtype=dtype), dim=-1)
        for _ in range(2)
    )
    v, beta = (
        torch.randn(batch, length, H, V, dtype=dtype),
        torch.rand(batch, length, H, dtype=dtype),
    )
    g = MIN_LOG_DECAY * torch.rand(batch, length, H, K, dtype=dtype)
    g = g if decay is None else torch.full_like(g, decay)
    return [q, k, v, g, beta], torch.randn(batch, H, K, V, dtype=dtype)


def with_gradients(op, xs, ids, state, cts):
    """Outputs, and gradients with respect to xs and the state, of one implementation."""
    leaves = [x.detach().clone().requires_grad_() for x in (*xs, state)]
    out = op(*leaves[:-1], ids, leaves[-1])
    return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, cts)]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# ------------------------------------------------------------------------------------ golden values


def golden_inputs(kind: str) -> dict[str, Tensor]:
    prefix = f"{kind}.in."
    return {
        k.removeprefix(prefix): v.clone().requires_grad_()
        for k, v in GOLDEN.items()
        if k.startswith(prefix)
    }


def golden_arguments(x: dict[str, Tensor]) -> list[Tensor]:
    """K3's gates and norms, as the fixtures' source has them."""

    def l2(y: Tensor) -> Tensor:
        return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)

    z = (x["gate_in"] + x["dt_bias"]).unflatten(-1, (2, 16))
    g = -5 * torch.sigmoid(x["A_log"].exp()[:, None] * z)
    return [l2(x["q"]) * 16**-0.5, l2(x["k"]), x["v"], g, torch.sigmoid(x["beta_in"])]


@pytest.mark.parametrize("op", [kda, recurrence], ids=["chunked", "recurrence"])
@pytest.mark.parametrize("kind", ["plain", "hard_decay"])
def test_golden_outputs_states_and_gradients(kind, op):
    x = golden_inputs(kind)
    xs, ids = golden_arguments(x), whole(2, 70).ids
    torch.testing.assert_close(xs[3], GOLDEN[f"{kind}.g"], rtol=0, atol=5e-6)
    for name, state in (("no_init", ()), ("init", x["S0"])):
        out = op(*xs, ids, state)
        torch.testing.assert_close(out.o, GOLDEN[f"{kind}.{name}.o"], rtol=0, atol=5e-6)
        torch.testing.assert_close(
            out.state, GOLDEN[f"{kind}.{name}.final_state"], rtol=0, atol=5e-6
        )
    grads = torch.autograd.grad(
        out, list(x.values()), [GOLDEN[f"{kind}.upstream_o"], GOLDEN[f"{kind}.upstream_S"]]
    )
    for name, grad in zip(x, grads, strict=True):
        assert relative(grad, GOLDEN[f"{kind}.init.grad.{name}"]) < 5e-6, name


def test_golden_documents():
    x = golden_inputs("plain")
    xs, offsets = [y[:1] for y in golden_arguments(x)], GOLDEN["varlen.cu_seqlens"].tolist()
    out = kda(*xs, from_cu_seqlens(offsets, length=70).ids)
    torch.testing.assert_close(out.o, GOLDEN["varlen.no_init.o"], rtol=0, atol=5e-6)
    torch.testing.assert_close(
        out.state[0], GOLDEN["varlen.no_init.final_state"][-1], rtol=0, atol=5e-6
    )
    for i, (start, stop) in enumerate(itertools.pairwise(offsets)):
        document = [y[:, start:stop] for y in xs]
        for name, state in (("no_init", ()), ("init", GOLDEN["varlen.S0"][i : i + 1])):
            alone = kda(*document, whole(1, stop - start).ids, state)
            torch.testing.assert_close(
                alone.o, GOLDEN[f"varlen.{name}.o"][:, start:stop], rtol=0, atol=5e-6
            )
            torch.testing.assert_close(
                alone.state[0], GOLDEN[f"varlen.{name}.final_state"][i], rtol=0, atol=5e-6
            )


# --------------------------------------------------------------------------- against the recurrence


@pytest.mark.parametrize("decay", [None, -5.0, 0.0], ids=["random", "hard", "none"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 70, 257])
def test_equals_the_recurrence(length, decay):
    """float64; the two differ by the order of sums. 257 is longer than a slab of 16 tiles."""
    xs, state = inputs(2, length, decay=decay)
    ids = whole(2, length).ids
    for initial in ((), state):
        for actual, expected in zip(
            kda(*xs, ids, initial), recurrence(*xs, ids, initial), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


PACKINGS = [
    ([[5, 3]], 8),
    ([[13, 19]], 32),
    (
        [[70], [17, 1, 32, 20], [3, 10, 37], []],
        70,
    ),  # whole; four documents; padding; nothing but padding
    (
        [[255, 1, 40], [16, 240, 16, 7], [300]],
        300,
    ),  # documents over, and on, the edges of tiles and slabs
]


@pytest.mark.parametrize("decay", [None, -5.0], ids=["random", "hard"])
@pytest.mark.parametrize(("lengths", "length"), PACKINGS)
def test_packed_values_and_gradients_equal_the_recurrence(lengths, length, decay):
    xs, state = inputs(len(lengths), length, decay=decay)
    ids = from_lengths(lengths, length).ids
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    actual, expected = (with_gradients(op, xs, ids, state, cts) for op in (kda, recurrence))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_random_packings_equal_the_recurrence():
    for _ in range(10):
        length = int(torch.randint(1, 60, ()))
        cuts = torch.randint(0, length + 1, (2, 4)).sort(-1).values
        lengths = [[n for n in row.diff(prepend=row.new_zeros(1)).tolist() if n] for row in cuts]
        xs, state = inputs(2, length)
        ids = from_lengths(lengths, length).ids
        for actual, expected in zip(kda(*xs, ids, state), recurrence(*xs, ids, state), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_documents_that_are_not_multiples_of_the_tile():
    """D08: offsets [0, 13, 32]: packed, each document is what it is alone, and only the first gets
    the state.
    """
    xs, state = inputs(1, 32)
    packed = kda(*xs, from_cu_seqlens([0, 13, 32], length=32).ids, state)
    for start, stop, initial in ((0, 13, state), (13, 32, ())):
        alone = kda(*[x[:, start:stop] for x in xs], whole(1, stop - start).ids, initial)
        torch.testing.assert_close(packed.o[:, start:stop], alone.o, rtol=0, atol=1e-12)
    torch.testing.assert_close(packed.state, alone.state, rtol=0, atol=1e-12)


def test_second_derivatives_equal_those_of_the_recurrence():
    xs, state = inputs(1, 20)
    ids = from_lengths([[7, 12]], 20).ids
    directions = [torch.randn_like(x) for x in (*xs, state)]

    def along(op):
        leaves = [x.clone().requires_grad_() for x in (*xs, state)]
        o, final = op(*leaves[:-1], ids, leaves[-1])
        first = torch.autograd.grad(
            o.square().sum() + final.pow(3).sum(), leaves, create_graph=True
        )
        inner = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        return torch.autograd.grad(inner, leaves)

    for name, actual, expected in zip(
        ("q", "k", "v", "g", "beta", "state"), along(kda), along(recurrence), strict=True
    ):
        assert relative(actual, expected) < 1e-12, name


# --------------------------------------------------------------------------------------- hard decay


def constant_inputs(length: int, decay: float, dtype: torch.dtype) -> list[Tensor]:
    """D01: q = k = a constant unit vector, beta 0.5, v = 1, K = 8."""
    unit = torch.full((1, length, 1, 8), 8**-0.5, dtype=dtype)
    ones = torch.ones(1, length, 1, 8, dtype=dtype)
    return [
        unit,
        unit,
        ones,
        torch.full_like(unit, decay, dtype=torch.float32),
        0.5 * ones[..., 0].float(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decay", "last"), [(-5.0, 0.5017), (-1.0, 0.6127)])
@pytest.mark.parametrize("length", [16, 64])
def test_strong_forgetting(length, decay, last, dtype):
    xs, ids = constant_inputs(length, decay, dtype), whole(1, length).ids
    out = kda(*xs, ids)
    # Half a unit in the last place of bf16 at 0.6, and of the four digits; the unit vector rounded
    # to bf16 is 0.2% off.
    atol = 3e-3 if dtype == torch.bfloat16 else 6e-5
    torch.testing.assert_close(out.o[0, 0].float(), torch.full((1, 8), 0.5), rtol=0, atol=atol)
    torch.testing.assert_close(out.o[0, -1].float(), torch.full((1, 8), last), rtol=0, atol=atol)
    exact = recurrence(*[x.double() for x in xs], ids)
    torch.testing.assert_close(
        out.o.double(), exact.o, rtol=0, atol=2e-3 if dtype == torch.bfloat16 else 1e-6
    )
    torch.testing.assert_close(out.state.double(), exact.state, rtol=0, atol=1e-6)


def test_gradients_at_the_hardest_decay_keep_float32_accuracy():
    """The gradient of g is 1e-2 of its terms' size there; the terms must not be cancelled against
    each other.
    """
    xs, state = inputs(2, 70, decay=-5.0)
    ids = from_lengths([[70], [13, 30]], 70).ids
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    exact = with_gradients(recurrence, xs, ids, state, cts)
    rounded = with_gradients(
        kda, [x.float() for x in xs], ids, state.float(), [c.float() for c in cts]
    )
    for actual, expected in zip(rounded, exact, strict=True):
        assert relative(actual.double(), expected) < 2e-6


def test_the_stated_range_is_what_float32_holds():
    assert math.exp(-MIN_LOG_DECAY * TILE) < min(
        torch.finfo(t).max for t in (torch.float32, torch.bfloat16)
    )
    assert math.exp(-(MIN_LOG_DECAY - 1) * TILE) > torch.finfo(torch.float32).max


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


@pytest.mark.parametrize(("lengths", "length"), [([[5, 3]], 8), ([[50, 270]], 320)])
def test_documents_do_not_reach_each_other_by_a_bit(lengths, length):
    """D06: outputs and gradients of the second document, whatever the first holds; and the other
    way round.
    """
    xs, state = inputs(1, length, dtype=torch.float32)
    ids, cut = from_lengths(lengths, length).ids, lengths[0][0]
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    base = with_gradients(kda, xs, ids, state, cts)
    for tokens, kept in ((slice(0, cut), slice(cut, length)), (slice(cut, length), slice(0, cut))):
        o, *grads, state_grad = with_gradients(kda, changed(xs, tokens), ids, state, cts)
        assert torch.equal(o[:, kept], base[0][:, kept])
        assert all(
            torch.equal(g[:, kept], b[:, kept]) for g, b in zip(grads[1:], base[2:-1], strict=True)
        )
        assert torch.equal(grads[0], base[1]) == (
            tokens.start == 0
        )  # the final state is the second document's
        assert torch.equal(state_grad, base[-1]) == (
            tokens.start != 0
        )  # the initial state is the first one's
    assert not torch.equal(grads[1][:, tokens], base[2][:, tokens])


@pytest.mark.parametrize("cut", [1, 15, 16, 100, 256, 299])
def test_no_token_changes_an_earlier_output_by_a_bit(cut):
    xs, state = inputs(1, 300, dtype=torch.float32)
    ids = from_lengths([[80, 210]], 300).ids
    later = kda(*changed(xs, slice(cut, 300)), ids, state)
    assert torch.equal(later.o[:, :cut], kda(*xs, ids, state).o[:, :cut])


def test_padding_neither_enters_nor_produces_anything():
    xs, state = inputs(2, 40, dtype=torch.float32)
    ids = from_lengths([[9, 12], []], 40).ids
    cts = [torch.randn_like(xs[2]), torch.randn_like(state)]
    out = with_gradients(kda, xs, ids, state, cts)
    filled = [
        torch.where((ids > 0).reshape(2, 40, *[1] * (x.ndim - 2)), x, -1e4) for x in xs
    ]  # also a g beyond range
    for actual, expected in zip(with_gradients(kda, filled, ids, state, cts), out, strict=True):
        assert torch.equal(actual, expected)
    o, final, *grads, state_grad = out
    assert not o[ids == 0].any()
    assert not any(g[ids == 0].any() for g in grads)
    assert torch.equal(final[1], state[1])
    assert torch.equal(state_grad[1], cts[1][1])


# -------------------------------------------------------------------------- variants that must fail


def test_without_the_document_mask_it_is_wrong(monkeypatch):
    xs, _ = inputs(1, 32)
    ids = from_lengths([[13, 19]], 32).ids
    right = kda(*xs, ids).o
    monkeypatch.setattr(
        reference,
        "make_masks",
        lambda ids, *a, make=reference.make_masks: make((ids > 0).long(), *a),
    )
    wrong = kda(*xs, ids).o
    torch.testing.assert_close(wrong[:, :13], right[:, :13], rtol=0, atol=1e-12)
    assert (wrong[:, 13:] - right[:, 13:]).abs().max() > 1e-2


def test_running_sums_across_documents_lose_isolation(monkeypatch):
    """The same in exact arithmetic, but what the first document holds is left in the rounding of
    the second.
    """

    def across(ids: Tensor, tile: int, dtype: torch.dtype, make=reference.make_masks):
        masks = make(ids, tile, dtype)
        return masks._replace(
            prefix=torch.ones(tile, tile, dtype=dtype).tril().expand_as(masks.prefix)
        )

    monkeypatch.setattr(reference, "make_masks", across)
    xs, _ = inputs(1, 8, dtype=torch.float32)
    ids = from_lengths([[5, 3]], 8).ids
    assert not torch.equal(kda(*changed(xs, slice(0, 5)), ids).o[:, 5:], kda(*xs, ids).o[:, 5:])


def test_one_factorisation_over_64_tokens_overflows(monkeypatch):
    monkeypatch.setattr(reference, "TILE", 64)
    assert not kda(*constant_inputs(64, -5.0, torch.float32), whole(1, 64).ids).o.isfinite().all()


# ----------------------------------------------------------------------------------- dtypes, memory


def test_bfloat16_inputs_are_computed_in_float32():
    xs, state = inputs(2, 35, dtype=torch.float32)
    low = [x.bfloat16() for x in xs[:3]]
    ids = whole(2, 35).ids
    leaves = [x.requires_grad_() for x in low]
    out = kda(*leaves, *xs[3:], ids, state)
    wide = kda(*[x.float() for x in low], *xs[3:], ids, state)
    assert out.o.dtype == torch.bfloat16
    assert torch.equal(out.o, wide.o.bfloat16())
    assert torch.equal(out.state, wide.state)
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(out.o.sum(), leaves))


def test_strides_do_not_matter():
    xs, state = inputs(2, 35)
    ids = whole(2, 35).ids
    strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in xs]
    assert torch.equal(kda(*strided, ids, state).o, kda(*xs, ids, state).o)


def kept_and_peak(length: int) -> tuple[int, int]:
    """Bytes that live between forward and backward besides the inputs, and at most."""
    xs, _ = inputs(1, length, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in xs]
    ids, ct = whole(1, length).ids, torch.ones_like(xs[2])
    with live_bytes() as live:
        out = kda(*leaves, ids)
        kept = live.current
        torch.autograd.grad(out.o, leaves, ct)
    return kept, live.peak


def test_memory_of_the_backward_is_linear_in_time(monkeypatch):
    """Kept for the backward: the inputs, and one state per slab.

    Beyond the gradients it needs one slab's scratch.
    """
    (kept, peak), (kept_twice, peak_twice) = kept_and_peak(512), kept_and_peak(1024)
    token = 4 * H * (3 * K + 2 * V + 1)  # bytes of one token's inputs and output
    slabs, state = 512 // (reference.SLAB * TILE), 4 * H * K * V
    masks = 4 * (2 * TILE + 8) + 8
    assert kept_twice - kept <= 512 * (4 * H * V + masks) + slabs * state
    # All gradients, once in slabs and once joined, and what was kept.
    assert peak_twice - peak <= kept_twice - kept + 2 * 512 * token
    monkeypatch.setattr(
        reference, "_slab", lambda *args: reference._slab_fwd(*args)[0]
    )  # leaves the backward to autograd
    assert kept_and_peak(512)[0] > 3 * kept
