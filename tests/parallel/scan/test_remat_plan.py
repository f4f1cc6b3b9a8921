"""Scans that keep branches, and the carries of some layers only."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import autodiff, params, random, tree
from k31fn.autodiff import keep, split_vjp, value_and_grad, vjp
from k31fn.parallel import AxisRules, Mesh, P, fsdp, partition, record_collectives, shard_map
from k31fn.parallel.scan import RematPlan, kept_layers, rebuilds, scan
from k31fn.params import Normal, ParamSpec
from k31fn.testing import assert_close_trees, live_bytes
from tests.parallel import cases_fsdp

LAYERS, D, ROWS = 5, 16, 8
SIZE = ROWS * D * 8
MATRIX = ParamSpec((D, D), ("hidden", ""), Normal(0.3))
SPECS = [
    {"norm": ParamSpec((D,), ("hidden",), Normal(1.0)), "branch": {"w": MATRIX, "v": MATRIX}}
] * LAYERS
RUNS: Counter[str] = Counter()


def branch(w: Any, x: Tensor, scale: Tensor) -> Tensor:
    RUNS["branch"] += 1
    return torch.tanh(x @ w["w"]) @ w["v"] * scale


def step(w: Any, x: Tensor, shared: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    RUNS["step"] += 1
    sign = autodiff.decision("sign", lambda x: x.sum() > 0, x)
    y = keep("branch", branch)(w["branch"], torch.sin(x) * w["norm"], shared)
    return x + torch.where(sign, y, -y) * own, y.square().sum()


def light(w: Any) -> Any:
    return {**w, "branch": ()}


def plan(every: int, **changes: Any) -> RematPlan:
    return RematPlan(**{"keep": frozenset({"branch"}), "every": every, "light": light} | changes)


def weights() -> list[Any]:
    return params.init(SPECS, random.key(0), dtype=torch.float64)


def x_of(rows: int = ROWS) -> Tensor:
    return random.normal(random.key(1), (rows, D)).to(torch.float64)


def run(ws: Any, x: Tensor, how: RematPlan | None, places: Any = ()) -> Tensor:
    shared, own = x[0, 0] * 0 + 2, [x[0, 1] * 0 + i + 1 for i in range(LAYERS)]
    if how is None:
        reports = []
        for w, mine in zip(ws, own, strict=True):
            x, y = step(w, x, shared, mine)
            reports.append(y)
    else:
        x, reports = scan([step] * LAYERS, places, ws, x, shared, own, how)
    return x.square().sum() + torch.stack([*reports]).sum()


def gradient(ws: Any, x: Tensor, how: RematPlan | None) -> Any:
    return value_and_grad(lambda ws, x: run(ws, x, how), (0, 1))(ws, x)


@pytest.mark.parametrize("every", [1, 2, 4, 8])
def test_no_bit_changes_and_no_branch_runs_again(every: int) -> None:
    expected = gradient(weights(), x_of(), None)
    RUNS.clear()
    got = gradient(weights(), x_of(), plan(every))
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True)
    )
    # once forward, once backward; the carries that are not kept cost another run of all but the
    # branch
    missing = LAYERS - -(-LAYERS // every)
    assert dict(RUNS) == {"branch": LAYERS, "step": 2 * LAYERS + missing}
    by_transform = torch.func.grad(lambda ws: run(ws, x_of(), plan(every)))(weights())
    assert_close_trees(by_transform, expected[1][0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("places", [False, True])
def test_split_pullbacks(places: bool) -> None:
    where = cases_fsdp.placed(Mesh().axes(), Mesh(), SPECS) if places else ()
    expected = gradient(weights(), x_of(), None)[1]
    value, backward_input = split_vjp(lambda ws, x: run(ws, x, plan(4), where), weights(), x_of())
    (of_x,), backward_weight = backward_input(torch.ones_like(value))
    assert_close_trees((backward_weight(), of_x), expected, rtol=1e-13, atol=1e-13)


def held(how: RematPlan | None) -> float:
    """Hidden states between forward and backward, besides what is in the branches."""
    ws, x = weights(), x_of()
    with live_bytes() as live:
        value, pull = vjp(lambda ws, x: run(ws, x, how), ws, x)
        between = live.current / SIZE
        pull(torch.ones_like(value))
        del pull, value
        assert live.current == 0  # no cycle
    return between


def test_what_is_kept() -> None:
    inside = 1 + 1  # per layer: the tanh, and the product before the scale; besides it the output
    least = (
        LAYERS * (inside + 1) + 1
    )  # with the last carry, for the loss; the first one was there before
    assert held(plan(1)) == pytest.approx(least + LAYERS - 1, abs=0.5)
    assert held(plan(4)) == pytest.approx(least + 1, abs=0.5)
    assert held(plan(8)) == pytest.approx(least, abs=0.5)


def on_mesh(how: RematPlan, mesh: Mesh, *, backend: str = "threads") -> Any:
    """Loss and gradients of FSDP ranks, and the record of the first."""
    split = partition(SPECS, AxisRules(), mesh)

    def local(axes: Any, ws: Any, x: Tensor) -> Any:
        places = fsdp.placements(SPECS, split, axes)
        return value_and_grad(lambda ws: run(ws, x, how, places))(ws)[1]

    with record_collectives() as record:
        grads = shard_map(local, mesh, (split, P("fsdp")), split, backend=backend)(
            weights(), x_of()
        )
    return grads, record


def two_halves(ws: Any) -> Tensor:
    return torch.stack([run(ws, half, None) for half in x_of().chunk(2)]).sum()


@pytest.mark.parametrize(("every", "backend"), [(1, "threads"), (4, "threads"), (4, "simulated")])
def test_on_two_ranks(every: int, backend: str) -> None:
    grads, record = on_mesh(plan(every), Mesh(fsdp=2), backend=backend)
    assert_close_trees(grads, value_and_grad(two_halves)(weights())[1], rtol=1e-12, atol=1e-12)
    if backend == "threads":
        # all weights twice; to make three carries of the first four layers again, and none of the
        # fifth, norms alone
        layer = sum(w.nbytes for w in tree.leaves(weights()[0])) // 2
        again = (every == 4) * 3 * weights()[0]["norm"].nbytes // 2
        assert record.ranks[0].nbytes["all_gather"] == 2 * LAYERS * layer + again


def test_a_caller_may_rebuild_before_it_has_the_cotangent() -> None:
    ws, x = weights(), x_of()
    expected = gradient(ws, x, None)
    with rebuilds() as found:
        value, pull = vjp(lambda ws, x: run(run_twice(ws), x, plan(8)), ws, x)
    assert len(found) == 1
    RUNS.clear()
    found[-1]()
    found[-1]()
    assert dict(RUNS) == {"step": LAYERS - 1}  # once
    got = pull(torch.ones_like(value))
    assert dict(RUNS) == {"step": 2 * LAYERS - 1}  # and not again
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(expected[1]), strict=True)
    )
    with rebuilds() as found:
        vjp(lambda ws, x: run(ws, x, plan(1)), ws, x)
    assert not found


def run_twice(ws: Any) -> Any:
    """Weights that the chain's rule saves as they are, not as leaves."""
    return tree.map(lambda w: w * 1, ws)


def test_carries_of_the_wrong_layer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = kept_layers.KeptLayers.take

    def before(self: Any, i: int) -> Any:
        carry, saved = take(self, i)
        return self.carries.get(i - 1, carry), saved

    monkeypatch.setattr(kept_layers.KeptLayers, "take", before)
    with pytest.raises(AssertionError):
        assert_close_trees(
            gradient(weights(), x_of(), plan(8)),
            gradient(weights(), x_of(), None),
            rtol=0.0,
            atol=0.0,
        )


def test_weights_that_a_rebuild_needs_and_has_not_are_found() -> None:
    with pytest.raises(TypeError):
        on_mesh(plan(4, light=lambda w: {**w, "norm": ()}), Mesh(fsdp=2))


def test_a_second_backward_is_refused() -> None:
    ws = tree.map(lambda w: w.requires_grad_(), weights())
    value = run(ws, x_of(), plan(4))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        value.backward()


def test_any_number_of_runs() -> None:
    f = functools.partial(gradient, x=x_of())
    expected = f(weights(), how=None)
    for every in (3, 5, 6):
        assert_close_trees(f(weights(), how=plan(every)), expected, rtol=1e-13, atol=1e-13)
