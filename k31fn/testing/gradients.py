"""Gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff.replay import record_decisions, replay_decisions
from k31fn.autodiff.transforms import vjp
from k31fn.testing.trees import at

__all__ = ["check_grads"]

# A central difference with step h has a truncation error of order h^2, which extrapolation over
# halved steps removes order by order, and a rounding error of about 2^-53 |f| / h, which nothing
# removes. The first step is small enough for a function that bends at the scale of its inputs to
# converge in four steps (relative error 1e-10 or better); where it does not converge (a kink lies
# within the step) the halving goes on, down to a rounding error of 1e-11 |f|.
_FIRST_STEP = 2.0**-4
_MOST_STEPS = 13


@dataclass(frozen=True)
class _Problem:
    """A scalar function of float64 leaves, and its gradient as reverse mode has it.

    ``magnitude`` is that of the terms that the scalar sums up: its rounding error is some 2^-53 of
    this.
    """

    order: int
    function: Callable[..., Tensor]
    leaves: list[Tensor]
    grads: list[Tensor]
    paths: list[str]
    magnitude: float


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

    Choices made through :func:`k31fn.autodiff.decision` are those of the first call throughout, so
    a finite step cannot flip them. Finite differences see through ``stop_gradient``: write ``f`` as
    a function of the stopped part and the other part as separate arguments, and name the stopped
    one in ``frozen``.

    Args:
        f: returns any tree; its floating leaves must be float64. Must be pure.
        args: trees; floating leaves must be float64, others are passed on.
        order: 1, or 2 to check first and second derivatives.
        num_directions: random directions per order.
        per_coordinate: difference every coordinate by itself instead, for small inputs: the message
            names the element.
        frozen: positions in ``args`` that ``f`` stops the gradient of: they stay where they are,
            and the gradient with respect to them must be exactly zero.
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

    # differences see through stop_gradient, so what is frozen stays where it is
    fixed = leaves[n:]
    first = _Problem(
        1,
        lambda *x: scalar(*x, *fixed),
        leaves[:n],
        grads[:n],
        names[:n],
        _magnitude(cts, tree.leaves(out)),
    )
    _check(first, keys[1], num_directions, per_coordinate, rtol)
    if order == 2:
        _check(
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
            if _is_floating(leaf):
                if leaf.dtype != torch.float64:
                    name = f"{position}.{path}".rstrip(".")
                    raise ValueError(
                        f"check_grads: args leaf {name!r} is {leaf.dtype}; give float64 arguments"
                    )
                (still if position in frozen else moving).append(index)
            index += 1
    return moving, still


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _normal_like(leaves: Sequence[Any], key: Tensor) -> list[Any]:
    """Standard normal numbers for each floating leaf, None for others."""
    normals: list[Any] = []
    for i, x in enumerate(leaves):
        normal = None
        if _is_floating(x):
            # a key for each position: numbers stay the same when another leaf is added behind
            normal = random.normal(random.fold_in(key, i), tuple(x.shape), dtype=torch.float64)
            normal = normal.to(x.device)
        normals.append(normal)
    return normals


def _cotangents(out: Any, key: Tensor) -> list[Tensor | None]:
    pairs = tree.flatten_with_paths(out)
    for path, leaf in pairs:
        if _is_floating(leaf) and leaf.dtype != torch.float64:
            raise ValueError(
                f"check_grads: output leaf {path!r} is {leaf.dtype} for float64 arguments; remove "
                "the cast "
                "(k31fn.precision.upcast keeps float64)"
            )
    # random and not ones: a sum of outputs would not see errors that cancel in it
    cts = _normal_like([leaf for _, leaf in pairs], key)
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
    first: _Problem,
    fixed: list[Tensor],
    key: Tensor,
) -> _Problem:
    """The scalar ``<grad f, w>`` and its gradient."""
    # reverse over reverse both times: fused operators and custom rules have no forward mode
    w = _normal_like(first.leaves, key)

    def along(*leaves: Tensor) -> Tensor:
        return _inner(_reverse(of_leaves, [*leaves, *fixed], cts)[: len(leaves)], w)

    def along_functional(*leaves: Tensor) -> Tensor:
        return _inner(_functional(first.function, list(leaves)), w)

    value, pull = vjp(along, *first.leaves)
    grads = list(pull(torch.ones_like(value)))
    _assert_agree(2, first.paths, grads, _functional(along_functional, first.leaves))
    return _Problem(2, along, first.leaves, grads, first.paths, _magnitude(w, first.grads))


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


def _check(
    problem: _Problem, key: Tensor, num_directions: int, per_coordinate: bool, rtol: float
) -> None:
    # a step in proportion to the leaf, as the first step's size supposes; zeros get one of 0.05
    scales = []
    for x in problem.leaves:
        scales.append(max(float(x.square().mean().sqrt()), 0.05) if x.numel() else 0.0)
    if per_coordinate:
        _check_coordinates(problem, scales, rtol)
        return
    for round_key in random.split(key, num_directions):
        directions = {}
        for i, normal in enumerate(_normal_like(problem.leaves, round_key)):
            if normal.numel():
                directions[i] = scales[i] * normal
        _check_directions(problem, directions, rtol)


def _check_coordinates(problem: _Problem, scales: list[float], rtol: float) -> None:
    for i, leaf in enumerate(problem.leaves):
        for flat in range(leaf.numel()):
            direction = torch.zeros_like(leaf).flatten()
            direction[flat] = scales[i]
            element = list(map(int, torch.unravel_index(torch.tensor(flat), leaf.shape)))
            where = f"{problem.paths[i]!r}{element}"
            _raise_if(_compare(problem, {i: direction.view_as(leaf)}, where, rtol))


def _check_directions(problem: _Problem, directions: dict[int, Tensor], rtol: float) -> None:
    """One direction through all leaves; and alone, each leaf whose own error of 1e-4 would be lost
    among the others.
    """

    def alone(i: int) -> _Result:
        return _compare(problem, {i: directions[i]}, repr(problem.paths[i]), rtol)

    together = _compare(problem, directions, "(all together)", rtol)
    if together.fault:
        # which leaf is wrong is asked only now: each answer costs as much as all together
        failed = [result for result in map(alone, directions) if result.fault]
        _raise_if(max(failed, key=lambda result: result.relative, default=together))
    for i, v in directions.items():
        if 1e-4 * _strength(problem, {i: v}) < together.tolerance:
            _raise_if(alone(i))


class _Result(NamedTuple):
    fault: str
    relative: float
    tolerance: float


def _raise_if(result: _Result) -> None:
    if result.fault:
        raise AssertionError(result.fault)


def _strength(problem: _Problem, directions: dict[int, Tensor]) -> float:
    """Size of the directional derivative, were its terms of random sign."""
    squares = 0.0
    for i, v in directions.items():
        squares += float((problem.grads[i] * v).square().sum())
    return math.sqrt(squares)


def _compare(problem: _Problem, directions: dict[int, Tensor], where: str, rtol: float) -> _Result:
    reverse = 0.0
    for i, v in directions.items():
        reverse += float((problem.grads[i] * v).sum())
    strength = _strength(problem, directions)
    # a derivative that is far below the function's own terms is judged by these: it is all rounding
    wanted = rtol * max(0.1 * strength, 1e-6 * problem.magnitude)
    expected, uncertain = _directional_derivative(problem, directions, wanted)
    scale = max(abs(expected), strength, 1e-6 * problem.magnitude)
    tolerance = rtol * scale + 4 * uncertain
    error = abs(reverse - expected)
    relative = error / scale if scale else 0.0
    label = f"check_grads: order {problem.order}, leaf {where}"
    fault = ""
    if not uncertain <= rtol * scale:  # differences less certain than that prove nothing
        fault = (
            f"{label}: finite differences do not settle ({expected:.9g}, uncertain by "
            f"{uncertain:.2g}; reverse mode gives {reverse:.9g}): the function is not smooth here. "
            "A kink, a choice made outside autodiff.decision, or a cast to float32 inside?"
        )
    elif not error <= tolerance:
        fault = (
            f"{label}: reverse mode gives {reverse:.9g}, finite differences {expected:.9g} "
            f"(relative error {relative:.3g}, tolerance {tolerance / scale:.2g})"
        )
    return _Result(fault, relative, tolerance)


def _directional_derivative(
    problem: _Problem, directions: dict[int, Tensor], wanted: float
) -> tuple[float, float]:
    """Central differences, extrapolated over halved steps (Richardson), and an estimate of their
    error.

    An entry of the table is as uncertain as it is far from the two entries that it came from
    (Ridders 1982, Advances in Engineering Software 4(2)); the most certain one is taken, as soon as
    it is good enough.
    """
    best = math.nan
    best_error = math.inf
    previous: list[float] = []
    for k in range(_MOST_STEPS):
        h = _FIRST_STEP / 2**k
        row = [_central(problem, directions, h)]
        # 2^-50 and not 2^-53: the function rounds more often than in its last sum
        rounding = 2.0**-50 * problem.magnitude / h
        for j, coarse in enumerate(previous):
            row.append(row[j] + (row[j] - coarse) / (4.0 ** (j + 1) - 1))
            error = max(abs(row[-1] - row[j]), abs(row[-1] - coarse)) + rounding
            if error < best_error:
                best = row[-1]
                best_error = error
        previous = row
        if best_error <= wanted:
            break
    return best, best_error


def _central(problem: _Problem, directions: dict[int, Tensor], h: float) -> float:
    def shifted(step: float) -> list[Tensor]:
        leaves = list(problem.leaves)
        for i, v in directions.items():
            leaves[i] = leaves[i] + step * v
        return leaves

    return float(problem.function(*shifted(h)) - problem.function(*shifted(-h))) / (2 * h)
