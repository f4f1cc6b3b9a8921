"""What an optimiser is: a pair of functions, and the leaves of the parameter tree that it steps.

``init(params) -> state`` and ``update(grads, state, params, lr=...) -> (params, state)``. The state
is a tree of tensors, so it is saved, sharded and moved like parameters; each of its fields has the
structure of ``params`` with ``()`` where there is nothing to keep. Which leaves are stepped and how
is read from the tree of ParamSpecs.

Two ways to update, with the same numbers:

- By default no input is changed, and the step is built from plain differentiable operations: it
  runs under ``torch.func.vmap`` (many runs at once) and ``grad`` (through the update). Of
  parameters that require grad, the new ones are part of a graph.
- ``donate=True`` writes into the tensors of ``params`` and ``state`` and returns them: the caller
  gives them up. This is what training uses: no second copy of anything. It is refused inside a
  transform, and where a graph leads through the step.

``skip``, a bool tensor, leaves parameters and state as they were, bit for bit, without the host
knowing.

State is at least float32. A parameter narrower than that has a float32 master copy in the state,
which is stepped and then rounded into the parameter: in bfloat16 alone, steps below 1/256 of a
weight would be lost. With ``draws`` there are no copies: steps are rounded stochastically
(:func:`k31fn.optim.rounded`).

A donated step works leaf by leaf, and a large leaf in slices: at most 256 MiB are widened at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from k31fn import _functorch, precision, tree
from k31fn.kernels.philox import stochastic_round
from k31fn.kernels.philox.reference import Draws
from k31fn.params import ParamSpec
from k31fn.typing import Bool, Float, Tensor

__all__ = [
    "Leaves",
    "Transform",
    "Update",
    "Where",
    "combine",
    "non_finite",
    "refuse_differentiated",
    "select",
]

Where = Callable[[str, ParamSpec], bool]


@runtime_checkable
class Update(Protocol):
    """One step of an optimiser."""

    def __call__(
        self,
        grads: Any,
        state: Any,
        params: Any,
        *,
        lr: float | Tensor,
        scale: Float[Tensor, ""] | None = None,
        skip: Bool[Tensor, ""] | None = None,
        draws: Mapping[str, Draws] | None = None,
        donate: bool = False,
    ) -> tuple[Any, Any]:
        """``(params, state)`` after the step.

        Args:
            grads: a gradient per stepped leaf, at the path of its parameter; other leaves are not
                looked at.
            state: from ``init`` or the step before; of the same structure.
            params: the whole parameter tree.
            lr: learning rate of this step; a float64 scalar has the bits of the Python float.
            scale: factor of all gradients, such as :func:`k31fn.optim.clip_factor`; None: 1.
            skip: true: nothing changes (see :func:`non_finite`).
            draws: by path, for the rounding of each narrow parameter that has no master.
            donate: write into ``params`` and ``state`` and return them; the caller gives them up.

        Raises:
            ValueError: ``donate`` inside a transform or a graph, or trees that do not fit.
        """
        ...


@dataclass(frozen=True)
class Transform:
    """An optimiser.

    Attributes:
        init: ``params -> state``; also on meta tensors, to know the state's shapes. With
            ``masters=False`` no copies of narrow parameters are kept: updates have ``draws``.
        update: see :class:`Update`.
        paths: of the leaves that it steps.
    """

    init: Callable[..., Any]
    update: Update
    paths: frozenset[str]


def combine(specs: Any, *transforms: Transform) -> Transform:
    """One optimiser out of several that step different leaves; its state is the tuple of theirs.

    Raises:
        ValueError: a leaf is stepped by two of them, or a leaf that is not ``frozen`` by none.
    """
    trained = {path for path, spec in tree.flatten_with_paths(specs) if "frozen" not in spec.tags}
    stepped: set[str] = set()
    for index, transform in enumerate(transforms):
        twice = sorted(stepped & transform.paths)
        if twice:
            raise ValueError(
                f"transforms[{index}] steps leaves that one before it steps too: {twice[:5]}"
            )
        stepped |= transform.paths
    missed = sorted(trained - stepped)
    if missed:
        raise ValueError(
            f"no transform steps {missed[:5]} ({len(missed)} leaves); tag them frozen if that is "
            "meant"
        )

    def init(params: Any, *, masters: bool = True) -> tuple[Any, ...]:
        return tuple(t.init(params, masters=masters) for t in transforms)

    def update(
        grads: Any,
        state: Any,
        params: Any,
        *,
        lr: float | Tensor,
        scale: Float[Tensor, ""] | None = None,
        skip: Bool[Tensor, ""] | None = None,
        draws: Mapping[str, Draws] | None = None,
        donate: bool = False,
    ) -> tuple[Any, Any]:
        # One after the other on the same tree: they step different leaves.
        new_states = []
        for transform, old_state in zip(transforms, state, strict=True):
            params, new_state = transform.update(
                grads,
                old_state,
                params,
                lr=lr,
                scale=scale,
                skip=skip,
                draws=draws,
                donate=donate,
            )
            new_states.append(new_state)
        return params, tuple(new_states)

    return Transform(init, update, frozenset(stepped))


def refuse_differentiated(grads: Any, params: Any, *factors: Any) -> None:
    """Refuses to write where a transform or a graph leads through the step: torch would raise in
    other words, or drop the derivative.

    Args:
        grads: of the step.
        params: a leaf that requires grad is written into, as torch's own optimisers do.
        factors: learning rate and scale.

    Raises:
        ValueError: names ``donate=False``.
    """
    where = ""
    if _functorch.transforms_active():
        where = "inside a torch.func transform (vmap, grad, a simulated mesh)"
    elif torch.is_grad_enabled():
        read = tree.leaves((grads, factors), allow_none=True)
        if any(isinstance(x, Tensor) and x.requires_grad for x in read):
            where = "to gradients, a rate or a scale that are part of an autograd graph"
        elif any(x.requires_grad and not x.is_leaf for x in tree.leaves(params)):
            where = "to parameters that are results of an autograd graph"
    if where:
        raise ValueError(
            f"update(donate=True) {where}: it writes in place, which no derivative goes through; "
            "leave donate=False, the default, which changes no input"
        )


def non_finite(values: Any) -> Bool[Tensor, ""]:
    """Whether any element of any leaf is infinite or NaN, on the device.

    The norm of all gradients is enough to look at: it is infinite or NaN if one of them is.
    """
    # One flag per leaf, joined on the device: nobody waits for a leaf before the next is looked at.
    return torch.stack([~torch.isfinite(x).all() for x in tree.leaves(values)]).any()


def select(condition: Bool[Tensor, ""], on_true: Any, on_false: Any) -> Any:
    """The leaves of one of two trees, chosen on the device: for what else a skipped step must leave
    unchanged.
    """
    return tree.map(lambda a, b: torch.where(condition, a, b), on_true, on_false)


class Leaves:
    """The leaves of a parameter tree that a transform steps, and access to them in trees of like
    structure.
    """

    def __init__(self, specs: Any, where: Where | None) -> None:
        """Chooses those whose ``where(path, spec)`` holds (None: all) and that are not frozen."""
        pairs = tree.flatten_with_paths(specs)
        self._all: list[str] = []
        self._structure = tree.flatten(specs)[1]
        self._index: list[int] = []  # of the chosen ones among all leaves
        self.paths: list[str] = []
        self.specs: list[ParamSpec] = []
        for i, (path, spec) in enumerate(pairs):
            self._all.append(path)
            if "frozen" not in spec.tags and (where is None or where(path, spec)):
                self._index.append(i)
                self.paths.append(path)
                self.specs.append(spec)

    def decays(self, weight_decay: float) -> list[float]:
        """The weight decay of each stepped leaf: none where it is tagged ``no_decay``."""
        return [0.0 if "no_decay" in spec.tags else weight_decay for spec in self.specs]

    def of_params(self, params: Any) -> list[Any]:
        """The stepped leaves of a tree like the parameters.

        Raises:
            ValueError: the tree is not that of the specs.
        """
        values, structure = tree.flatten(params)
        if structure != self._structure:
            # Only for its error, which says where the two differ.
            tree.map(lambda *_: 0, tree.unflatten(self._structure, self._all), params)
        return self._pick(values)

    def of_grads(self, grads: Any) -> list[Tensor]:
        """The gradients of the stepped leaves; the tree may lack others.

        Raises:
            ValueError: the gradient of a stepped leaf is absent.
        """
        values, structure = tree.flatten(grads, allow_none=True)
        if structure == self._structure:
            candidates = self._pick(values)
        else:
            # Paths take longer than positions, so only where positions do not agree.
            by_path = dict(tree.flatten_with_paths(grads, allow_none=True))
            candidates = list(map(by_path.get, self.paths))
        gradients: list[Tensor] = []
        missing: list[str] = []
        for path, gradient in zip(self.paths, candidates, strict=True):
            if gradient is None:
                missing.append(path)
            else:
                gradients.append(gradient)
        if missing:
            raise ValueError(
                f"grads have no leaf {missing[0]!r} ({len(missing)} missing); tag it frozen to "
                "leave it out"
            )
        return gradients

    def to_tree(self, values: Sequence[Any]) -> Any:
        """A tree like the parameters that holds these at the stepped leaves, ``()`` elsewhere."""
        # () and not None, which is no node of a tree to torch.func.
        full: list[Any] = [()] * len(self._all)
        for i, value in zip(self._index, values, strict=True):
            full[i] = value
        return tree.unflatten(self._structure, full)

    def _pick(self, values: Sequence[Any]) -> list[Any]:
        """The values of the stepped leaves, out of those of all leaves."""
        return [values[i] for i in self._index]

    def _replace(self, params: Any, values: Sequence[Tensor]) -> Any:
        """``params`` with these in place of the stepped leaves."""
        full, structure = tree.flatten(params)
        for i, value in zip(self._index, values, strict=True):
            full[i] = value
        return tree.unflatten(structure, full)

    def init_masters(self, params: Any, masters: bool) -> Any:
        """A float32 copy of each stepped leaf that is narrower, ``()`` for the others."""
        copies: list[Any] = []
        for p in self.of_params(params):
            # A wide leaf needs no second copy of itself.
            copies.append(precision.upcast(p) if masters and not _wide(p) else ())
        return self.to_tree(copies)

    def masters(
        self, params: Any, copies: Any, draws: Mapping[str, Draws] | None = None
    ) -> list[Tensor]:
        """What is stepped: the leaf itself, or its master among ``copies``."""
        remaining = iter(tree.leaves(copies))  # wide leaves have none, so positions differ
        masters: list[Tensor] = []
        for p in self.of_params(params):
            masters.append(p if _wide(p) or draws is not None else next(remaining))
        return masters

    def with_masters(self, params: Any, copies: Any, masters: Sequence[Tensor]) -> tuple[Any, Any]:
        """``(params, copies)`` after ``masters`` were stepped in place."""
        for p, master in zip(self.of_params(params), masters, strict=True):
            if master is not p:
                p.copy_(master)
        return params, copies

    def with_new(
        self, params: Any, values: Sequence[Tensor], draws: Mapping[str, Draws] | None
    ) -> tuple[Any, Any]:
        """``(params, copies)`` of new wide values of the stepped leaves."""
        copies: list[Any] = []
        new_params: list[Tensor] = []
        for path, p, value in zip(self.paths, self.of_params(params), values, strict=True):
            if _wide(p) or draws is None:
                copies.append(() if _wide(p) else value)
                new_params.append(value.to(p.dtype))
            else:
                copies.append(())
                new_params.append(stochastic_round(value, draws[path]))
        return self._replace(params, new_params), self.to_tree(copies)


def _wide(x: Tensor) -> bool:
    """Whether it needs no master: steps are taken in its own dtype."""
    return precision.island(x.dtype) == x.dtype
