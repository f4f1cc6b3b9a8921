"""The fused residual attention against the reference in float64: values, gradients, vmap, and what
it refuses.

Tolerances: sums of D float32 products differ by some sqrt(D) units of 2^-24; 2e-6 for D < 100
leaves a factor of 3, and gradients, products of two such sums, get 1e-5. bfloat16 results are
rounded once, to 2^-9; the interpreter cuts instead of rounding, so 2^-8, and as much again for a
gradient's own cast. What gradients of bfloat16 are off by since the backward takes the rounded
result is derived in :mod:`tests.kernels.attn_res_rounding`. Weights of size 1 make the
softmax choose one source, and gradients that cancel: no limit holds for all draws, and draws change
with the device. Where that matters the query is scaled by D^-1/2, as a model's is, and gradients
are within 1e-5 of their largest component (of 300 draws the reference was off by 2e-6 at most, the
kernels by 3e-6).
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn.autodiff import remat, vjp
from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.launch import Tile
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.testing import assert_op_matches
from tests.kernels.attn_res_rounding import ROUNDING, assert_within, of_one_pass
from tests.kernels.fused import DEVICE, poisoned

kernels = pytest.importorskip("k31fn.kernels.attn_res.triton.one_pass", exc_type=ImportError)
GOLDEN = Path(__file__).parents[1] / "golden" / "attnres.safetensors"
EPS = 1e-5
FLOAT32 = {"rtol": 2e-6, "atol": 2e-6, "grad_rtol": 1e-5, "grad_atol": 1e-5}


def inputs(
    n: int, width: int = 37, tokens: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[object, ...]:
    sources = tuple(torch.randn(2, tokens, width, device=DEVICE).to(dtype) for _ in range(n))
    return (
        sources,
        torch.randn(width, device=DEVICE),
        1 + 0.3 * torch.randn(width, device=DEVICE),
        EPS,
    )


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that cannot hold a token: 37 features in pieces of 16."""
    cut = Tile(columns=16, per_core=2)
    monkeypatch.setitem(kernels._TILES, DEVICE, (cut, cut))


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a program cannot hold all sources of a token."""
    monkeypatch.setattr(kernels, "_HELD", 0)


@pytest.mark.parametrize("n", [1, 3, pytest.param(12, marks=pytest.mark.slow)])
def test_equals_the_reference(n: int) -> None:
    with poisoned():
        assert_op_matches(attn_res, "triton", inputs(n), **FLOAT32, reference_dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 3, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("streamed")
def test_streamed_equals_the_reference(n: int) -> None:
    with poisoned():
        assert_op_matches(attn_res, "triton", inputs(n), **FLOAT32, reference_dtype=torch.float64)


@pytest.mark.parametrize("n", [3])
@pytest.mark.usefixtures("in_pieces")
def test_pieces_equal_the_reference(n: int) -> None:
    with poisoned():
        assert_op_matches(attn_res, "triton", inputs(n), **FLOAT32, reference_dtype=torch.float64)


def assert_bfloat16(args: tuple[object, ...], own: float) -> None:
    """Values, gradients and ``vmap(grad)`` of bfloat16 sources; ``own``: of gradients in float32,
    relative.
    """
    sources, query, norm, eps = args
    leaves, n = [*sources, query, norm], len(sources)
    ct = torch.randn_like(sources[0])

    def out_and_gradients(impl: str, *leaves: Tensor) -> tuple[Tensor, ...]:
        with use_impl(attn_res=impl):
            out, pull = vjp(lambda *x: attn_res(x[:n], *x[n:], eps), *leaves)
        return out, *pull(ct.to(out.dtype))

    for i, found in enumerate(
        (
            out_and_gradients("triton", *leaves),
            [
                x[1]
                for x in torch.func.vmap(functools.partial(out_and_gradients, "triton"))(
                    *(torch.stack([x, 0.75 * x]) for x in leaves)
                )
            ],
        )
    ):
        given = [(0.75 if i else 1.0) * x for x in leaves]
        exact = out_and_gradients("reference", *(x.double() for x in given))
        torch.testing.assert_close(found[0].double(), exact[0], rtol=ROUNDING, atol=ROUNDING)
        assert_within(found[1:], exact[1:], of_one_pass(given[:n], *given[n:], eps, ct), own)


@pytest.mark.parametrize("n", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_bfloat16(n: int) -> None:
    assert_bfloat16(inputs(n, dtype=torch.bfloat16), 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("streamed")
def test_streamed_bfloat16() -> None:
    assert_bfloat16(inputs(3, dtype=torch.bfloat16), 1e-5)


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_golden(n: int) -> None:
    g = {
        k.removeprefix(f"n{n}."): v.to(DEVICE)
        for k, v in load_file(GOLDEN).items()
        if k[1] == str(n)
    }
    with use_impl(attn_res="triton"):
        args = (tuple(g["sources"][:, None]), g["query"], g["norm_weight"])
        out, pull = vjp(lambda s, q, w: attn_res(s, q, w, EPS), *args)
    torch.testing.assert_close(out[0], g["out"], atol=5e-6, rtol=5e-6)
    d_sources, d_query, d_norm = pull(g["upstream"][None])
    for name, actual in (
        ("sources", torch.cat(d_sources)),
        ("query", d_query),
        ("norm_weight", d_norm),
    ):
        expected = g[f"grad.{name}"]
        assert (actual - expected).norm() <= 5e-6 * max(1.0, float(expected.norm())), name


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 2, 5, 9, 12])
def test_at_full_width(n: int) -> None:
    """The width of K3.1, and more tokens than programs."""
    sources, query, norm, eps = inputs(n, width=7168, tokens=301, dtype=torch.bfloat16)
    args = (sources, query * 7168**-0.5, norm, eps)
    with poisoned():
        assert_bfloat16(args, 1e-4)


ODD = dict.fromkeys(((0, 16), (1, 33), (7, 1)), ())
ODD |= {(n, d): pytest.mark.slow for n in (0, 1, 7) for d in (1, 16, 33) if (n, d) not in ODD}


@pytest.mark.parametrize(
    ("tokens", "width"), [pytest.param(*size, marks=marks) for size, marks in ODD.items()]
)
def test_odd_sizes(tokens: int, width: int) -> None:
    assert_op_matches(attn_res, "triton", inputs(2, width, tokens), **FLOAT32, vmap_grad=False)


def test_fresh_inputs_and_large_scores() -> None:
    """Inputs of different scales; scores of 1e4 overflow a plain exponential.

    Gradients in proportion.
    """
    for i in range(20) if DEVICE == "cuda" else (1, 4):
        sources, query, norm, eps = inputs(3)
        args = (
            tuple(10.0 ** (i % 3 - 1) * s for s in sources),
            10.0 ** (i % 5 - 1) * query,
            norm,
            eps,
        )
        limit = 1e-5 * 10.0 ** max(0, i % 5 - 1)
        assert_op_matches(
            attn_res,
            "triton",
            args,
            rtol=limit,
            atol=limit,
            grad_rtol=10 * limit,
            grad_atol=10 * limit,
            vmap_grad=False,
            reference_dtype=torch.float64,
        )


def gradients(f, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    def loss(*leaves: Tensor) -> Tensor:
        with use_impl(attn_res=f):
            return attn_res(leaves[:2], *leaves[2:], EPS).square().sum()

    return torch.func.grad(loss, argnums=(0, 1, 2, 3))(*leaves)


def assert_gradients(found: Sequence[Tensor | tuple[()]], leaves: list[Tensor]) -> None:
    """Gradients of all leaves, or of some, () for the others, against those of float64."""
    exact = gradients("reference", [x.double() for x in leaves])
    for ours, theirs in zip(found, exact, strict=True):
        if isinstance(ours, Tensor):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    "batched",
    [(2,), (0, 1), *(pytest.param(some, marks=pytest.mark.slow) for some in ((0,), (0, 1, 2, 3)))],
)
def test_vmap_over_any_argument(batched: tuple[int, ...]) -> None:
    """Whichever argument alone is batched, gradients are those of a loop; of a shared weight, one
    per sample.
    """
    sources, query, norm, _ = inputs(2)
    flat = [*sources, query * 37**-0.5, norm]
    args = [torch.stack([x, 1.5 * x, -x]) if i in batched else x for i, x in enumerate(flat)]
    dims = tuple(0 if i in batched else None for i in range(4))
    with record_impls() as ran:
        together = torch.func.vmap(lambda *x: gradients("triton", list(x)), in_dims=dims)(*args)
    assert ran == {("attn_res", "triton"): 1}
    for sample in range(3):
        alone = [x[sample] if i in batched else x for i, x in enumerate(args)]
        assert_gradients([g[sample] for g in together], alone)


def test_nested_vmap_and_jacobian() -> None:
    (source, other), query, norm, _ = inputs(2, width=5, tokens=1)

    def mix(s: Tensor, q: Tensor) -> Tensor:
        return attn_res((s, other), q, norm, EPS)

    found = []
    for impl in ("triton", "reference"):
        with use_impl(attn_res=impl):
            grid = torch.func.vmap(torch.func.vmap(mix, (0, None)), (None, 0))
            found.append(
                grid(torch.stack([source, -source]), torch.stack([query, 2 * query, -query]))
            )
            found.append(torch.func.jacrev(mix, (0, 1))(source, query))
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_twenty_runs_are_bit_identical() -> None:
    """More tokens than programs, so that a program's sums run over several."""
    sources, query, norm, _ = inputs(3, tokens=600 if DEVICE == "cuda" else 5)
    seen = []
    for _ in range(20 if DEVICE == "cuda" else 2):
        with use_impl(attn_res="triton"):
            out, pull = vjp(lambda s, q, n: attn_res(s, q, n, EPS), sources, query, norm)
        d_sources, d_query, d_norm = pull(torch.ones_like(out))
        seen.append((out, *d_sources, d_query, d_norm))
    for run in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, seen[0], strict=True))


def test_first_order_only_and_under_remat() -> None:
    sources, query, norm, _ = inputs(2)
    query = query * 37**-0.5
    with use_impl(attn_res="triton"):
        loss = remat(lambda q: attn_res(sources, q, norm, EPS).square().sum())
        first = torch.func.grad(loss)(query)
        with pytest.raises(
            RuntimeError, match=r"attn_res \(triton\) is first order only.*reference implementation"
        ):
            torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(query)
    assert_gradients([(), (), first, ()], [*sources, query, norm])


def test_refusals() -> None:
    (source, other), query, norm, _ = inputs(2, width=3)
    wide = torch.zeros(1, 1, kernels._WIDEST + 1, device=DEVICE)
    with use_impl(attn_res="triton"):
        for sources, reason in (
            ((source,) * 13, "1 to 12 sources, got 13"),
            ((source, other.bfloat16()), "have one dtype"),
            ((source, source[:, :1]), "have one shape"),
            ((source.double(), other.double()), "got torch.float64"),
            ((wide,), "at most 16384 features, got 16385"),
            ((source[0], other[0]), r"one shape \[B, T, D\], .* got \[3\], \[3\], \[3, 3\]"),
            ((source[..., :0], other[..., :0]), r"one shape \[B, T, D\]"),
        ):
            with pytest.raises(ValueError, match=reason):
                attn_res(sources, query, norm, EPS)
        with pytest.raises(
            ValueError, match=r"query and norm_weight \[D\], got \[2, 3\], \[2, 3\], \[2, 3, 3\]"
        ):
            attn_res((source, other), query.expand(2, 3), norm.expand(2, 3), EPS)


@pytest.mark.parametrize("form", ["_launch_backward_whole", "_launch_backward"])
def test_a_wrong_gradient_is_found(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient scaled by 1.01."""
    monkeypatch.setattr(kernels, "_HELD", kernels._HELD if form.endswith("whole") else 0)
    launch = getattr(kernels, form)

    def off(*operands: Tensor) -> tuple[Tensor, ...]:
        first, *rest = launch(*operands)
        return 1.01 * first, *rest

    monkeypatch.setattr(kernels, form, off)
    with pytest.raises(AssertionError, match="gradient"):
        assert_op_matches(attn_res, "triton", inputs(2), **FLOAT32)


@pytest.mark.parametrize("factor", [pytest.param(0.0, marks=pytest.mark.slow), 1.1])
@pytest.mark.usefixtures("streamed")
def test_a_wrong_mean_term_is_found_in_bfloat16(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``<ct, out>`` left out, or a tenth too large."""
    launch = kernels._launch_backward

    def off(*operands: Tensor) -> tuple[Tensor, ...]:
        *before, out, ct = operands
        return launch(*before, factor * out, ct)

    monkeypatch.setattr(kernels, "_launch_backward", off)
    with pytest.raises(AssertionError, match="over its bound"):
        assert_bfloat16(inputs(3, dtype=torch.bfloat16), 1e-5)


def test_nothing_is_kept_but_sources_result_and_two_numbers_per_source() -> None:
    (source, other), query, norm, _ = inputs(2, dtype=torch.bfloat16, width=64)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    leaf = source.requires_grad_()
    with use_impl(attn_res="triton"), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attn_res((leaf, other), query, norm, EPS)
    own = {x.untyped_storage().data_ptr() for x in (leaf, other, query, norm)}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    rest = sum(size for at, size in sizes.items() if at not in own)
    assert (
        rest <= out.numel() * 2 + 4 * (2 * 2 * out.shape[0] * out.shape[1]) + 3 * 4 * 64
    )  # and the key
