"""Gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff.replay import pinned_stops, record_decisions, replay_decisions
from k31fn.autodiff.transforms import vjp
from k31fn.testing.finite_differences import (
    DifferenceProblem,
    check_differences,
    is_floating,
    normal_like,
)
from k31fn.testing.trees import at

__all__ = ["check_grads"]


@pinned_stops()
def check_grads(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    order: int = 1,
    num_directions: int = 2,
    per_coordinate: bool = False,
    frozen: Sequence[int] = (),
    rtol: float = 1e-7,
    seed: int = 0,
) -> None:
    """Asserts that reverse-mode gradients of ``f`` are right.

    The outputs are projected onto fixed random cotangents. The gradient of that scalar, by
    :func:`k31fn.autodiff.vjp` and by ``torch.func.grad`` (which must agree), is compared with
    central differences along random directions through all leaves together; a leaf too weak to be
    seen there is checked alone. Order 2 also checks the gradient of ``<grad f, w>`` for a fixed
    random ``w``, reverse over reverse, against differences of the gradient.

    Choices made through :func:`k31fn.autodiff.decision`, and values of
    :func:`k31fn.autodiff.stop_gradient`, are those of the first call throughout: a finite step can
    neither flip a choice nor move what is stopped. So a whole loss can be checked, with routers,
    top-k sets and a stopped teacher. Finite differences do see through ``detach``, and through a
    ``stop_gradient`` under a ``torch.func`` transform that ``f`` itself applies.

    Args:
        f: returns any tree; its floating leaves must be float64. Must be pure.
        args: trees; floating leaves must be float64, others are passed on.
        order: 1, or 2 to check first and second derivatives.
        num_directions: random directions per order.
        per_coordinate: difference every coordinate by itself instead, for small inputs: the message
            names the element.
        frozen: positions in ``args`` that ``f`` stops the gradient of in any way: they stay where
            they are, and the gradient with respect to them must be exactly zero.
        rtol: tolerance relative to the directional derivative (the root of the sum of its squared
            terms, if that is larger). 1e-7 lies above the differences' own error, 1e-10 for a
            smooth float64 function of usual condition, and below the effect of a missing term or a
            float32 cast. Four times the estimated error of the differences is added, which may
            itself be at most rtol.
        seed: of cotangents and directions.

    Raises:
        AssertionError: names the leaf's path, both values and the relative error; or says that
            ``f`` is not smooth here (a kink, a choice outside ``decision``, a cast to float32
            inside).
        ValueError: an argument or an output is not float64 (names its path), or nothing to
            differentiate.
    """
    if order not in (1, 2):
        raise ValueError(f"check_grads: order={order} must be 1 or 2")
    # detached: a caller's leaf that requires grad must collect none of the gradients taken here
    detached = tree.map(lambda v: v.detach() if isinstance(v, Tensor) else v, args)
    values, structure = tree.flatten(detached)
    moving, still = _floating_leaves(args, frozen)
    if not moving:
        raise ValueError("check_grads: args have no floating leaf to differentiate with respect to")

    def of_leaves(*leaves: Tensor) -> Any:
        replaced = list(values)
        for i, leaf in zip(moving + still, leaves, strict=True):
            replaced[i] = leaf
        with replay_decisions(decisions):
            return f(*tree.unflatten(structure, replaced))

    with record_decisions() as decisions:
        out = f(*tree.unflatten(structure, values))
    keys = random.split(random.key(seed, device=values[moving[0]].device), 3 + order)
    cts = _cotangents(out, keys[0])
    leaves = at(moving + still, values)
    names = at(moving + still, tree.paths(args))
    scalar = _projected(of_leaves, cts)
    grads = _reverse(of_leaves, leaves, cts)
    _assert_agree(1, names, grads, _functional(scalar, leaves))
    n = len(moving)
    _assert_frozen(names[n:], grads[n:])

    # stopped in whatever way, so it stays where it is
    fixed = leaves[n:]
    first = DifferenceProblem(
        1,
        lambda *x: scalar(*x, *fixed),
        leaves[:n],
        grads[:n],
        names[:n],
        _magnitude(cts, tree.leaves(out)),
    )
    check_differences(first, keys[1], num_directions, per_coordinate, rtol)
    if order == 2:
        check_differences(
            _second_order(of_leaves, cts, first, fixed, keys[2]),
            keys[3],
            num_directions,
            per_coordinate,
            rtol,
        )


def _floating_leaves(args: tuple[Any, ...], frozen: Sequence[int]) -> tuple[list[int], list[int]]:
    """Positions of the floating leaves: those to differentiate, and those of frozen arguments."""
    for position in frozen:
        if position not in range(len(args)):
            raise ValueError(
                f"check_grads: frozen={list(frozen)} names {position}, but there are {len(args)} "
                "arguments"
            )
    moving, still = [], []
    index = 0
    for position, arg in enumerate(args):
        for path, leaf in tree.flatten_with_paths(arg):
            if is_floating(leaf):
                if leaf.dtype != torch.float64:
                    name = f"{position}.{path}".rstrip(".")
                    raise ValueError(
                        f"check_grads: args leaf {name!r} is {leaf.dtype}; give float64 arguments"
                    )
                (still if position in frozen else moving).append(index)
            index += 1
    return moving, still


def _cotangents(out: Any, key: Tensor) -> list[Tensor | None]:
    pairs = tree.flatten_with_paths(out)
    for path, leaf in pairs:
        if is_floating(leaf) and leaf.dtype != torch.float64:
            raise ValueError(
                f"check_grads: output leaf {path!r} is {leaf.dtype} for float64 arguments; remove "
                "the cast "
                "(k31fn.precision.upcast keeps float64)"
            )
    # random and not ones: a sum of outputs would not see errors that cancel in it
    cts = normal_like([leaf for _, leaf in pairs], key)
    if all(c is None for c in cts):
        raise ValueError("check_grads: the output has no floating leaf to differentiate")
    return cts


def _projected(of_leaves: Callable[..., Any], cts: list[Tensor | None]) -> Callable[..., Tensor]:
    def scalar(*leaves: Tensor) -> Tensor:
        return _inner(tree.leaves(of_leaves(*leaves)), cts)

    return scalar


def _inner(a: Sequence[Any], b: Sequence[Tensor | None]) -> Tensor:
    terms = []
    for x, y in zip(a, b, strict=True):
        if y is not None:
            terms.append((x * y).sum())
    return torch.stack(terms).sum()


def _magnitude(a: Sequence[Tensor | None], b: Sequence[Any]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x is not None:
            total += float((x * y).abs().sum())
    return total


def _reverse(
    of_leaves: Callable[..., Any], leaves: list[Tensor], cts: list[Tensor | None]
) -> list[Tensor]:
    out, pull = vjp(of_leaves, *leaves)
    values, structure = tree.flatten(out)
    filled = []
    for value, ct in zip(values, cts, strict=True):
        # a pullback wants a cotangent for an integer output too
        without = ct is None and isinstance(value, Tensor)
        filled.append(torch.zeros_like(value) if without else ct)
    return list(pull(tree.unflatten(structure, filled)))


# beside _reverse, since the two build other graphs: a rule may hold in one and fail in the other
def _functional(scalar: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.func.grad(scalar, argnums=tuple(range(len(leaves))))(*leaves))


def _second_order(
    of_leaves: Callable[..., Any],
    cts: list[Tensor | None],
    first: DifferenceProblem,
    fixed: list[Tensor],
    key: Tensor,
) -> DifferenceProblem:
    """The scalar ``<grad f, w>`` and its gradient."""
    # reverse over reverse both times: fused operators and custom rules have no forward mode
    w = normal_like(first.leaves, key)

    def along(*leaves: Tensor) -> Tensor:
        return _inner(_reverse(of_leaves, [*leaves, *fixed], cts)[: len(leaves)], w)

    def along_functional(*leaves: Tensor) -> Tensor:
        return _inner(_functional(first.function, list(leaves)), w)

    value, pull = vjp(along, *first.leaves)
    grads = list(pull(torch.ones_like(value)))
    _assert_agree(2, first.paths, grads, _functional(along_functional, first.leaves))
    return DifferenceProblem(2, along, first.leaves, grads, first.paths, _magnitude(w, first.grads))


def _assert_agree(
    order: int, paths: list[str], ours: list[Tensor], functional: list[Tensor]
) -> None:
    """Both reverse modes run the same rules; only the order in which they add up may differ."""
    scale = 0.0
    for grad in functional:
        if grad.numel():
            scale = max(scale, float(grad.abs().max()))
    for path, a, b in zip(paths, ours, functional, strict=True):
        error = float((a - b).abs().max()) if a.numel() else 0.0
        # some 10^4 roundings of 2^-53: what long sums in two orders may differ by
        if not error <= 1e-11 * scale:
            raise AssertionError(
                f"check_grads: order {order}, leaf {path!r}: k31fn.autodiff.vjp and "
                "torch.func.grad differ by "
                f"{error:.3g} (largest gradient {scale:.3g})"
            )


def _assert_frozen(paths: list[str], grads: list[Tensor]) -> None:
    for path, grad in zip(paths, grads, strict=True):
        if bool((grad != 0).any()):
            raise AssertionError(
                f"check_grads: frozen leaf {path!r} has a gradient of up to "
                f"{float(grad.abs().max()):.3g}, not zero"
            )
