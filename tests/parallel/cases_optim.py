"""Steps of an optimiser on one rank's parts; spawned processes import it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import optim, params, random, tree
from k31fn.parallel import AxisRules, Mesh, MeshAxes, axes_of_process, fsdp, partition
from k31fn.parallel.tiling import cut
from k31fn.params import Constant, Normal, ParamSpec


def _matrix(
    *shape: int, axes: tuple[str, ...], tags: tuple[str, ...] = (), head_dim: int = 0
) -> ParamSpec:
    return ParamSpec(
        shape, axes, Normal(0.5), torch.bfloat16, frozenset({"matrix", *tags}), head_dim
    )


SPECS = {
    "up": _matrix(8, 16, axes=("hidden", "mlp")),
    "down": _matrix(16, 8, axes=("mlp", "hidden")),
    "query": _matrix(8, 16, axes=("hidden", "heads"), tags=("per_head",), head_dim=4),
    "odd query": _matrix(3, 16, axes=("hidden", "heads"), tags=("per_head",), head_dim=8),
    "experts": _matrix(4, 8, 16, axes=("experts", "latent", "expert_mlp"), tags=("expert",)),
    "three": _matrix(4, 3, 5, axes=("experts", "", ""), tags=("expert",)),
    "norm": ParamSpec((8,), ("hidden",), Constant(1.0), torch.float32, frozenset({"no_decay"})),
    "small": ParamSpec((3,), ("",), Normal(0.5), torch.float32),
}


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return params.init(SPECS, random.key(0), dtype=dtype)


def gradients(dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    return [params.init(SPECS, random.key(1 + i), dtype=dtype) for i in range(3)]


def optimizer(kind: str, places: Any) -> optim.Transform:
    if kind == "adamw":
        return optim.adamw(SPECS)
    others = optim.adamw(SPECS, where=lambda path, spec: "matrix" not in spec.tags)
    return optim.combine(SPECS, optim.muon(SPECS, placements=places), others)


class Steps(NamedTuple):
    params: dict[str, Tensor]
    state_shapes: dict[str, torch.Size]
    norm: Tensor


def three_steps(axes: MeshAxes, mesh: Mesh, kind: str, w: Any, *grads: Any) -> Steps:
    """Parameters, the shapes of what is remembered of each, and the last gradient's norm."""
    places = fsdp.placements(SPECS, partition(SPECS, AxisRules(), mesh), axes)
    transform = optimizer(kind, places)
    state, norm = transform.init(w), torch.zeros(())
    for g in grads:
        clipped, norm = optim.clip_by_global_norm(g, 1.0, specs=SPECS, placements=places)
        w, state = transform.update(clipped, state, w, lr=0.1, skip=optim.non_finite(norm))
    remembered = [state.mu] if kind == "adamw" else [state[0].momentum, state[1].nu]
    shapes = {
        path: x.shape for part in remembered for path, x in part.items() if isinstance(x, Tensor)
    }
    assert shapes.keys() == SPECS.keys()
    return Steps(w, shapes, norm)


def local(mesh: Mesh, values: dict[str, Tensor], coordinate: Any) -> dict[str, Tensor]:
    """Copies of what one rank holds."""
    return cut_tree(partition(SPECS, AxisRules(), mesh), values, mesh, coordinate)


def cut_tree(part: Any, values: Any, mesh: Mesh, coordinate: Any) -> Any:
    """Copies of what one rank holds of a tree that is partitioned so."""
    tiles = [x.clone() for x in cut(tree.leaves(part), tree.leaves(values), mesh, coordinate)]
    return tree.unflatten(tree.flatten(values)[1], tiles)


def steps_on_rank(mesh: Mesh, kind: str, trees: list[Any]) -> tuple[list[Tensor], dict[str, Any]]:
    axes, coordinate = axes_of_process(mesh)
    got = three_steps(axes, mesh, kind, *[local(mesh, t, coordinate) for t in trees])
    return [got.params[path] for path in SPECS], {}


def bad_on_rank(mesh: Mesh, grads: Any, p: float | int) -> tuple[list[Tensor], dict[str, Any]]:
    axes, coordinate = axes_of_process(mesh)
    places = fsdp.placements(SPECS, partition(SPECS, AxisRules(), mesh), axes)
    norm = optim.global_norm(local(mesh, grads, coordinate), placements=places, p=p)
    return [], {"bad": bool(optim.non_finite(norm))}
