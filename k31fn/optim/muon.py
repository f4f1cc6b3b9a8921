"""Muon (Jordan 2024): momentum whose matrices are orthogonalised.

Scale and decoupled decay are those of Moonlight (Liu et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from k31fn import tree
from k31fn.optim.transform import Leaves, Transform
from k31fn.parallel import Axis, all_gather_invariant, all_to_all, pslice
from k31fn.parallel.fsdp import Placements
from k31fn.params import ParamSpec
from k31fn.typing import Bool, Float, Tensor

__all__ = ["MuonState", "muon", "orthogonalize"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RMS = 0.2  # root mean square of an update: that of AdamW, so both share learning rate and decay


@tree.dataclass
class MuonState:
    """Everything that Muon remembers.

    Attributes:
        momentum: like the stepped parameters; at least float32.
        master: float32 copies of the parameters that are narrower.
    """

    momentum: Any
    master: Any


def muon(
    specs: Any,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    placements: Placements = (),
) -> Transform:
    """Muon on the leaves tagged ``matrix`` that are not ``frozen``; combine it with AdamW for the others.

    With momentum b, for each matrix of a leaf::

        m <- b m + g
        p <- (1 - lr weight_decay) p - lr 0.2 sqrt(max(rows, columns)) orthogonalize(g + b m)

    without the decay on leaves tagged ``no_decay``. A leaf ``[..., in, out]`` is a batch of matrices (experts); one
    tagged ``per_head`` is a matrix ``[in, head_dim]`` per head, cut along ``out``.

    With ``placements``, parameters, gradients and state are one rank's parts. The matrices of one leaf at a time are
    put together over the axes that split them, and the result is cut again: dealt out among those ranks where there is
    one for each, else every one of them does the same work. Parts that hold whole matrices (of some experts, of some
    heads) stay where they are.

    Args:
        specs: the tree of ParamSpecs.
        momentum: b.
        weight_decay: decoupled.
        ns_steps: of :func:`orthogonalize`.
        placements: of the parameters (:mod:`k31fn.parallel.fsdp`); ``()``: they are whole.

    Raises:
        ValueError: a number out of its range, a ``matrix`` leaf with fewer than two dimensions, or a ``per_head`` leaf
            that ``head_dim`` does not divide.
    """
    if not (0 <= momentum < 1 and weight_decay >= 0 and ns_steps >= 1):
        raise ValueError(
            f"momentum={momentum} must be in [0, 1), weight_decay={weight_decay} >= 0, ns_steps={ns_steps} >= 1"
        )
    leaves = Leaves(specs, lambda _, spec: "matrix" in spec.tags)
    heads = [_head_dim(path, spec) for path, spec in zip(leaves.paths, leaves.specs, strict=True)]
    decays = [0.0 if "no_decay" in spec.tags else weight_decay for spec in leaves.specs]
    if placements:
        splits = [place.dims for place in leaves.of_params(placements)]
    else:
        splits = [((),) * len(spec.shape) for spec in leaves.specs]

    def init(params: Any) -> MuonState:
        masters = leaves.masters(params, kept := leaves.init_masters(params))
        return MuonState(leaves.to_tree([torch.zeros_like(m) for m in masters]), kept)

    def scaled(x: Float[Tensor, "matrices rows columns"]) -> Float[Tensor, "matrices rows columns"]:
        return _RMS * math.sqrt(max(x.shape[1:])) * orthogonalize(x, steps=ns_steps)

    def step(
        p: Tensor, g: Tensor, m: Tensor, head: int, split: _Split, decay: float, lr: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        m = momentum * m + g
        return (1 - lr * decay) * p - lr * _on_matrices(scaled, g + momentum * m, head, split), m

    def update(
        grads: Any,
        state: MuonState,
        params: Any,
        *,
        lr: float | Tensor,
        skip: Bool[Tensor, ""] | None = None,
        donate: bool = True,
    ) -> tuple[Any, MuonState]:
        masters, momenta = leaves.masters(params, state.master), tree.leaves(state.momentum)
        rows = zip(masters, leaves.of_grads(grads), momenta, heads, splits, decays, strict=True)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not donate):
            new_masters, new_momenta = [], []
            for p, g, m, head, split, decay in rows:
                new_p, new_m = step(p, g.to(p.dtype), m, head, split, decay, lr)
                if skip is not None:
                    new_p, new_m = torch.where(skip, p, new_p), torch.where(skip, m, new_m)
                new_masters.append(p.copy_(new_p) if donate else new_p)
                new_momenta.append(m.copy_(new_m) if donate else new_m)
            params, kept = leaves.with_masters(params, new_masters, donate=donate)
        return params, MuonState(leaves.to_tree(new_momenta), kept)

    return Transform(init, update, frozenset(leaves.paths))


def orthogonalize(x: Float[Tensor, "... rows columns"], *, steps: int = 5) -> Float[Tensor, "... rows columns"]:
    """About ``U V^T`` of ``x = U S V^T``: nonzero singular values end between 0.68 and 1.14.

    Those below some 1e-3 of the Frobenius norm stay smaller. Newton-Schulz: ``X <- a X + (b A + c A A) X`` with
    ``A = X X^T``, from X of norm 1 with the smaller side as rows; in float32 on the CPU (where bfloat16 is slow), in
    bfloat16 elsewhere, in float64 for float64. A zero matrix stays zero.
    """
    a, b, c = _COEFFICIENTS
    y = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    tall = x.shape[-2] > x.shape[-1]
    y = (y.mT if tall else y).reshape(-1, *sorted(x.shape[-2:]))
    if not x.is_cpu and x.dtype == torch.float32:
        y = y.to(torch.bfloat16)
    for _ in range(steps):
        A = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(A, A, A, beta=b, alpha=c), y, beta=a)
    y = (y.mT if tall else y).reshape(x.shape)
    return y.to(x.dtype)


_Split = tuple[tuple[Axis, ...], ...]  # axes that split each dimension of a leaf, outermost first


def _on_matrices(f: Callable[[Tensor], Tensor], x: Tensor, head_dim: int, split: _Split) -> Tensor:
    """This rank's part of what ``f`` makes of the whole matrices ``[matrices rows columns]`` that ``x`` is a part of.

    Args:
        f: a function of a batch of matrices that treats each alone.
        x: part of a leaf.
        head_dim: columns of one matrix, if the leaf has one per head; 0: all columns.
        split: of the leaf.
    """
    rows, columns = split[-2:]
    cut: list[Axis] = []  # axes that cut through heads
    while head_dim and x.shape[-1] % head_dim:
        cut.append(columns[-1 - len(cut)])
        x = all_gather_invariant(x, cut[-1], -1)
    whole = x.unflatten(-1, (-1, head_dim or x.shape[-1])).movedim(-2, -3)  # heads beside experts
    y = whole.reshape(-1, *whole.shape[-2:])
    moves = [(a, 1) for a in reversed(rows)] + [(a, 2) for a in reversed(columns) if not head_dim]
    dealt: list[bool] = []
    for axis, dim in moves:
        dealt.append(y.shape[0] % axis.size == 0)
        y = all_to_all(y, axis, 0, dim) if dealt[-1] else all_gather_invariant(y, axis, dim)
    y = f(y)
    for axis, dim in reversed(moves):
        y = all_to_all(y, axis, dim, 0) if dealt.pop() else pslice(y, axis, dim)
    y = y.reshape(whole.shape).movedim(-3, -2).reshape(x.shape)
    for axis in reversed(cut):
        y = pslice(y, axis, -1)
    return y


def _head_dim(path: str, spec: ParamSpec) -> int:
    """Columns of one matrix of a leaf that has one per head, else 0."""
    if len(spec.shape) < 2:
        raise ValueError(f"{path}: tagged matrix, but its shape is {spec.shape}; it needs at least two dimensions")
    if "per_head" not in spec.tags:
        return 0
    if not spec.head_dim or spec.shape[-1] % spec.head_dim:
        raise ValueError(f"{path}: tagged per_head, but head_dim={spec.head_dim} does not divide {spec.shape[-1]}")
    return spec.head_dim
