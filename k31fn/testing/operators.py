"""An implementation of an operator against the operator's reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff.transforms import vjp
from k31fn.kernels.registry import Op, record_impls, use_impl
from k31fn.testing.trees import assert_close_trees, at, floating_positions

__all__ = ["assert_op_matches"]


def assert_op_matches(
    op: Op,
    impl: str,
    args: tuple[Any, ...],
    *,
    rtol: float | int,
    atol: float | int,
    grad_rtol: float | int | None = None,
    grad_atol: float | int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    vmap_grad: bool = True,
    reference_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> None:
    """Asserts that an implementation of ``op`` computes what the reference does, and that it really
    ran.

    Compared: the value; the gradient of every floating leaf, for random cotangents; the same under
    ``vmap(torch.func.grad)`` over two different samples, where the reference runs sample by sample.
    The arguments must be unchanged afterwards, bit for bit.

    Args:
        op: the operator.
        impl: name of the implementation; ``"reference"`` is refused.
        args: positional arguments: trees, on the device to test.
        rtol: relative tolerance of the value; see :func:`assert_close_trees`.
        atol: absolute tolerance of the value.
        grad_rtol: relative tolerance of gradients; as the value's by default.
        grad_atol: absolute tolerance of gradients; as the value's by default.
        kwargs: keyword arguments, passed on as they are.
        vmap_grad: whether the implementation supports ``vmap(grad)``. The second sample is ``0.75``
            times the first.
        reference_dtype: run the reference on arguments cast to this dtype (float64, to judge a bf16
            kernel) and cast its results back.
        seed: of the cotangents.

    Raises:
        AssertionError: a value, a gradient or an argument differs (names stage and path), or
            ``impl`` did not run.
        ValueError: ``op`` has no such implementation, or it refuses these arguments.
    """
    if impl == "reference":
        raise ValueError(
            f"assert_op_matches: {op.name} would be compared with itself; name another "
            "implementation"
        )
    values, structure = tree.flatten(args)
    index = floating_positions(values)
    op_of_leaves = _OpOfLeaves(op, dict(kwargs or {}), values, structure, index)
    leaves = at(index, values)
    paths = tree.paths(args)
    names = at(index, paths)
    copies = _copies(paths, values)
    tolerance = {"rtol": rtol, "atol": atol}
    grad_tolerance = {
        "rtol": rtol if grad_rtol is None else grad_rtol,
        "atol": atol if grad_atol is None else grad_atol,
    }

    # the implementation first: the cotangents are drawn in the dtypes of its outputs
    out, grads, cts = op_of_leaves.run(impl, leaves, seed=seed)
    expected, expected_grads, _ = op_of_leaves.run(
        "reference", leaves, cts=cts, dtype=reference_dtype
    )
    label = f"op {op.name!r}, implementation {impl!r}"
    _same(f"{label}, value", out, expected, **tolerance)
    _same(
        f"{label}, gradient", _named(names, grads), _named(names, expected_grads), **grad_tolerance
    )
    if vmap_grad:
        # a second sample that differs: with two alike a rule that mixes samples would pass
        samples = [leaves, [0.75 * x for x in leaves]]
        stacked = list(map(torch.stack, zip(*samples, strict=True)))
        batched = op_of_leaves.run_batched(impl, stacked, cts)
        for i, sample in enumerate(samples):
            _, expected_grads, _ = op_of_leaves.run(
                "reference", sample, cts=cts, dtype=reference_dtype
            )
            _same(
                f"{label}, gradient of sample {i} under vmap",
                _named(names, [grad[i] for grad in batched]),
                _named(names, expected_grads),
                **grad_tolerance,
            )
    for path, value, copy, version in copies:
        # torch counts changes that it makes; a kernel may write without being counted
        if value._version != version or not torch.equal(_bits(value), _bits(copy)):
            raise AssertionError(f"{label}: changed its argument {path!r} in place")


def _copies(paths: list[str], values: list[Any]) -> list[tuple[str, Tensor, Tensor, int]]:
    """Path, tensor, copy and version of each tensor."""
    copies = []
    for path, value in zip(paths, values, strict=True):
        if isinstance(value, Tensor):
            copies.append((path, value, value.clone(), value._version))
    return copies


@dataclass(frozen=True)
class _OpOfLeaves:
    """The op with everything fixed but the floating leaves of its arguments."""

    op: Op
    kwargs: dict[str, Any]
    values: list[Any]
    structure: Any
    index: list[int]

    def __call__(self, impl: str, leaves: tuple[Tensor, ...]) -> Any:
        """The value by ``impl``; asserts that it runs, and nothing else."""
        replaced = list(self.values)
        for i, leaf in zip(self.index, leaves, strict=True):
            replaced[i] = leaf
        # recorded: an implementation that hands over to the reference would agree with it
        with use_impl(**{self.op.name: impl}), record_impls() as ran:
            out = self.op(*tree.unflatten(self.structure, replaced), **self.kwargs)
        names = {name for op, name in ran if op == self.op.name}
        if names != {impl}:
            raise AssertionError(
                f"op {self.op.name!r}: {impl!r} was asked for, but {sorted(names)} ran"
            )
        return out

    def run(
        self,
        impl: str,
        leaves: list[Tensor],
        *,
        cts: list[Tensor] | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Value, gradients and the cotangents, which are drawn unless given."""
        wide = leaves if dtype is None else [x.to(dtype) for x in leaves]
        out, pull = vjp(lambda *x: self(impl, x), *wide)
        outputs, structure = tree.flatten(out)
        cts = _draw(outputs, seed) if cts is None else cts
        grads = pull(tree.unflatten(structure, _like(cts, outputs)))
        # a wide reference's gradients are rounded once, at the end, to the dtype compared in
        return out, _like(grads, leaves), cts

    def run_batched(self, impl: str, stacked: list[Tensor], cts: list[Tensor]) -> list[Tensor]:
        """Gradients by ``vmap(torch.func.grad)``."""

        def projected(*leaves: Tensor) -> Tensor:
            pairs = zip(tree.leaves(self(impl, leaves)), cts, strict=True)
            return torch.stack([(o * c).sum() for o, c in pairs if o.is_floating_point()]).sum()

        # with respect to all leaves: of one that is not batched, a gradient for each sample
        gradient = torch.func.grad(projected, argnums=tuple(range(len(stacked))))
        return list(torch.func.vmap(gradient)(*stacked))


def _draw(outputs: list[Tensor], seed: int) -> list[Tensor]:
    """Random cotangents of floating outputs, zeros of others."""
    cts = []
    for key, out in zip(random.split(random.key(seed), len(outputs)), outputs, strict=True):
        ct = torch.zeros_like(out)
        if out.is_floating_point():
            # drawn on the CPU: the same numbers wherever the op runs
            ct = random.normal(key, tuple(out.shape)).to(out.device, out.dtype)
        cts.append(ct)
    return cts


def _like(tensors: Sequence[Tensor], models: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, each in the dtype of its model."""
    return [x.to(model.dtype) for x, model in zip(tensors, models, strict=True)]


def _named(names: list[str], values: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names, values, strict=True))


def _same(stage: str, actual: Any, expected: Any, *, rtol: float | int, atol: float | int) -> None:
    def cast(e: Any, a: Any) -> Any:
        both_tensors = isinstance(e, Tensor) and isinstance(a, Tensor)
        return e.to(a.dtype) if both_tensors and e.is_floating_point() else e

    try:
        assert_close_trees(actual, tree.map(cast, expected, actual), rtol=rtol, atol=atol)
    except AssertionError as e:
        raise AssertionError(f"{stage}: {e}") from e


def _bits(x: Tensor) -> Tensor:
    # as bytes: a NaN that stayed where it was equals itself
    return x.detach().contiguous().view(-1).view(torch.uint8)
