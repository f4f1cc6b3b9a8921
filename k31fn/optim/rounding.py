"""Parameters kept in bfloat16 alone, without float32 copies beside them.

A step is taken from them in float32 and rounded back stochastically
(:func:`k31fn.random.stochastic_round`): steps far below 1/256 of a weight, which nearest rounding
would lose, add up in expectation. So a parameter takes 2 bytes where it takes 4, or 6 with a copy.
The step itself rounds, leaf by leaf or inside a kernel: no float32 tree is ever there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from k31fn import random, tree
from k31fn.kernels.philox.reference import Draws
from k31fn.optim.transform import Transform
from k31fn.params import ParamSpec, leaf_keys
from k31fn.typing import Bool, Float, Int, Tensor

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
        inner: the optimiser; it keeps no masters and is given the draws.
        specs: of all parameters.
        seed: of the draws.
        tile: ``(path, spec) -> slices``: what this rank holds; None: all.
    """
    by_path = dict(tree.flatten_with_paths(specs))

    def init(params: Any, *, masters: bool = False) -> _RoundedState:
        del masters  # there are none, whatever is asked for
        device = tree.leaves(params)[0].device
        updates = torch.zeros((), dtype=torch.int64, device=device)
        return _RoundedState(updates, inner.init(params, masters=False))

    def update(
        grads: Any,
        state: _RoundedState,
        params: Any,
        *,
        lr: float | Tensor,
        scale: Float[Tensor, ""] | None = None,
        skip: Bool[Tensor, ""] | None = None,
        draws: Mapping[str, Draws] | None = None,
        donate: bool = False,
    ) -> tuple[Any, _RoundedState]:
        del draws  # its own
        # A key of each update: with one for all, an element would be rounded the same way at every
        # step, and small steps would not add up.
        key = random.fold_in(random.key(seed, device=state.updates.device), state.updates)
        params, inner_state = inner.update(
            grads,
            state.inner,
            params,
            lr=lr,
            scale=scale,
            skip=skip,
            draws=draws_of(params, key),
            donate=donate,
        )
        # A skipped step is drawn from the same key again, which changes no bit: what is exactly a
        # bfloat16 number is rounded to itself.
        taken = torch.ones_like(state.updates) if skip is None else (~skip).to(torch.int64)
        return params, _RoundedState(state.updates + taken, inner_state)

    def draws_of(params: Any, key: Tensor) -> dict[str, Draws]:
        # float32 islands, which `inner` steps as they are, draw nothing
        narrow: list[str] = []
        for path, p in tree.flatten_with_paths(params):
            if path in inner.paths and p.dtype == torch.bfloat16:
                narrow.append(path)
        draws: dict[str, Draws] = {}
        for path, leaf_key in leaf_keys(key, narrow).items():
            spec = by_path[path]
            place = [slice(0, n) for n in spec.shape] if tile is None else tile(path, spec)
            draws[path] = Draws(leaf_key, spec.shape, tuple(s.start or 0 for s in place))
        return draws

    return Transform(init, update, inner.paths)
