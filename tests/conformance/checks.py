"""What every layer must do, one function per promise.

Each takes a prepared case and raises AssertionError.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from k31fn import autodiff, random, segments, tree
from k31fn.segments import Segments
from k31fn.testing import assert_close_trees, check_grads
from tests.conformance.case import Case

CHECKS: dict[str, Callable[[Prepared], None]] = {}


def check(f: Callable[[Prepared], None]) -> Callable[[Prepared], None]:
    CHECKS[f.__name__] = f
    return f


@dataclass(frozen=True)
class Prepared:
    """A case in float64, as a function of the floating leaves of its arguments."""

    case: Case
    f: Callable[..., Any]
    args: tuple[Any, ...]
    index: list[int]
    cts: list[Tensor | None]

    @property
    def leaves(self) -> list[Tensor]:
        return [tree.leaves(self.args)[i] for i in self.index]

    @property
    def paths(self) -> list[str]:
        return [tree.paths(self.args)[i] for i in self.index]

    def call(
        self, *leaves: Tensor, f: Callable[..., Any] | None = None, packing: Segments | None = None
    ) -> list[Any]:
        values, structure = tree.flatten(self.args)
        for i, leaf in zip(self.index, leaves, strict=True):
            values[i] = leaf
        packed = {} if packing is None else {"segments": packing}
        return tree.leaves((f or self.f)(*tree.unflatten(structure, values), **packed))

    def scalar(self, *leaves: Tensor, **how: Any) -> Tensor:
        pairs = zip(self.call(*leaves, **how), self.cts, strict=True)
        return torch.stack([(o * c).sum() for o, c in pairs if c is not None]).sum()

    def grads(self, leaves: list[Tensor], **how: Any) -> list[Tensor]:
        """By torch.func.grad."""
        return list(grad(functools.partial(self.scalar, **how), self.argnums)(*leaves))

    @property
    def argnums(self) -> tuple[int, ...]:
        return tuple(range(len(self.index)))

    @property
    def small(self) -> int:
        """The leaf for which whole Jacobians and Hessians are computed: the smallest of at least
        two elements.
        """
        sizes = [leaf.numel() for leaf in self.leaves]
        return min(self.argnums, key=lambda i: (sizes[i] < 2, sizes[i]))

    def of_small(self, function: Callable[..., Any]) -> Callable[[Tensor], Any]:
        leaves = self.leaves
        return lambda x: function(*leaves[: self.small], x, *leaves[self.small + 1 :])


@functools.cache
def prepare(case: Case) -> Prepared:
    f, args = case.make(random.key(0), torch.float64)
    index = [
        i
        for i, v in enumerate(tree.leaves(args))
        if isinstance(v, Tensor) and v.is_floating_point()
    ]
    out = tree.leaves(f(*args))
    keys = random.split(random.key(1), len(out))
    cts = [
        random.normal(k, tuple(o.shape), dtype=torch.float64) if o.is_floating_point() else None
        for k, o in zip(keys, out, strict=True)
    ]
    return Prepared(case, f, args, index, cts)


def same_bits(p: Prepared, actual: Any, expected: Any) -> None:
    assert_close_trees(named(p, actual), named(p, expected), rtol=0, atol=0)


def close(p: Prepared, actual: Any, expected: Any) -> None:
    """Equal up to another order of summation: a few hundred float64 roundings of the largest
    gradient.
    """
    scale = max(float(e.abs().max()) for e in expected)
    assert_close_trees(named(p, actual), named(p, expected), rtol=1e-10, atol=1e-12 * scale)


def named(p: Prepared, values: Any) -> dict[str, Tensor]:
    return dict(zip(p.paths, values, strict=True))


@check
def four_ways_to_the_gradient_agree(p: Prepared) -> None:
    """torch.func.grad, value_and_grad, vjp and plain autograd, to the last bit."""
    functional = p.grads(p.leaves)
    value, ours = autodiff.value_and_grad(p.scalar, p.argnums)(*p.leaves)
    assert torch.equal(value, p.scalar(*p.leaves))
    same_bits(p, ours, functional)
    out, pull = autodiff.vjp(p.call, *p.leaves)
    same_bits(
        p,
        pull([torch.zeros_like(o) if c is None else c for o, c in zip(out, p.cts, strict=True)]),
        functional,
    )
    inputs = [x.clone().requires_grad_() for x in p.leaves]
    plain = torch.autograd.grad(
        p.scalar(*inputs), inputs, allow_unused=True, materialize_grads=True
    )
    same_bits(p, plain, functional)


@check
def vmap_over_inputs_equals_the_loop(p: Prepared) -> None:
    samples = [
        p.leaves,
        [0.75 * x for x in p.leaves],
        [x.roll(1, 0) if x.ndim else x for x in p.leaves],
    ]
    stacked = [torch.stack(s) for s in zip(*samples, strict=True)]
    batched = vmap(grad(p.scalar, p.argnums))(*stacked)
    for i, sample in enumerate(samples):
        close(p, [g[i] for g in batched], p.grads(sample))


@check
def vmap_with_shared_parameters_gives_gradients_per_sample(p: Prepared) -> None:
    """The first argument, the parameters, is not batched; its gradient is, per sample."""
    if len(p.args) < 2:
        return
    first = len([i for i in p.index if i < len(tree.leaves(p.args[0]))])
    shared, own = p.leaves[:first], p.leaves[first:]
    samples = [own, [0.75 * x for x in own]]
    stacked = [torch.stack(s) for s in zip(*samples, strict=True)]
    in_dims = (None,) * len(shared) + (0,) * len(own)
    batched = vmap(grad(p.scalar, p.argnums), in_dims)(*shared, *stacked)
    for i, sample in enumerate(samples):
        close(p, [g[i] for g in batched], p.grads([*shared, *sample]))


def packings(batch: int, length: int) -> list[Segments]:
    """One document per row; several; padding; a document of one token."""
    rows = [
        [[length]] * batch,
        [[2, length - 2], [1, length - 1]],
        [[length - 1], [1, 1, length - 3]],
    ]
    return [
        segments.from_lengths([row[i % len(row)] for i in range(batch)], length) for row in rows
    ]


@check
def vmap_over_packings_equals_the_loop(p: Prepared) -> None:
    if not p.case.packed:
        return
    each = packings(*p.case.shape)
    stacked = tree.map(lambda *t: torch.stack(t), *each)
    batched = vmap(
        lambda packing: grad(functools.partial(p.scalar, packing=packing), p.argnums)(*p.leaves)
    )(stacked)
    for i, packing in enumerate(each):
        close(p, [g[i] for g in batched], p.grads(p.leaves, packing=packing))


@check
def jacrev_rows_are_pullbacks(p: Prepared) -> None:
    def flat(*leaves: Tensor) -> Tensor:
        return torch.cat(
            [o.flatten() for o, c in zip(p.call(*leaves), p.cts, strict=True) if c is not None]
        )

    x = p.leaves[p.small]
    jacobian = jacrev(p.of_small(flat))(x)
    ct = torch.cat([c.flatten() for c in p.cts if c is not None])
    expected = autodiff.vjp(p.of_small(flat), x)[1](ct)[0]
    scale = float(expected.abs().max())
    assert_close_trees(torch.tensordot(ct, jacobian, 1), expected, rtol=1e-10, atol=1e-12 * scale)
    row = torch.zeros_like(ct)
    row[0] = 1.0
    assert_close_trees(
        jacobian[0], autodiff.vjp(p.of_small(flat), x)[1](row)[0], rtol=1e-10, atol=1e-14
    )


@check
def hessian_is_symmetric_and_equals_jacrev_of_grad(p: Prepared) -> None:
    scalar, x = p.of_small(p.scalar), p.leaves[p.small]
    n = x.numel()
    hessian = autodiff.hessian(scalar)(x).reshape(n, n)
    scale = float(hessian.abs().max())
    assert_close_trees(
        hessian, jacrev(grad(scalar))(x).reshape(n, n), rtol=1e-10, atol=1e-12 * scale
    )
    assert_close_trees(hessian, hessian.T.contiguous(), rtol=1e-9, atol=1e-11 * scale)
    _, by_tape = autodiff.value_and_grad(
        lambda x: autodiff.value_and_grad(scalar)(x)[1].flatten()[0]
    )(x)
    assert_close_trees(by_tape.flatten(), hessian[0], rtol=1e-10, atol=1e-12 * scale)


@check
def finite_differences_agree_to_second_order(p: Prepared) -> None:
    check_grads(p.f, p.args, order=2, num_directions=1)


@check
def inputs_are_unchanged(p: Prepared) -> None:
    values = [v for v in tree.leaves(p.args) if isinstance(v, Tensor)]
    before = [(v.clone(), v._version) for v in values]
    autodiff.value_and_grad(p.scalar, p.argnums)(*p.leaves)
    p.f(*p.args)
    for v, (old, version) in zip(values, before, strict=True):
        assert torch.equal(v, old)
        assert v._version == version, "written in place, though with the same values"


@check
def forward_mode_says_reverse_mode(p: Prepared) -> None:
    """It raises and says so. (Or is right: nothing raises in a layer without a weight or an
    operator.)
    """
    ones = tuple(torch.ones_like(x) for x in p.leaves)
    expected = sum(float(g.sum()) for g in p.grads(p.leaves))
    with warnings.catch_warnings():
        # torch.func.jvp compiles TorchScript when it is first used (torch 2.13)
        warnings.filterwarnings("ignore", r"`torch\.jit\.script", DeprecationWarning)
        for forward_mode in (
            lambda: float(jvp(p.scalar, tuple(p.leaves), ones)[1]),
            lambda: sum(float(g.sum()) for g in jacfwd(p.scalar, p.argnums)(*p.leaves)),
        ):
            try:
                value = forward_mode()
            except RuntimeError as e:
                if "reverse-mode" not in str(e):
                    raise
            else:
                assert value == pytest.approx(expected, rel=1e-9)


@check
def remat_changes_no_bit(p: Prepared) -> None:
    remat = functools.partial(p.scalar, f=autodiff.remat(p.f))
    value, ours = autodiff.value_and_grad(p.scalar, p.argnums)(*p.leaves)
    again, recomputed = autodiff.value_and_grad(remat, p.argnums)(*p.leaves)
    assert torch.equal(value, again)
    same_bits(p, recomputed, ours)
    same_bits(p, grad(remat, p.argnums)(*p.leaves), ours)
    nested = functools.partial(p.scalar, f=autodiff.remat(autodiff.remat(p.f)))
    same_bits(p, autodiff.value_and_grad(nested, p.argnums)(*p.leaves)[1], ours)


@check
def the_pullback_runs_on_another_thread(p: Prepared) -> None:
    expected = autodiff.value_and_grad(p.scalar, p.argnums)(*p.leaves)[1]
    value, pull = autodiff.vjp(functools.partial(p.scalar, f=autodiff.remat(p.f)), *p.leaves)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(pull(torch.ones_like(value))))
    thread.start()
    thread.join()
    same_bits(p, results, expected)
