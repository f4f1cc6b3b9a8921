"""The fused fragment against the token recurrence in float64, and the segments and pieces that it
and the fused KDA are cut into.

Tolerances are norms of a difference over the norm, as in ``test_kda_triton``. A transition is a
product of as many factors as there are tokens, so its decays add up what each is off.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.kernels.kda import kda_fragment, recurrence
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned
from tests.kernels.test_kda_triton import BFLOAT16, FLOAT32, inputs

fragment = pytest.importorskip("k31fn.kernels.kda.triton.fragment", exc_type=ImportError)
launches = pytest.importorskip("k31fn.kernels.kda.triton.launches", exc_type=ImportError)
relay = pytest.importorskip("k31fn.kernels.kda.triton.relay", exc_type=ImportError)
tiles = pytest.importorskip("k31fn.kernels.kda.triton.tiles", exc_type=ImportError)
tl = pytest.importorskip("triton.language")
NAMES = ("state", "transition", "dk", "dv", "dg", "dbeta")
Inputs = tuple[Tensor, ...]


def lasting(lengths: list[list[int]], length: int, **kwargs: Any) -> Inputs:
    """k, v, g, beta and ids of decays so weak, and beta so small, that the transition of all tokens
    is seen; unless ``decay`` says otherwise.
    """
    _, k, v, g, beta, ids, _ = inputs(lengths, length, **{"decay": "weak", **kwargs})
    return (k, v, g, beta, ids) if "decay" in kwargs else (k, v, 0.1 * g, 0.2 * beta, ids)


def results(xs: Inputs, cts: list[Tensor], impl: str = "triton") -> list[Tensor]:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in xs]
    with use_impl(kda_fragment=impl), record_impls() as ran:
        out = kda_fragment(*leaves)
    assert ran == {("kda_fragment", impl): 1}
    grads = torch.autograd.grad(
        list(out), leaves[:4], [c.to(o.dtype) for c, o in zip(cts, out, strict=True)]
    )
    return [*(o.detach() for o in out), *grads]


def cotangents(xs: Inputs) -> list[Tensor]:
    k, v = xs[:2]
    shape = (k.shape[0], k.shape[2], k.shape[3])
    return [torch.randn(*shape, n, device=k.device) for n in (v.shape[3], k.shape[3])]


def wide(xs: Inputs) -> Inputs:
    return tuple(x.double() if x.is_floating_point() else x for x in xs)


def errors(actual: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    off = {}
    for name, a, b in zip(NAMES, actual, exact, strict=True):
        # a transition across a document is 0, and has to be that exactly
        off[name] = float((a.double() - b).norm() / b.norm()) if b.any() else float(a.norm())
    return off


def check(xs: Inputs, limit: float) -> None:
    cts = cotangents(xs)
    with poisoned():
        ours = results(xs, cts)
    off = errors(ours, results(wide(xs), cts, "reference"))
    assert all(x <= limit for x in off.values()), off  # NaN is not


def cut(monkeypatch: pytest.MonkeyPatch, scans: int, segment: int = 0) -> None:
    """Pieces and segments so small that short rows have several."""
    monkeypatch.setattr(launches, "_SCANS", dict.fromkeys(launches._SCANS, scans))
    if segment:
        monkeypatch.setattr(launches, "_SHORTEST", 1)
        monkeypatch.setattr(fragment, "_SEGMENT", segment)


@pytest.mark.parametrize("length", [1, 17, 65])
def test_equals_the_recurrence(length: int) -> None:
    xs = lasting([[length]], length, size=(1, 16, 16))
    cts = cotangents(xs)
    leaves = [x.cpu().double().requires_grad_() if x.is_floating_point() else x.cpu() for x in xs]
    k, v, *gates = leaves
    identity = torch.eye(16, dtype=torch.float64)[None, None]
    # with nothing written (v = 0) an identity becomes the transition
    transition = recurrence(k, k, torch.zeros_like(k), *gates, identity).state
    out = (recurrence(k, k, v, *gates).state, transition)
    grads = torch.autograd.grad(out, leaves[:4], [c.cpu().double() for c in cts])
    with poisoned():
        ours = [x.cpu() for x in results(xs, cts)]
    off = errors(ours, [*(x.detach() for x in out), *grads])
    assert all(x <= FLOAT32 for x in off.values()), off


@pytest.mark.parametrize("decay", ["mixed", pytest.param("hard", marks=pytest.mark.slow)])
def test_documents_and_decays(decay: str) -> None:
    """Of 1 and 3 tokens; padding; one row of nothing else, whose transition is the identity."""
    xs = lasting([[20], [1, 3, 14], []], 20, decay=decay, size=(1, 16, 16))
    check(xs, FLOAT32)
    with use_impl(kda_fragment="triton"):
        out = kda_fragment(*xs)
    assert not out.transition[1].any()
    assert torch.equal(out.transition[2, 0].cpu(), torch.eye(16))
    assert not out.state[2].any()


@pytest.mark.parametrize("size", [(2, 16, 32), pytest.param((1, 32, 16), marks=pytest.mark.slow)])
def test_widths(size: tuple[int, int, int]) -> None:
    check(lasting([[20]], 20, size=size), FLOAT32)


def test_bfloat16() -> None:
    check(lasting([[40]], 45, dtype=torch.bfloat16), BFLOAT16)


def test_segments_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments of three pieces, the last one shorter; beside one piece, to rounding."""
    xs = lasting([[150]], 155, size=(1, 16, 16))
    cts = cotangents(xs)
    whole = results(xs, cts)
    cut(monkeypatch, 6, 5)
    x, _ = fragment._inputs(tuple(y[None] for y in xs))
    assert x.plan("fragment", fragment._SEGMENT) == launches.Plan(piece=2, side=3, pieces=5)
    ours = results(xs, cts)
    assert max(errors(ours, results(wide(xs), cts, "reference")).values()) <= FLOAT32
    off = errors(ours, [y.double() for y in whole])
    # another order of sums, so not the same bits
    assert 0 < off["state"] <= FLOAT32
    assert max(off.values()) <= FLOAT32


def test_vmap() -> None:
    xs = lasting([[9, 8]], 20, size=(1, 16, 16))
    assert_op_matches(
        kda_fragment, "triton", xs, rtol=1e-4, atol=1e-5, reference_dtype=torch.float64
    )


def test_padding_may_hold_nan() -> None:
    xs = lasting([[21]], 30, size=(1, 16, 16))
    cts = cotangents(xs)
    padding = xs[4] == 0
    dirty = [x.masked_fill(padding[(...,) + (None,) * (x.ndim - 2)], torch.nan) for x in xs[:4]]
    clean = results(xs, cts)
    assert all(torch.equal(a, b) for a, b in zip(results((*dirty, xs[4]), cts), clean, strict=True))
    assert not any(x[padding].any() for x in clean[2:])


def test_repeats_are_bit_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 6)
    xs = lasting([[80]], 80, size=(1, 16, 16))
    cts = cotangents(xs)
    first, *others = (results(xs, cts) for _ in range(20 if DEVICE == "cuda" else 2))
    assert all(torch.equal(a, b) for run in others for a, b in zip(run, first, strict=True))


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("width", [16, 128])
def test_relay_of_transitions_in_two_parts(width: int, back: bool) -> None:
    """As in bfloat16 on a device, here in float16, which the interpreter multiplies too."""
    steps, columns = 3, 32
    wide = torch.randn(2, steps, width, width, dtype=torch.float64) / width**0.5
    high = wide.half()
    parts = torch.stack([high, (wide - high.double()).half()], 2).to(DEVICE)
    added = torch.randn(2, steps + 1, width, columns, dtype=torch.float64)
    state = added.float().to(DEVICE)
    relay.kda_relay[(2 * columns // 16,)](
        parts,
        state,
        steps,
        parts.stride(0),
        state.stride(0),
        K=width,
        WIDE=columns,
        ADDED=16,  # the others are carried on alone
        BLOCK=16,
        STAGES=1,
        BACK=back,
        PARTS=2,
        LOW=tl.float16,
    )
    added[:, : -1 if back else None, :, 16:][:, 0 if back else 1 :] = 0
    order = range(steps - 1, -1, -1) if back else range(1, steps + 1)
    for n in order:
        m = wide[:, n].mT if back else wide[:, n - 1]
        added[:, n] += m @ added[:, n + 1 if back else n - 1]
    assert (state.cpu() - added).norm() <= 2e-6 * added.norm()


class Idle:
    """A kernel that writes nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("name", ["kda_relay", "kda_fragment_adjoint"])
def test_a_missing_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment, name, Idle())
    with pytest.raises(AssertionError, match=r"nan"):
        check(lasting([[20]], 20, size=(1, 16, 16)), FLOAT32)


def test_refusals_and_order() -> None:
    k, v, g, beta, ids = lasting([[5]], 5, size=(1, 16, 16))
    with use_impl(kda_fragment="triton"):
        with pytest.raises(ValueError, match=r"K and V are one of 16, 32, 64, 128, got K = 8"):
            kda_fragment(k[..., :8], v, g[..., :8], beta, ids)
        with pytest.raises(ValueError, match="one dtype"):
            kda_fragment(k, v.bfloat16(), g, beta, ids)

    def loss(k: Tensor) -> Tensor:
        with use_impl(kda_fragment="triton"):
            return kda_fragment(k, v, g, beta, ids).state.square().sum()

    with pytest.raises(RuntimeError, match=r"kda_fragment \(triton\) is first order only"):
        torch.func.grad(lambda k: torch.func.grad(loss)(k).square().sum())(k)


@pytest.mark.parametrize(
    ("tokens", "heads", "plan"),
    [
        (8192, 96, (171, 1, 3)),  # as many programs as the chip holds: one piece, three segments
        (8192, 12, (47, 11, 11)),
        (8192, 48, (256, 1, 2)),
        (1024, 1, (6, 11, 11)),
        (2**20, 12, (139, 11, 472)),  # 43 segments
    ],
)
def test_the_cut_follows_from_the_shape(
    tokens: int, heads: int, plan: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 264)
    shape = tiles.Shape(1, 1, tokens, heads, 128, 128)
    found = launches.Plan.of(shape, "cuda", 2, launches._SEGMENT)
    assert found == plan
    assert found.piece * (found.pieces - 1) < shape.tiles <= found.piece * found.pieces


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("decay", ["initial", "mixed", "hard", "weak"])
def test_at_full_width(decay: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, as an H200 would have them. float32 against what plain torch in float32 is off."""
    cut(monkeypatch, 264)
    for lengths in ([[1000]], [[1000], [37, 1, 460, 3, 400]]):
        xs = lasting(lengths, 1000, decay=decay, dtype=dtype, size=(3, 128, 128))
        cts = cotangents(xs)
        exact = results(wide(xs), cts, "reference")
        off, plain = (errors(results(xs, cts, impl), exact) for impl in ("triton", "reference"))
        for name, error in off.items():
            # float32's own rounding where plain torch happens to be nearer
            limit = 1e-2 if dtype == torch.bfloat16 else 4 * max(plain[name], 1.5e-7)
            if exact[NAMES.index(name)].norm() > 1e-20:  # else e^-46 and less, which nobody reads
                assert error <= limit, (name, error, plain[name])


@pytest.mark.cuda
@pytest.mark.parametrize("size", [(2, 16, 64), (2, 64, 16), (2, 128, 32)])
def test_widths_on_the_device(size: tuple[int, int, int]) -> None:
    check(lasting([[100]], 140, size=size, dtype=torch.bfloat16), 1.5 * BFLOAT16)
    check(lasting([[100]], 140, size=size), FLOAT32)
