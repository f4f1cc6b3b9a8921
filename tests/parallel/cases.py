"""Functions of one rank's arrays that the tests run on every backend; spawned processes import them
from here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import custom_vjp, remat, vjp
from k31fn.layers import mlp
from k31fn.parallel import (
    Mesh,
    MeshAxes,
    P,
    Sharding,
    all_gather,
    all_gather_invariant,
    all_to_all,
    axes_of_process,
    axis_index,
    check_invariance,
    pmax,
    ppermute,
    pslice,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
    record_collectives,
    start,
    wait,
)
from k31fn.parallel.backends.processes import exchange_json
from k31fn.parallel.tiling import cut

SHIFT = {
    n: tuple((i, (i + 1) % n) for i in range(n - 1)) for n in (2, 4, 8)
}  # the last rank sends nothing

# kind of operand, kind of result, the collective: I equal on the ranks of the axis, V varies
COLLECTIVES: dict[str, tuple[str, str, Callable[[Tensor, Any], Tensor]]] = {
    "psum": ("V", "I", psum),
    "pvary": ("I", "V", pvary),
    "all_gather": ("V", "V", lambda x, a: all_gather(x, a, 1)),
    "all_gather_invariant": ("V", "I", lambda x, a: all_gather_invariant(x, a, -1)),
    "pslice": ("I", "V", pslice),
    "psum_scatter": ("V", "V", lambda x, a: psum_scatter(x, a, -2)),
    "all_to_all": ("V", "V", lambda x, a: all_to_all(x, a, 0, 1)),
    "ppermute": (
        "V",
        "V",
        lambda x, a: ppermute(x, a, SHIFT[functools.reduce(lambda n, b: n * b.size, a, 1)]),
    ),
}


def derivatives(
    axes: MeshAxes, op: str, over: list[str], x: Tensor, ct: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """y = C(x^2), its gradient for ``ct``, and the gradients of <v, gradient> for ``x`` and ``ct``.

    Arguments and results have the ranks' dimension in front, of size 1.
    """
    collective, view = COLLECTIVES[op][2], axes.view(*over)

    def f(x: Tensor) -> Tensor:
        return collective(x.square(), view)

    def gradient(x: Tensor, ct: Tensor) -> Tensor:
        return vjp(f, x)[1](ct)[0]

    g, pull = vjp(gradient, x[0], ct[0])
    return tuple(t[None] for t in (f(x[0]), g, *pull(v[0])))


def on_rank(
    op: str, over: list[str], mesh: Mesh, specs: list[Any], arrays: list[Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    axes, coordinate = axes_of_process(mesh)
    with check_invariance(), record_collectives() as record:
        out = derivatives(axes, op, over, *cut([P(*s) for s in specs], arrays, mesh, coordinate))
    return list(out), {"counts": dict(record.counts)}


# ------------------------------------------------------------------------------------------- layers
MLP = mlp.Config(hidden_size=6, intermediate_size=8)


def tensor_parallel_mlp(axes: MeshAxes, params: mlp.Params[Tensor], x: Tensor) -> Tensor:
    return mlp.apply(params, x, MLP, sh=Sharding.on(axes)).y


def dense_in_disguise(axes: MeshAxes, params: mlp.Params[Tensor], x: Tensor) -> Tensor:
    """Equal values and gradients, without any work split: gathers the weights and computes
    everything.
    """
    dims = mlp.Params(w_gate=1, w_up=1, w_down=0)
    whole = tree.map(lambda w, dim: all_gather_invariant(w, axes.tp, dim), params, dims)
    return pslice(mlp.apply(whole, all_gather_invariant(x, axes.tp, 1), MLP).y, axes.tp, 1)


def gathered_mlp(axes: MeshAxes, params: mlp.Params[Tensor], x: Tensor) -> Tensor:
    """FSDP over the first dimension of each weight, inside remat."""

    def block(params: mlp.Params[Tensor], x: Tensor) -> Tensor:
        return mlp.apply(tree.map(lambda w: all_gather(w, axes.fsdp), params), x, MLP).y

    return remat(block)(params, x)


_relu = custom_vjp(
    lambda h: (torch.relu(h), h), lambda h, g: (g * (h > 0),), opaque=True, name="relu"
)


def composition(
    axes: MeshAxes, layers: list[dict[str, Tensor]], x: Tensor, *, mode: str = "remat"
) -> Tensor:
    """FSDP gather x TP x an opaque custom_vjp, plain, inside remat or inside nested remats; the
    mean square.
    """

    def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
        w1, w2 = all_gather(p["w1"], axes.fsdp, 0), all_gather(p["w2"], axes.fsdp, 1)
        return x + psum(_relu(pvary(x, axes.tp) @ w1) @ w2, axes.tp)

    def two(layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        return remat(block)(layers[1], remat(block)(layers[0], x))

    n = x.numel()
    for a in axes.fsdp:
        n *= a.size
    if mode == "nested":
        x = remat(lambda ps, x: remat(block)(ps[2], remat(two)(ps[:2], x)))(layers, x)
    else:
        for p in layers:
            x = (remat(block) if mode == "remat" else block)(p, x)
    return psum(x.square().sum() / n, axes.fsdp)


def plain_composition(axes: MeshAxes, layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    return composition(axes, layers, x, mode="plain")


def nested_composition(axes: MeshAxes, layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    return composition(axes, layers, x, mode="nested")


def prefetched(axes: MeshAxes, layers: list[Tensor], x: Tensor) -> Tensor:
    """Each weight is gathered while the layer before it runs."""
    pending = start(all_gather, layers[0], axes.fsdp)
    for i in range(len(layers)):
        w = wait(pending)
        if i + 1 < len(layers):
            pending = start(all_gather, layers[i + 1], axes.fsdp)
        x = torch.tanh(x @ w)
    return x


# ---------------------------------------------------------------------- what only real ranks can do
def exchange_rows(axes: MeshAxes, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rank 0 keeps one row and sends the rest; rank 1 sends nothing.

    The result and the gradient of its square sum.
    """
    sizes = [(1, 3), (0, 0)]
    me = int(axis_index(axes.tp))
    x = x[: sum(sizes[me])]
    y, pull = vjp(lambda x: ragged_all_to_all(x, axes.tp, sizes[me], [s[me] for s in sizes]), x)
    return y, pull(2 * y)[0]


def rows_on_rank() -> tuple[list[Tensor], dict[str, Any]]:
    axes, _ = axes_of_process(Mesh(tp=2))
    y, g = exchange_rows(axes, torch.arange(8.0).reshape(4, 2) + 1)
    heard = exchange_json(
        {"rank": int(axis_index(axes.tp)), "text": "é" * int(axis_index(axes.tp))}, axes.tp
    )
    top = pmax(torch.tensor([1.0 + float(axis_index(axes.tp))]), axes.tp)
    return [y, g, top], {"heard": heard}


def forgotten_pvary(axes: MeshAxes, w: Tensor, x: Tensor) -> Tensor:
    """Two row-parallel products; the second uses the sum of the first on each rank without
    pvary.
    """
    h = psum(pvary(x, axes.tp) * w, axes.tp)
    return psum(h * w, axes.tp)


def forgotten_on_rank(check: bool) -> tuple[list[Tensor], dict[str, Any]]:
    axes, coordinate = axes_of_process(Mesh(tp=2))
    w, x = torch.arange(3.0) + 1 + 3 * coordinate["tp"], torch.ones(3)
    try:
        with check_invariance(check):
            _, pull = vjp(lambda w: forgotten_pvary(axes, w, x), w)
            g = pull(torch.ones(3))[0]
    except ValueError as e:
        return [], {"error": str(e)}
    return [g], {"error": ""}


def started_before_the_other_came(folder: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Rank 1 joins a sum only after rank 0 has written that its start returned: a start that blocks
    never ends.
    """
    axes, coordinate = axes_of_process(Mesh(tp=2))
    mark, x = Path(folder) / "started", torch.ones(2) + coordinate["tp"]
    if coordinate["tp"] == 1:
        deadline = time.monotonic() + 20
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return [psum(x, axes.tp)], {"in time": mark.exists()}
    pending = start(psum, x, axes.tp)
    mark.touch()
    return [wait(pending)], {"in time": True}


def absent_rank() -> tuple[list[Tensor], dict[str, Any]]:
    axes, coordinate = axes_of_process(Mesh(tp=2))
    return ([] if coordinate["tp"] else [psum(torch.ones(2), axes.tp)]), {}
