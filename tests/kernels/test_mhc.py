"""The hyper-connection ops against golden values, the equations written out, and hard Sinkhorn
inputs.
"""

from pathlib import Path

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k31fn.autodiff import vjp
from k31fn.kernels.mhc_post import mhc_post
from k31fn.kernels.mhc_pre import Pre, mhc_head, mhc_pre, sinkhorn

GOLDEN = Path(__file__).parents[1] / "golden" / "mhc.safetensors"
EPS = 1e-6


def arguments(
    n: int, dtype: torch.dtype = torch.float64, d: int = 5, t: int = 3
) -> tuple[Tensor, ...]:
    """Streams, phi, scale and base."""
    columns = 2 * n + n * n
    shapes = ((2, t, n, d), (n * d, columns), (3,), (columns,))
    x, *params = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    return x.to(dtype), *params


def one_token(
    x: Tensor,
    f: Tensor,
    phi: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    mistake: str = "",
) -> tuple[Tensor, Tensor]:
    """What the sublayer reads and the next streams ``[N D]`` of one token, in loops over
    streams.
    """
    n, d = x.shape
    rms = (
        sum(float(v) ** 2 for v in x.flatten()) / (n * d) + (1e-2 if mistake == "eps" else EPS)
    ) ** 0.5
    a = [
        sum(x[i] @ phi[i * d : (i + 1) * d, c] for i in range(n)) / rms
        for c in range(2 * n + n * n)
    ]
    part = [0] * n + [1] * n + [2] * n * n
    a = [scale[part[c]] * a[c] + base[c] for c in range(len(a))]
    h_pre = [1 / (1 + torch.exp(-v)) + 1e-6 for v in a[:n]]
    h_post = [(1 if mistake == "post" else 2) / (1 + torch.exp(-v)) for v in a[n : 2 * n]]
    m = torch.stack(a[2 * n :]).view(n, n)
    m = torch.exp(m) / torch.exp(m).sum(1, keepdim=True) + 1e-6
    for k in range(iterations):
        if k:
            m = torch.stack([m[i] / (m[i].sum() + 1e-6) for i in range(n)])
        m = torch.stack([m[:, j] / (m[:, j].sum() + 1e-6) for j in range(n)], 1)
    if mistake == "transposed":
        m = m.T
    y = sum(h_pre[i] * x[i] for i in range(n))
    return y, torch.stack([h_post[j] * f + sum(m[i, j] * x[i] for i in range(n)) for j in range(n)])


def test_golden() -> None:
    """5e-6: what a correct float32 implementation meets."""
    g = load_file(GOLDEN)
    names = ("x", "f_out", "fn", "scale", "base", "head_fn", "head_scale", "head_base")

    def everything(
        x: Tensor, f: Tensor, fn: Tensor, s: Tensor, b: Tensor, *head: Tensor
    ) -> tuple[Tensor, ...]:
        pre = mhc_pre(x, fn.mT, s, b, EPS, 20)
        after = mhc_post(pre.x, f, pre.h_post, pre.h_res)
        return pre.y, pre.h_post, pre.h_res, after, mhc_head(x, head[0].mT, *head[1:], EPS)

    out, pull = vjp(everything, *(g[f"in.{name}"] for name in names))
    for actual, name in zip(
        out, ("pre.y", "pre.h_post", "pre.h_res", "post.x_next", "head.y"), strict=True
    ):
        torch.testing.assert_close(actual, g[name], atol=5e-6, rtol=0)
    upstream = (g["upstream.pre_y"], out[1].new_zeros(out[1].shape), out[2].new_zeros(out[2].shape))
    for actual, name in zip(
        pull((*upstream, g["upstream.x_next"], g["upstream.head_y"])), names, strict=True
    ):
        expected = g[f"grad.{name}"]
        assert (actual - expected).norm() <= 5e-6 * expected.norm(), name


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 3])
def test_equals_the_equations(n: int, iterations: int) -> None:
    x, phi, scale, base = arguments(n)
    f = torch.randn(2, 3, 5, dtype=torch.float64)
    pre = mhc_pre(x, phi, scale, base, EPS, iterations)
    after = mhc_post(pre.x, f, pre.h_post, pre.h_res)
    for b in range(2):
        for t in range(3):
            y, expected = one_token(x[b, t], f[b, t], phi, scale, base, iterations)
            torch.testing.assert_close(pre.y[b, t], y, atol=1e-12, rtol=0)
            torch.testing.assert_close(after[b, t], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mistake", ["eps", "post", "transposed"])
def test_mistakes_show(mistake: str) -> None:
    x, phi, scale, base = arguments(4)
    f = torch.randn(2, 3, 5, dtype=torch.float64)
    pre = mhc_pre(x, phi, scale, base, EPS, 20)
    after = mhc_post(pre.x, f, pre.h_post, pre.h_res)
    assert (
        after[0, 0] - one_token(x[0, 0], f[0, 0], phi, scale, base, 20, mistake)[1]
    ).abs().max() > 1e-3


def test_the_head_is_the_read_alone() -> None:
    x, phi, scale, base = arguments(4)
    y = mhc_head(x, phi[:, :4], scale[:1], base[:4], EPS)
    torch.testing.assert_close(y, mhc_pre(x, phi, scale, base, EPS, 20).y, atol=1e-12, rtol=0)


def log_sinkhorn(a: Tensor, iterations: int) -> Tensor:
    """The paper's form with no eps, in the log domain."""
    for _ in range(iterations):
        a = a - torch.logsumexp(a, -1, keepdim=True)
        a = a - torch.logsumexp(a, -2, keepdim=True)
    return a.exp()


def test_sinkhorn_nears_the_form_without_eps() -> None:
    """The same alternation but for eps, which moves a matrix of ordinary entries by less than
    1e-4.
    """
    a = torch.randn(7, 4, 4, dtype=torch.float64)
    m = sinkhorn(a, 20)
    assert (m - log_sinkhorn(a, 20)).abs().max() < 1e-4
    assert (m.sum(-2) - 1).abs().max() < 3e-6  # columns are normalised last
    assert (m.sum(-1) - 1).abs().max() < 1e-2
    assert (sinkhorn(a, 2) - m).abs().max() > 1e-3


def test_sinkhorn_far_off_the_diagonal() -> None:
    """-200 nearly everywhere: in float32 the exponentials of the plain form are 0, and its rows
    divide 0 by 0.
    """
    a = torch.full((4, 4), -200.0)
    a[0, 0] = 0.0
    plain = a.exp()
    for _ in range(2):
        plain = plain / plain.sum(-1, keepdim=True)
        plain = plain / plain.sum(-2, keepdim=True)
    assert plain.isnan().any()
    m, pull = vjp(lambda a: sinkhorn(a, 20), a)
    assert m.isfinite().all()
    assert pull(torch.randn(4, 4))[0].isfinite().all()
    for off in (-2.0, -200.0):
        diagonal = torch.full((4, 4), off, dtype=torch.float64).fill_diagonal_(0.0).requires_grad_()
        assert torch.autograd.gradcheck(lambda a: sinkhorn(a, 20), (diagonal,))
        torch.testing.assert_close(
            sinkhorn(diagonal.float(), 20).double(), sinkhorn(diagonal, 20), atol=1e-6, rtol=0
        )


def test_first_derivatives() -> None:
    x, phi, scale, base = arguments(2, d=2, t=1)
    f = torch.randn(2, 1, 2, dtype=torch.float64)

    def both(*args: Tensor) -> tuple[Tensor, Tensor]:
        *given, f = args
        pre = mhc_pre(*given, EPS, 2)
        return pre.y, mhc_post(pre.x, f, pre.h_post, pre.h_res)

    leaves = tuple(
        a.requires_grad_() for a in (x[:1].detach().clone(), phi, scale, base, f[:1].clone())
    )
    assert torch.autograd.gradcheck(both, leaves)


def test_coefficients_in_float32_and_streams_rounded_once() -> None:
    """bfloat16 streams give the float64 result of the same numbers, rounded: at most one in a
    thousand off by one.
    """
    x, phi, scale, base = arguments(4, torch.bfloat16, d=64)
    f = torch.randn(2, 3, 64).bfloat16()
    narrow = mhc_pre(x, *(p.float() for p in (phi, scale, base)), EPS, 20)
    wide = mhc_pre(x.double(), phi, scale, base, EPS, 20)
    assert {t.dtype for t in (narrow.y, narrow.x)} == {torch.bfloat16}
    assert {t.dtype for t in (narrow.h_post, narrow.h_res)} == {torch.float32}
    assert (narrow.y != wide.y.bfloat16()).float().mean() < 1e-3
    after = mhc_post(x, f, narrow.h_post, narrow.h_res)
    expected = mhc_post(x.double(), f.double(), narrow.h_post.double(), narrow.h_res.double())
    assert after.dtype == torch.bfloat16
    assert (after != expected.bfloat16()).float().mean() < 1e-3


def test_only_the_arguments_are_kept() -> None:
    x, phi, scale, base = arguments(4, torch.bfloat16, d=64)
    leaves = [
        x.requires_grad_(),
        phi.float().requires_grad_(),
        scale.float().requires_grad_(),
        base.float().requires_grad_(),
    ]
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    f = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        pre: Pre = mhc_pre(*leaves, EPS, 20)
        after = mhc_post(pre.x, f, pre.h_post, pre.h_res)
    given = {t.untyped_storage().data_ptr() for t in (*leaves, f)}
    assert after.requires_grad
    assert (
        sum(n for pointer, n in kept.items() if pointer not in given) <= 2 * 3 * (4 + 16) * 4
    )  # h_post and h_res


def test_wrong_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where annotations are not checked; the scale of a head would be broadcast."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    x, phi, scale, base = arguments(4)
    with pytest.raises(ValueError, match=r"scale \[1\] and base \[4\], got .* scale \[3\]"):
        mhc_head(x, phi[:, :4], scale, base[:4], EPS)
    with pytest.raises(
        ValueError, match=r"mhc_pre: .* scale \[3\] and base \[24\], got .* scale \[2\]"
    ):
        mhc_pre(x, phi, scale[:2], base, EPS, 20)


def test_wrong_sizes() -> None:
    x, phi, scale, base = arguments(4)
    with pytest.raises(ValueError, match=r"4 streams of width 5 need phi \[20, 24\]"):
        mhc_pre(x, phi.mT, scale, base, EPS, 20)
    with pytest.raises(ValueError, match=r"mhc_head: .* phi \[20, 4\], scale \[1\] and base \[4\]"):
        mhc_head(x, phi, scale[:1], base, EPS)
    with pytest.raises(ValueError, match="iterations=0"):
        sinkhorn(torch.zeros(2, 2), 0)


def test_sinkhorn_of_large_inputs_keeps_its_columns_and_nearly_its_rows() -> None:
    m = sinkhorn(torch.randn(50_000, 4, 4, dtype=torch.float64) * 30, 20)
    assert (m.sum(-2) - 1).abs().max() < 2e-6
    assert 0.05 < (m.sum(-1) - 1).abs().max() < 0.1
