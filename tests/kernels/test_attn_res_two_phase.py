"""The fused two phases of the residual attention against the references in float64, and against the
one pass.

Tolerances are those of ``test_attn_res_triton.py``; in bfloat16 ``merge`` takes its rounded result,
which :mod:`tests.kernels.attn_res_rounding` bounds, and ``summarize`` rounds nothing but the
gradients of the blocks.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import remat, vjp
from k31fn.kernels.attn_res import Summary, attn_res, merge, summarize
from k31fn.kernels.launch import Tile
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.attn_res_rounding import ROUNDING, assert_within, of_merge
from tests.kernels.fused import DEVICE, poisoned

merging = pytest.importorskip("k31fn.kernels.attn_res.triton.merge", exc_type=ImportError)
summarizing = pytest.importorskip("k31fn.kernels.attn_res.triton.summarize", exc_type=ImportError)
EPS = 1e-5
FLOAT32 = {"rtol": 2e-6, "atol": 2e-6, "grad_rtol": 1e-5, "grad_atol": 1e-5}
BOTH = {"attn_res_summarize": "triton", "attn_res_merge": "triton"}


def blocks(
    n: int, queries: int, width: int = 37, tokens: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[object, ...]:
    some = tuple(torch.randn(2, tokens, width, device=DEVICE).to(dtype) for _ in range(n))
    asked = torch.randn(queries, width, device=DEVICE) * width**-0.5
    return some, asked, 1 + 0.3 * torch.randn(queries, width, device=DEVICE), EPS


def running(
    width: int = 37, tokens: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[object, ...]:
    """A summary of 1 to 2, and a running sum."""
    some, query, norm, eps = blocks(1, 1, width, tokens, dtype)
    largest, total = torch.randn(2, tokens, device=DEVICE), 1 + torch.rand(2, tokens, device=DEVICE)
    return (
        Summary(largest, total, torch.randn(2, tokens, width, device=DEVICE)),
        some[0],
        query[0],
        norm[0],
        eps,
    )


def two_phase(sources: Sequence[Tensor], query: Tensor, norm: Tensor) -> Tensor:
    summary = summarize(tuple(sources[:-1]), query[None], norm[None], EPS)
    return merge(Summary(*(part.unbind()[0] for part in summary)), sources[-1], query, norm, EPS)


@pytest.mark.parametrize(
    ("n", "queries"),
    [(2, 3), *(pytest.param(n, 3 * n - 4, marks=pytest.mark.slow) for n in (5, 12))],
)
def test_summarize_equals_the_reference(n: int, queries: int) -> None:
    with poisoned():
        assert_op_matches(
            summarize, "triton", blocks(n, queries), **FLOAT32, reference_dtype=torch.float64
        )


@pytest.mark.parametrize("widest", [8192, 0])
def test_merge_equals_the_reference(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is held, and one in pieces."""
    monkeypatch.setattr(merging, "_WIDEST", widest)
    with poisoned():
        assert_op_matches(merge, "triton", running(), **FLOAT32, reference_dtype=torch.float64)


@pytest.mark.parametrize(
    ("width", "tokens"), [(1, 7), (16, 1), (33, 0), pytest.param(70, 9, marks=pytest.mark.slow)]
)
def test_odd_sizes(width: int, tokens: int) -> None:
    assert_op_matches(summarize, "triton", blocks(2, 3, width, tokens), **FLOAT32, vmap_grad=False)
    assert_op_matches(merge, "triton", running(width, tokens), **FLOAT32, vmap_grad=False)


def assert_bfloat16_merge(args: tuple[object, ...], own: float) -> None:
    summary, prefix, query, norm, eps = args
    leaves, ct = (summary, prefix, query, norm), torch.randn_like(prefix)

    def run(impl: str, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        wide = [
            Summary(*(p.to(dtype or p.dtype) for p in summary)),
            *(x.to(dtype or x.dtype) for x in leaves[1:]),
        ]
        with use_impl(attn_res_merge=impl):
            out, pull = vjp(lambda *x: merge(*x, eps), *wide)
        d_summary, *rest = pull(ct.to(out.dtype))
        return out, *d_summary, *rest

    (out, *found), (wide, *exact) = run("triton", None), run("reference", torch.float64)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wide, rtol=ROUNDING, atol=ROUNDING)
    assert_within(found, exact, of_merge(summary, prefix, query, norm, eps, ct), own)


def test_bfloat16() -> None:
    own = {
        "rtol": 2e-6,
        "atol": 2e-6,
        "grad_rtol": 2**-7,
        "grad_atol": 2**-7,
    }  # the blocks' are rounded
    args = blocks(3, 2, dtype=torch.bfloat16)
    assert_op_matches(
        summarize, "triton", args, **own, vmap_grad=False, reference_dtype=torch.float64
    )
    assert_bfloat16_merge(running(dtype=torch.bfloat16), 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 2, 5, 9, 12])
def test_at_full_width(n: int) -> None:
    """The width of K3.1, more tokens than programs, and up to 32 queries.

    Scores are sums of 7168 terms whose partial sums are of size 1: some hundred roundings of 2^-24
    each.
    """
    own = {"rtol": 1e-4, "atol": 3e-5, "grad_rtol": 2**-7, "grad_atol": 2**-7}
    with poisoned():
        args = blocks(n, 3 * n - 2 if n < 12 else 32, 7168, 301, torch.bfloat16)
        assert_op_matches(
            summarize, "triton", args, **own, vmap_grad=n == 2, reference_dtype=torch.float64
        )
        assert_bfloat16_merge(running(7168, 301, torch.bfloat16), 1e-4)


@pytest.mark.parametrize("n", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_two_phases_equal_the_one_pass(n: int) -> None:
    """Values and gradients, all fused; scores of 100 overflow a plain exponential."""
    some, queries, norms, _ = blocks(n, 1)
    for scale in (1.0, 100.0):
        found = []
        for f in (two_phase, lambda s, q, w: attn_res(tuple(s), q, w, EPS)):
            with use_impl(attn_res="triton", **BOTH), record_impls() as ran:
                out, pull = vjp(f, some, scale * queries[0], norms[0])
            assert {impl for _, impl in ran} == {"triton"}
            found.append((out, *pull(torch.ones_like(out))))
        torch.testing.assert_close(found[0], found[1], rtol=1e-5 * scale, atol=1e-5 * scale)


def test_without_blocks_the_running_sum_is_left() -> None:
    """Of the summary of nothing, whose parts broadcast; its gradients are zero, and finite."""
    (prefix,), queries, norms, _ = blocks(1, 1)
    with use_impl(**BOTH):
        assert torch.equal(two_phase([prefix], queries[0], norms[0]), prefix)
        summary = Summary(*(part[0] for part in summarize((), queries, norms, EPS)))
        d_summary = torch.func.grad(lambda s: merge(s, prefix, queries[0], norms[0], EPS).sum())(
            summary
        )
    assert all(
        torch.equal(d, torch.zeros_like(s)) for d, s in zip(d_summary[:2], summary, strict=False)
    )


@pytest.mark.parametrize("batched", [(0,), (1,), (3,), (0, 1, 2, 3)])
def test_vmap_over_any_argument(batched: tuple[int, ...]) -> None:
    """Whichever argument alone is batched, gradients are those of a loop."""
    some, queries, norms, _ = blocks(2, 1, width=5, tokens=2)
    flat = [*some, queries[0], norms[0]]
    args = [torch.stack([x, 1.5 * x, -x]) if i in batched else x for i, x in enumerate(flat)]

    def gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(
            lambda *x: two_phase(x[:2], *x[2:]).square().sum(), argnums=(0, 1, 2, 3)
        )(*leaves)

    with use_impl(**BOTH):
        together = torch.func.vmap(
            gradients, in_dims=tuple(0 if i in batched else None for i in range(4))
        )(*args)
    for sample in range(3):
        with use_impl(**dict.fromkeys(BOTH, "reference")):
            alone = gradients(*(x[sample] if i in batched else x for i, x in enumerate(args)))
        torch.testing.assert_close(tuple(t[sample] for t in together), alone, rtol=2e-5, atol=2e-5)


def test_twenty_runs_are_bit_identical() -> None:
    """More tokens than programs, so that a program's sums run over several."""
    some, queries, norms, _ = blocks(3, 1, tokens=600 if DEVICE == "cuda" else 5)
    seen = []
    for _ in range(20 if DEVICE == "cuda" else 2):
        with use_impl(**BOTH):
            out, pull = vjp(two_phase, some, queries[0], norms[0])
        d_sources, d_query, d_norm = pull(torch.ones_like(out))
        seen.append((out, *d_sources, d_query, d_norm))
    for run in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, seen[0], strict=True))


def test_a_token_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, tiles of tokens and features that fill none: as on a device, in small."""
    cut = Tile(columns=16, rows=16, per_core=2)
    for kernels, count in ((merging, 3), (summarizing, 5)):
        monkeypatch.setitem(kernels._TILES, DEVICE, (cut,) * count)
    assert_op_matches(
        summarize, "triton", blocks(2, 2), **FLOAT32, vmap_grad=False, reference_dtype=torch.float64
    )
    assert_op_matches(
        merge, "triton", running(), **FLOAT32, vmap_grad=False, reference_dtype=torch.float64
    )


def test_first_order_only_and_under_remat() -> None:
    some, queries, norms, _ = blocks(2, 1, width=5, tokens=1)

    def loss(query: Tensor) -> Tensor:
        return remat(two_phase)(some, query, norms[0]).square().sum()

    with use_impl(**BOTH):
        first = torch.func.grad(loss)(queries[0])
        with pytest.raises(RuntimeError, match=r"\(triton\) is first order only"):
            torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(queries[0])
    with use_impl(**dict.fromkeys(BOTH, "reference")):
        torch.testing.assert_close(first, torch.func.grad(loss)(queries[0]), rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    (block, other), queries, norms, _ = blocks(2, 1, width=3)
    summary, prefix, query, norm, _ = running(width=3)
    with use_impl(**BOTH):
        for some, q, reason in (
            ((block,) * 13, queries, "1 to 12 sources, got 13"),
            ((block,), queries.expand(33, 3), "1 to 32 queries, got 33"),
            ((block, other.bfloat16()), queries, "have one dtype"),
            ((block, other[:, :1]), queries, "have one shape"),
            ((block[0],), queries, r"one shape \[B, T, D\]"),
            ((block,), queries[0], r"query and norm_weight \[3, D\], got \[3\]"),
            ((block,), queries.expand(2, 1, 3), r"query and norm_weight \[2, D\], got \[2, 1, 3\]"),
        ):
            with pytest.raises(ValueError, match=reason):
                summarize(some, q, norms, EPS)
        with pytest.raises(ValueError, match=r"bfloat16 or float32, got torch\.float64"):
            merge(summary, prefix.double(), query, norm, EPS)
        with pytest.raises(ValueError, match=r"query and norm_weight \[D\], got \[2\], \[3\]"):
            merge(summary, prefix, query[:2], norm, EPS)
        with pytest.raises(ValueError, match=r"the running sum is \[B, T, D\]"):
            merge(summary, prefix[0], query, norm, EPS)


def wrong(
    launch: Callable[..., tuple[Tensor, ...]], result: int
) -> Callable[..., tuple[Tensor, ...]]:
    """One result 1.01 times too large."""

    def off(*operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(1.01 * x if i == result else x for i, x in enumerate(launch(*operands)))

    return off


@pytest.mark.parametrize(
    ("kernels", "launch", "result"),
    [
        (summarizing, "_launch_d_scores", 0),
        (summarizing, "_launch_d_scores", 1),
        (summarizing, "_launch_d_keys", 0),
        (merging, "_launch_backward", 1),
        (merging, "_launch_backward", 2),
        (merging, "_launch_backward", 4),
        (merging, "_launch_d_scores", 1),
        (merging, "_launch_d_sources", 0),
        (merging, "_launch_d_sources", 2),
    ],
)
def test_a_wrong_gradient_is_found(
    kernels: ModuleType, launch: str, result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels is merging and launch != "_launch_backward":
        monkeypatch.setattr(merging, "_WIDEST", 0)
    monkeypatch.setattr(kernels, launch, wrong(getattr(kernels, launch), result))
    op, args = (summarize, blocks(2, 2)) if kernels is summarizing else (merge, running())
    with pytest.raises(AssertionError, match="gradient"):
        assert_op_matches(op, "triton", args, **FLOAT32, vmap_grad=False)


@pytest.mark.parametrize(("form", "widest"), [("_launch_backward", 8192), ("_launch_d_scores", 0)])
def test_a_merge_that_leaves_its_result_out_is_found_in_bfloat16(
    form: str, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, at = getattr(merging, form), {"_launch_backward": 4, "_launch_d_scores": 2}[form]

    def off(*operands: Tensor) -> tuple[Tensor, ...]:
        return launch(*(0 * x if i == at else x for i, x in enumerate(operands)))

    monkeypatch.setattr(merging, "_WIDEST", widest)
    monkeypatch.setattr(merging, form, off)
    with pytest.raises(AssertionError, match="over its bound"):
        assert_bfloat16_merge(running(dtype=torch.bfloat16), 1e-5)
