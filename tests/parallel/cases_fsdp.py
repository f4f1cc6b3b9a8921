"""A chain of small layers with parameters over the data axes; spawned processes import it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k31fn import optim, params, random, tree
from k31fn.autodiff import custom_vjp, decision, stop_gradient, value_and_grad
from k31fn.parallel import (
    AxisRules,
    Mesh,
    MeshAxes,
    P,
    axes_of_process,
    axis_size,
    fsdp,
    note_event,
    partition,
    psum,
    pvary,
    record_collectives,
)
from k31fn.parallel.partition import tiles
from k31fn.parallel.scan import Prefetch, scan
from k31fn.parallel.tiling import cut
from k31fn.params import Normal, ParamSpec
from k31fn.testing import live_bytes

LAYERS, D, F = 3, 8, 12
ROWS = P(("dp", "fsdp"), "cp", None)


def layer_specs(width: int = F, hidden: int = D) -> dict[str, ParamSpec]:
    """Two matrices, and a vector that no even number of ranks divides."""
    return {
        "a": ParamSpec((hidden, width), ("hidden", "mlp"), Normal(0.5)),
        "b": ParamSpec((width, hidden), ("mlp", "hidden"), Normal(0.3)),
        "small": ParamSpec((3,), ("",), Normal(1.0), dtype=torch.float32),
    }


SPECS = [layer_specs() for _ in range(LAYERS)]


def weights(seed: int = 0) -> list[dict[str, Tensor]]:
    return params.init(SPECS, random.key(seed), dtype=torch.float64)


def inputs(seed: int = 1, rows: int = 8) -> Tensor:
    return random.normal(random.key(seed), (rows, 4, D)).to(torch.float64)


def placed(axes: MeshAxes, mesh: Mesh, specs: Any = None, **dtypes: Any) -> Any:
    specs = SPECS if specs is None else specs
    return fsdp.placements(specs, partition(specs, AxisRules(), mesh), axes, **dtypes)


def mesh_of(axes: MeshAxes) -> Mesh:
    """The mesh that these are the axes of, without ep."""
    return Mesh(**{view: axis_size(axes.view(view)) for view in ("pp", "dp", "fsdp", "cp", "tp")})


def _noted_fwd(x: Tensor, text: str) -> tuple[Tensor, Any]:
    note_event(f"run {text}")
    return x.clone(), ()


def _noted_bwd(text: str, _: Any, g: Tensor) -> tuple[Tensor]:
    note_event(f"pull {text}")
    return (g,)


_noted = custom_vjp(_noted_fwd, _noted_bwd, nondiff_argnums=(1,), name="noted")


def step(i: int, axes: MeshAxes, w: Any, carry: Any, shared: Any, own: Any) -> tuple[Any, Any]:
    """Tensor-parallel layer ``i`` on a state that freezes a block at every other layer; chooses
    some features.
    """
    x = _noted(carry["x"], str(i))
    chosen = decision("half", lambda x: x.abs() > x.abs().mean(-1, keepdim=True), x)
    read = x * chosen + sum(carry["blocks"], torch.zeros_like(x)) * shared["mix"]
    y = psum(torch.tanh(pvary(read, axes.tp) @ w["a"]) @ w["b"], axes.tp) * w["small"].sum() + own
    blocks = (*carry["blocks"], carry["x"]) if i % 2 == 0 else carry["blocks"]
    return {"x": carry["x"] + y, "blocks": blocks}, y.square().sum((1, 2)) * shared["count"]


def chain(
    axes: MeshAxes,
    layers: list[dict[str, Tensor]],
    x: Tensor,
    mix: Tensor,
    *,
    mode: str = "scan",
    places: Any = None,
) -> tuple[Tensor, Tensor]:
    """The last state, and a sum over tokens by row.

    Args:
        axes: of the rank.
        layers: its parts.
        x: its rows and tokens.
        mix: a weight that all layers share.
        mode: scan, prefetch (a loop that gathers ahead) or plain (one that gathers each layer when
            it is used).
        places: of the layers.
    """
    places = placed(axes, mesh_of(axes)) if places is None else places
    steps = [functools.partial(step, i, axes) for i in range(len(layers))]
    carry, own = (
        {"x": x, "blocks": ()},
        [stop_gradient(x[0, 0]) * 0 + i for i in range(len(layers))],
    )
    shared = {"mix": pvary(mix, axes.data), "count": torch.tensor(2)}
    if mode == "scan":
        carry, sums = scan(steps, places, layers, carry, shared, own)
    else:
        sums, ahead = [], Prefetch(layers, places, range(len(layers)) if mode == "prefetch" else ())
        for f, part, place, bias in zip(steps, layers, places, own, strict=True):
            if mode == "prefetch":
                carry, y = f(ahead.take(), carry, shared, bias)
            else:
                carry, y = f(fsdp.gather(part, place), carry, shared, bias)
            sums.append(y)
    return sum(carry["blocks"], carry["x"]), psum(torch.stack([*sums]).sum(0), axes.cp)


plain = functools.partial(chain, mode="plain")


def prefetched(
    axes: MeshAxes, layers: list[dict[str, Tensor]], x: Tensor, mix: Tensor
) -> tuple[Tensor, Tensor]:
    return chain(axes, layers, x, mix, mode="prefetch")


# ---------------------------------------------------------------------------------- a training step
def loss_of(axes: MeshAxes, layers: Any, x: Tensor, places: Any, mode: str = "scan") -> Tensor:
    """This rank's part of the loss, a plain sum."""
    y, sums = chain(axes, layers, x, torch.tensor(0.4, dtype=x.dtype), mode=mode, places=places)
    return y.square().sum() + pvary(sums, axes.cp).sum() / axis_size(axes.cp)


def gradients(
    axes: MeshAxes, layers: Any, x: Tensor, micro: int, **dtypes: Any
) -> tuple[Tensor, Any, Tensor]:
    """Loss, gradients and their norm of a step of ``micro`` micro-batches."""
    places = placed(axes, mesh_of(axes), **dtypes)
    held, inner = fsdp.enter_step(layers, places), fsdp.gather_only(places)
    total, sums = torch.zeros(()), None
    for rows in x.chunk(micro):
        value, grads = value_and_grad(lambda w, rows: loss_of(axes, w, rows, inner))(held, rows)
        total, sums = total + value, grads if sums is None else tree.map(torch.add, sums, grads)
    sums = fsdp.sum_gradients(sums, places)
    return psum(total, axes.data), sums, optim.global_norm(sums, placements=places)


def gradients_on_rank(
    mesh: Mesh, layers: Any, x: Tensor, micro: int
) -> tuple[list[Tensor], dict[str, Any]]:
    axes, coordinate = axes_of_process(mesh)
    part = partition(SPECS, AxisRules(), mesh)
    layers = tree.unflatten(
        tree.flatten(layers)[1], cut(tree.leaves(part), tree.leaves(layers), mesh, coordinate)
    )
    x = cut([ROWS], [x], mesh, coordinate)[0]
    with record_collectives() as record:
        total, sums, norm = gradients(axes, layers, x, micro)
    return [total, norm, *tree.leaves(sums)], {"psum": record.counts["psum"]}


# ------------------------------------------------------------------------------------------- memory
WIDE = [layer_specs(256, 64) for _ in range(8)]


def peak_on_rank(mode: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Bytes of a rank's parameters, and what a gradient of the chain holds at its peak."""
    mesh = Mesh(fsdp=dist.get_world_size())
    axes, coordinate = axes_of_process(mesh)
    part = partition(WIDE, AxisRules(), mesh)
    layers = params.init(
        WIDE, random.key(0), dtype=torch.float32, tile=tiles(WIDE, part, mesh, coordinate)
    )
    places, x = placed(axes, mesh, WIDE), torch.ones(1, 2, 64)
    state = optim.adamw(WIDE).init(layers)
    with live_bytes() as live:
        _, grads = value_and_grad(lambda w: loss_of(axes, w, x, places, mode))(layers)
    size = {"params": layers, "grads": grads, "state": (state.mu, state.nu)}
    return [], {"peak": live.peak} | {
        k: sum(t.nbytes for t in tree.leaves(v)) for k, v in size.items()
    }
