"""Scans in which most weights are frozen: what a loop costs, and one more run of the layers that
are differentiated.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from k31fn import params, random, tree
from k31fn.autodiff import stop_gradient, value_and_grad, vjp
from k31fn.parallel import AxisRules, Mesh, P, fsdp, partition, record_collectives, shard_map
from k31fn.parallel.scan import RematPlan, dependence, scan
from k31fn.params import Normal, ParamSpec
from k31fn.testing import assert_close_trees, live_bytes

D, ROWS, LAYERS, WATCHED = 8, 4, 5, (1, 3)
PRODUCT, PLAN = 2 * ROWS * D * D, RematPlan()
MATRIX = ParamSpec((D, D), ("hidden", ""), Normal(0.4))
SPECS = [
    {"a": MATRIX, "b": MATRIX} | ({"side": MATRIX} if i in WATCHED else {}) for i in range(LAYERS)
]


def step(w: Any, carry: Any, shared: Any, own: Any, *, joins: bool = False) -> Any:
    """Two products on the carry, whose first value goes along; ``side`` watches, as an indexer
    does, or joins in.
    """
    x, first = carry
    seen = torch.tanh(stop_gradient(x) @ w["side"]) if "side" in w else x.new_zeros(())
    return (
        x + torch.tanh(x @ w["a"]) @ w["b"] + (seen if joins else 0) + 0 * first,
        first,
    ), seen.square().sum()


def weights() -> list[Any]:
    return params.init(SPECS, random.key(0), dtype=torch.float64)


def x_of(rows: int = ROWS) -> Tensor:
    return random.normal(random.key(1), (rows, D), dtype=torch.float64)


def run(
    ws: Any, x: Tensor, mode: str, places: Any, *, joins: bool = False, plan: RematPlan = PLAN
) -> Tensor:
    """A loss of the last carry and of what is watched; the same as a loop or a scan."""
    f: Any = functools.partial(step, joins=joins)
    carry: Any = (torch.sin(x), torch.cos(x))
    if mode == "scan":
        carry, seen = scan([f] * LAYERS, places, ws, carry, (), [()] * LAYERS, plan)
    else:
        seen = []
        for w, place in zip(ws, places, strict=True):
            carry, y = f(fsdp.gather(w, place), carry, (), ())
            seen.append(y)
    return carry[0].square().sum() + torch.stack([*seen]).sum()


def frozen_but(pattern: str) -> Any:
    def freeze(path: str, spec: ParamSpec) -> ParamSpec:
        return (
            spec
            if re.fullmatch(pattern, path)
            else dataclasses.replace(spec, tags=spec.tags | {"frozen"})
        )

    return tree.map_with_path(freeze, SPECS)


def gradient(pattern: str, mode: str, **how: Any) -> tuple[Any, int]:
    """Of the weights that are not frozen, and the FLOPs."""
    places = fsdp.placements(
        frozen_but(pattern), partition(SPECS, AxisRules(), Mesh()), Mesh().axes()
    )
    paths, structure = tree.paths(SPECS), tree.flatten(SPECS)[1]
    held = dict(zip(paths, tree.leaves(weights()), strict=True))
    trained = {path: w for path, w in held.items() if re.fullmatch(pattern, path)}

    def f(trained: Any) -> Tensor:
        return run(
            tree.unflatten(structure, [(held | trained)[p] for p in paths]),
            x_of(),
            mode,
            places,
            **how,
        )

    with FlopCounterMode(display=False) as flops:
        grads = value_and_grad(f)(trained)[1]
    return grads, flops.get_total_flops()


@pytest.mark.parametrize(
    ("pattern", "joins", "again"),
    [
        (r"\d\.side", False, 2 * 3),  # two layers of three products
        (r"\d\.side", True, 3 + 2 + 3 + 2),  # from the first of them on
        (r"3\.a", False, 3 + 2),
        (r"0\.b", False, 2 * 3 + 3 * 2),
    ],
)
def test_as_a_loop_with_a_second_run_of_what_is_differentiated(
    pattern: str, joins: bool, again: int
) -> None:
    expected, flops = gradient(pattern, "loop", joins=joins)
    got, with_scan = gradient(pattern, "scan", joins=joins)
    assert_close_trees(got, expected, rtol=1e-13, atol=1e-13)
    assert all(bool(g.any()) for g in got.values())
    assert with_scan - flops == again * PRODUCT
    kept, _ = gradient(pattern, "scan", joins=joins, plan=RematPlan(frozenset({"a"}), 2))
    assert_close_trees(kept, expected, rtol=1e-13, atol=1e-13)


def test_a_dependence_that_is_overlooked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer = dependence.Dependence.run

    def overlooked(self: Any, i: int, *args: Any) -> Any:
        found = run_layer(self, i, *args)
        self.carries[-1] = tree.map(lambda _: False, self.carries[-1])
        return found

    monkeypatch.setattr(dependence.Dependence, "run", overlooked)
    with pytest.raises(RuntimeError, match="grad can be implicitly created"):
        gradient(r"3\.a", "scan")


def test_what_is_sent() -> None:
    """Over two ranks: all weights once, those of watched layers again, and the gradients of what
    watches.
    """
    mesh, split = Mesh(fsdp=2), partition(SPECS, AxisRules(), Mesh(fsdp=2))
    specs = frozen_but(r"\d\.side")

    def local(axes: Any, ws: Any, x: Tensor) -> Any:
        return value_and_grad(lambda ws: run(ws, x, "scan", fsdp.placements(specs, split, axes)))(
            ws
        )[1]

    with record_collectives() as record:
        grads = shard_map(local, mesh, (split, P("fsdp")), split, backend="threads")(
            weights(), x_of(8)
        )

    def halves(ws: Any) -> Tensor:
        return torch.stack([run(ws, x, "loop", places()) for x in x_of(8).chunk(2)]).sum()

    expected = value_and_grad(halves)(weights())[1]
    assert_close_trees(
        [g["side"] for g in grads[1:4:2]], [g["side"] for g in expected[1:4:2]], rtol=1e-13, atol=0
    )
    assert not any(g["a"].any() or g["b"].any() for g in grads)
    part = D * D * 8 // 2
    assert record.ranks[0].nbytes["all_gather"] == (2 * LAYERS + 2 + 2 * 3) * part
    assert record.ranks[0].counts["psum_scatter"] == 2


def places() -> Any:
    return fsdp.placements(SPECS, partition(SPECS, AxisRules(), Mesh()), Mesh().axes())


def held(pattern: str) -> float:
    """Carries' parts between forward and backward."""
    where = fsdp.placements(
        frozen_but(pattern), partition(SPECS, AxisRules(), Mesh()), Mesh().axes()
    )
    ws, x = weights(), x_of()
    with live_bytes() as live:
        value, pull = vjp(lambda ws: run(ws, x, "scan", where), ws)
        between = live.current / x.nbytes
        pull(torch.ones_like(value))
    return between


def test_only_carries_that_are_needed_are_kept() -> None:
    trained = held(r"0\.a")
    assert trained == pytest.approx(
        LAYERS + 2, abs=0.5
    )  # a value by layer and the first ones; the last, for the loss
    assert held(r"\d\.side") == pytest.approx(
        2 + 1, abs=0.5
    )  # of two layers, with what all share; no loss needs more


def test_nothing_is_noted_where_nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of ordinary training makes no graph."""
    monkeypatch.setattr(dependence, "taping", None)
    x = x_of().requires_grad_()
    value = run(tree.map(lambda w: w.requires_grad_(), weights()), x, "scan", places())
    assert value.requires_grad
