"""An implementation of an operator against the operator's reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31fn import random, tree
from k31fn.autodiff.transforms import vjp
from k31fn.kernels.registry import Op, record_impls, use_impl
from k31fn.testing.trees import assert_close_trees

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
    index = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
    call = _OpOfLeaves(op, dict(kwargs or {}), values, structure, index)
    leaves = [values[i] for i in index]
    paths = tree.paths(args)
    names = [paths[i] for i in index]
    before = [(v, v.clone(), v._version) if isinstance(v, Tensor) else None for v in values]
    tolerance = {"rtol": rtol, "atol": atol}
    grad_tolerance = {
        "rtol": rtol if grad_rtol is None else grad_rtol,
        "atol": atol if grad_atol is None else grad_atol,
    }

    out, grads, cts = call.run(impl, leaves, seed=seed)
    expected, expected_grads, _ = call.run("reference", leaves, cts=cts, dtype=reference_dtype)
    label = f"op {op.name!r}, implementation {impl!r}"
    _same(f"{label}, value", out, expected, **tolerance)
    _same(
        f"{label}, gradient", _named(names, grads), _named(names, expected_grads), **grad_tolerance
    )
    if vmap_grad:
        samples = [leaves, [0.75 * x for x in leaves]]
        batched = call.run_batched(
            impl, [torch.stack(pair) for pair in zip(*samples, strict=True)], cts
        )
        for i, sample in enumerate(samples):
            _, expected_grads, _ = call.run("reference", sample, cts=cts, dtype=reference_dtype)
            got = _named(names, [g[i] for g in batched])
            _same(
                f"{label}, gradient of sample {i} under vmap",
                got,
                _named(names, expected_grads),
                **grad_tolerance,
            )
    for path, was in zip(paths, before, strict=True):
        if was is not None and (
            was[0]._version != was[2] or not torch.equal(_bits(was[0]), _bits(was[1]))
        ):
            raise AssertionError(f"{label}: changed its argument {path!r} in place")


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
        wide = [x if dtype is None else x.to(dtype) for x in leaves]
        out, pull = vjp(lambda *x: self(impl, x), *wide)
        outputs, structure = tree.flatten(out)
        cts = _draw(outputs, seed) if cts is None else cts
        grads = pull(
            tree.unflatten(structure, [c.to(o.dtype) for c, o in zip(cts, outputs, strict=True)])
        )
        return out, [g.to(x.dtype) for g, x in zip(grads, leaves, strict=True)], cts

    def run_batched(self, impl: str, stacked: list[Tensor], cts: list[Tensor]) -> list[Tensor]:
        """Gradients by ``vmap(torch.func.grad)``."""

        def projected(*leaves: Tensor) -> Tensor:
            pairs = zip(tree.leaves(self(impl, leaves)), cts, strict=True)
            return torch.stack([(o * c).sum() for o, c in pairs if o.is_floating_point()]).sum()

        return list(
            torch.func.vmap(torch.func.grad(projected, argnums=tuple(range(len(stacked)))))(
                *stacked
            )
        )


def _draw(outputs: list[Tensor], seed: int) -> list[Tensor]:
    """Random cotangents of floating outputs, zeros of others."""
    keys = random.split(random.key(seed), len(outputs))
    return [
        random.normal(k, tuple(o.shape)).to(o.device, o.dtype)
        if o.is_floating_point()
        else torch.zeros_like(o)
        for k, o in zip(keys, outputs, strict=True)
    ]


def _named(names: list[str], values: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names, values, strict=True))


def _same(stage: str, actual: Any, expected: Any, *, rtol: float | int, atol: float | int) -> None:
    def cast(e: Any, a: Any) -> Any:
        return (
            e.to(a.dtype)
            if isinstance(e, Tensor) and isinstance(a, Tensor) and e.is_floating_point()
            else e
        )

    try:
        assert_close_trees(actual, tree.map(cast, expected, actual), rtol=rtol, atol=atol)
    except AssertionError as e:
        raise AssertionError(f"{stage}: {e}") from e


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)
