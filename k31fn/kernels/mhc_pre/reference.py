"""Plain torch form of the read of hyper-connected streams."""

from __future__ import annotations

from typing import NamedTuple

import torch

from k31fn.autodiff.remat import remat
from k31fn.precision import island, upcast
from k31fn.typing import Float, Tensor

__all__ = ["SINKHORN_EPS", "Pre", "mhc_head", "mhc_pre", "sinkhorn"]

SINKHORN_EPS = 1e-6
"""Added to ``h_pre``, to the softmax that Sinkhorn starts from, and in each of its divisions."""


class Pre(NamedTuple):
    """Result of :func:`mhc_pre`; the last three are the arguments of ``mhc_post`` beside the
    sublayer's output.
    """

    y: Tensor
    x: Tensor
    h_post: Tensor
    h_res: Tensor


def mhc_pre(
    x: Float[Tensor, "B T N D"],
    phi: Float[Tensor, "ND C"],
    scale: Float[Tensor, "3"],
    base: Float[Tensor, "C2"],
    eps: float,
    iterations: int,
) -> Pre:
    """The sublayer's input, the streams handed through, and how they go on.

    Raises:
        ValueError: ``phi``, ``scale`` or ``base`` is not that of so many streams.
    """
    streams = x.shape[-2]
    _check("mhc_pre", x, (phi, scale, base), 2 * streams + streams**2, 3)
    # computed again in the backward: Sinkhorn's steps would keep 2 x iterations matrices a token
    y, h_post, h_res = remat(_pre)(x, phi, scale, base, eps, iterations)
    return Pre(y, x, h_post, h_res)


def mhc_head(
    x: Float[Tensor, "B T N D"],
    phi: Float[Tensor, "ND C"],
    scale: Float[Tensor, "1"],
    base: Float[Tensor, "C2"],
    eps: float,
) -> Float[Tensor, "B T D"]:
    """The read before the final norm.

    Raises:
        ValueError: ``phi``, ``scale`` or ``base`` is not that of so many streams.
    """
    _check("mhc_head", x, (phi, scale, base), x.shape[-2], 1)
    return remat(_head)(x, phi, scale, base, eps)


def sinkhorn(a: Float[Tensor, "*rows N N2"], iterations: int) -> Float[Tensor, "*rows N N2"]:
    """Nearly doubly stochastic matrices: columns sum to 1, rows within some 0.1 for large ``a``.

    Raises:
        ValueError: fewer than one iteration.
    """
    if iterations < 1:
        raise ValueError(
            f"sinkhorn: iterations={iterations} leave the columns as they are; use 1 or more"
        )
    m = torch.softmax(a, -1) + SINKHORN_EPS
    # the first iteration is half done: a softmax's rows sum to 1
    m = m / (m.sum(-2, keepdim=True) + SINKHORN_EPS)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + SINKHORN_EPS)
        m = m / (m.sum(-2, keepdim=True) + SINKHORN_EPS)
    return m


def _pre(
    x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-2]
    z_pre, z_post, z_res = _project(x, phi, eps).split((n, n, n * n), -1)
    b_pre, b_post, b_res = base.to(z_pre.dtype).split((n, n, n * n))
    s_pre, s_post, s_res = scale.to(z_pre.dtype)
    h_post = 2 * torch.sigmoid(s_post * z_post + b_post)
    h_res = sinkhorn((s_res * z_res + b_res).unflatten(-1, (n, n)), iterations)
    return _weighted(x, s_pre * z_pre + b_pre), h_post, h_res


def _head(x: Tensor, phi: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    wide = island(x.dtype)
    return _weighted(x, scale.to(wide) * _project(x, phi, eps) + base.to(wide))


def _project(x: Tensor, phi: Tensor, eps: float) -> Tensor:
    flat = upcast(x).flatten(-2)
    # the product first: the norm is one number a token, and is not multiplied into N D features
    return (flat @ phi.to(flat.dtype)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _weighted(x: Tensor, a: Tensor) -> Tensor:
    h_pre = torch.sigmoid(a) + SINKHORN_EPS
    # summed over the streams in float32, rounded once
    return torch.einsum("btn,btnd->btd", h_pre, upcast(x)).to(x.dtype)


def _check(
    name: str, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], columns: int, scales: int
) -> None:
    streams, width = x.shape[-2:]
    shapes = [list(w.shape) for w in weights]
    wanted = [[streams * width, columns], [scales], [columns]]
    if shapes != wanted:
        text = "phi {}, scale {} and base {}"
        raise ValueError(
            f"{name}: {streams} streams of width {width} need {text.format(*wanted)}, got "
            f"{text.format(*shapes)}"
        )
