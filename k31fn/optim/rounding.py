"""Parameters kept in bfloat16 alone, without float32 copies beside them.

A step is taken from them in float32 and rounded back stochastically
(:func:`k31fn.random.stochastic_round`): steps far below 1/256 of a weight, which nearest rounding
would lose, add up in expectation. So a parameter takes 2 bytes where it takes 4, or 6 with a copy;
in the step, while no activations are there, float32 values of all of them are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k31fn import params as declared
from k31fn import precision, random, tree
from k31fn.optim.transform import Transform
from k31fn.params import ParamSpec
from k31fn.typing import Bool, Int, Tensor

__all__ = ["rounded"]


@tree.dataclass
class _RoundedState:
    """What :func:`rounded` remembers: updates made (not skipped ones), int64, and the state of the
    optimiser inside.
    """

    updates: Int[Tensor, ""]
    inner: Any


def rounded(
    inner: Transform,
    specs: Any,
    seed: int,
    *,
    tile: Callable[[str, ParamSpec], tuple[slice, ...]] | None = None,
) -> Transform:
    """``inner``, whose steps of bfloat16 parameters are rounded stochastically instead of kept in
    float32.

    The bits depend on ``seed``, the number of the update, the path and the place in the whole
    weight: every mesh and every rank that holds a part draws the same. A skipped step changes no
    bit. Parameters of other dtypes are stepped as ``inner`` does.

    Args:
        inner: the optimiser; it sees parameters in float32.
        specs: of all parameters.
        seed: of the draws.
        tile: ``(path, spec) -> slices``: what this rank holds; None: all.
    """
    by_path = dict(tree.flatten_with_paths(specs))

    def widen(params: Any) -> Any:
        return tree.map_with_path(
            lambda path, p: precision.upcast(p) if path in inner.paths else p, params
        )

    def init(params: Any) -> _RoundedState:
        device = tree.leaves(params)[0].device
        updates = torch.zeros((), dtype=torch.int64, device=device)
        return _RoundedState(updates, inner.init(widen(params)))

    def update(
        grads: Any,
        state: _RoundedState,
        params: Any,
        *,
        lr: float | Tensor,
        skip: Bool[Tensor, ""] | None = None,
        donate: bool = True,
    ) -> tuple[Any, _RoundedState]:
        wide, inner_state = inner.update(
            grads, state.inner, widen(params), lr=lr, skip=skip, donate=donate
        )
        # A key of each update: with one for all, an element would be rounded the same way at every
        # step, and small steps would not add up.
        key = random.fold_in(random.key(seed, device=state.updates.device), state.updates)
        stepped = dict(tree.flatten_with_paths(wide))

        def narrow(path: str, p: Tensor) -> Tensor:
            x = stepped[path]
            if x.dtype == p.dtype:
                return x  # float32 islands, which `inner` steps as they are
            # Meta tensors have no values to draw for: only shapes are asked for.
            new = x.to(p.dtype) if x.is_meta else _round(path, x, p.dtype)
            return p.copy_(new) if donate else new

        def _round(path: str, x: Tensor, dtype: torch.dtype) -> Tensor:
            spec = by_path[path]
            place = None if tile is None else tile(path, spec)
            shape = None if tile is None else spec.shape
            leaf_key = declared.leaf_key(key, path)
            return random.stochastic_round(x, dtype, leaf_key, shape=shape, tile=place)

        # A skipped step is drawn from the same key again, which changes no bit: what is exactly a
        # bfloat16 number is rounded to itself.
        taken = torch.ones_like(state.updates) if skip is None else (~skip).to(torch.int64)
        new_state = _RoundedState(state.updates + taken, inner_state)
        return tree.map_with_path(narrow, params), new_state

    return Transform(init, update, inner.paths)
