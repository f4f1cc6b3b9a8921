"""AttnRes against golden values, and an independent form in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn.autodiff import vjp
from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.attn_res.reference import _mix

GOLDEN = Path(__file__).parents[1] / "golden" / "attnres.safetensors"
EPS = 1e-5


def naive(
    sources: tuple[Tensor, ...],
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    raw: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """The equations on one stacked tensor; ``raw=False`` and ``scale`` are mistakes to tell
    apart.
    """
    v = torch.stack(sources)
    normed = v / torch.sqrt((v**2).sum(-1, keepdim=True) / v.shape[-1] + eps)
    scores = torch.einsum("nbtd,d->nbt", normed * norm_weight, query) * scale
    return torch.einsum(
        "nbt,nbtd->btd", torch.exp(scores - torch.logsumexp(scores, 0)), v if raw else normed
    )


def inputs(
    num_sources: int, dtype: torch.dtype = torch.float64, d: int = 7, t: int = 5
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    sources = tuple(torch.randn(2, t, d, dtype=dtype) for _ in range(num_sources))
    return sources, torch.randn(d, dtype=dtype), 1 + 0.3 * torch.randn(d, dtype=dtype)


def value_and_grads(
    f: Callable[..., Tensor], args: tuple[object, ...], ct: Tensor
) -> tuple[Tensor, ...]:
    out, pull = vjp(lambda s, r, n: f(s, r, n, EPS), *args)
    d_sources, d_query, d_norm = pull(ct)
    return out, *d_sources, d_query, d_norm


def worst(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("num_sources", [1, 2, 5])
def test_golden(num_sources: int) -> None:
    """5e-6: what a correct float32 implementation meets; gradients of up to 40 are held to it
    relatively.
    """
    g = {
        k.removeprefix(f"n{num_sources}."): v
        for k, v in load_file(GOLDEN).items()
        if k[1] == str(num_sources)
    }
    args = (tuple(g["sources"][:, None]), g["query"], g["norm_weight"])
    out, *d_sources, d_query, d_norm = value_and_grads(attn_res, args, g["upstream"][None])
    torch.testing.assert_close(out[0], g["out"], atol=5e-6, rtol=5e-6)
    for name, actual in {
        "sources": torch.stack(d_sources)[:, 0],
        "query": d_query,
        "norm_weight": d_norm,
    }.items():
        expected = g[f"grad.{name}"]
        assert (actual - expected).norm() <= 5e-6 * max(1.0, float(expected.norm())), name
    mix = _mix(args[0], g["query"] * g["norm_weight"], EPS)
    torch.testing.assert_close(torch.softmax(mix.scores, 0)[:, 0], g["probs"], atol=5e-6, rtol=0)


@pytest.mark.parametrize("num_sources", [1, 2, 3, 9])
def test_equals_the_equations(num_sources: int) -> None:
    args, ct = inputs(num_sources), torch.randn(2, 5, 7, dtype=torch.float64)
    expected = value_and_grads(naive, args, ct)
    assert worst(value_and_grads(attn_res, args, ct), expected) < 1e-12
    if num_sources > 1:  # values are raw, and the scores have no scale
        for broken in ({"raw": False}, {"scale": 7**-0.5}):
            assert worst((naive(*args, EPS, **broken),), expected[:1]) > 1e-2


def test_second_derivatives() -> None:
    sources, query, norm = inputs(3, d=3)
    small = (x[:1, :2].clone() for x in sources)
    leaves = tuple(x.requires_grad_() for x in (*small, query, norm))

    def f(a: Tensor, b: Tensor, c: Tensor, r: Tensor, n: Tensor) -> Tensor:
        return attn_res((a, b, c), r, n, EPS)

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("batched", [(0,), (2,), (3,), (4,), (0, 1, 2, 3, 4)])
def test_vmap_over_any_argument(batched: tuple[int, ...]) -> None:
    """Whichever argument alone is batched, values and gradients are those of a loop."""
    flat = [*inputs(3)[0], *inputs(1)[1:]]
    args = [torch.stack([x, 1.5 * x, -x]) if i in batched else x for i, x in enumerate(flat)]

    def grads(*leaves: Tensor) -> tuple[Tensor, ...]:
        def f(*leaves: Tensor) -> Tensor:
            return attn_res(leaves[:3], *leaves[3:], EPS).square().sum()

        return torch.func.grad(f, argnums=tuple(range(5)))(*leaves)

    together = torch.func.vmap(grads, in_dims=tuple(0 if i in batched else None for i in range(5)))(
        *args
    )
    for sample in range(3):
        alone = grads(*(x[sample] if i in batched else x for i, x in enumerate(args)))
        assert worst(tuple(t[sample] for t in together), alone) < 1e-12


def test_eps_matters_at_small_inputs() -> None:
    """A sum of 1e-3 has a mean square below eps: the wrong eps must show."""
    (a, b), query, norm = inputs(2)
    out = attn_res((1e-3 * a, b), query, norm, 1e-5)
    assert worst((out,), (naive((1e-3 * a, b), query, norm, 1e-5),)) < 1e-12
    assert worst((attn_res((1e-3 * a, b), query, norm, 1e-6),), (out,)) > 1e-2


def test_zero_rows_and_large_scores_stay_finite() -> None:
    """A row of zeros, and scores of 1e5, whose exponentials overflow float32."""
    (a, b, c), query, norm = inputs(3, torch.float32)
    args = ((torch.zeros_like(a), b, c), 1e5 * query, norm)
    assert all(x.isfinite().all() for x in value_and_grads(attn_res, args, torch.ones_like(a)))


def test_scores_and_mix_in_float32_rounded_once() -> None:
    """bfloat16 sources give the float32 mix of the same numbers, rounded; mixing in bfloat16 would
    not.
    """
    sources, query, norm = inputs(4, torch.bfloat16, d=64)
    wide = naive(tuple(s.double() for s in sources), query.double(), norm.double(), EPS)
    # One float32 rounding before the last one can move a value to the neighbouring bfloat16: allow
    # one in a thousand.
    out = attn_res(sources, query, norm, EPS)
    assert out.dtype == torch.bfloat16
    assert (out != wide.bfloat16()).float().mean() < 1e-3
    assert (naive(sources, query, norm, EPS) != wide.bfloat16()).float().mean() > 0.1


def test_no_copy_of_a_source_is_kept() -> None:
    """Besides the sources themselves: a few numbers per token."""
    sources, query, norm = inputs(5, torch.bfloat16, d=512, t=16)
    leaves = [x.requires_grad_() for x in sources]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.dtype.is_floating_point and not any(x is leaf for leaf in leaves):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attn_res(tuple(leaves), query, norm, EPS)
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    extra = sum(n for pointer, n in kept.items() if pointer not in own)
    source = leaves[0].numel() * leaves[0].element_size()
    assert out.requires_grad
    assert extra <= source / 2


def test_no_source() -> None:
    with pytest.raises(ValueError, match="nothing to mix"):
        attn_res((), torch.zeros(3), torch.ones(3), EPS)
