"""Functions whose output and graph a remat keeps: same bits, not run again, nothing of their
arguments held.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import autodiff, tree
from k31fn.autodiff import (
    decision,
    hessian,
    keep,
    omitted_inputs,
    remat,
    split_vjp,
    value_and_grad,
    vjp,
)
from k31fn.autodiff.replay import ValueQueue
from k31fn.layers.linear import linear
from k31fn.testing import assert_close_trees, live_bytes

D, ROWS = 16, 64
SIZE = ROWS * D * 4  # bytes of a hidden state
RUNS: list[str] = []


def branch(w: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps two hidden states (of tanh and of the gate) besides its argument; returns a third."""
    RUNS.append("branch")
    chosen = decision("signs", lambda x: x > 0, x)
    y = linear(torch.tanh(linear(x, w["up"].mT)), w["down"])
    return y * w["gate"] * chosen, ids + 1


def layer(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    RUNS.append("layer")
    later = decision(
        "later", lambda x: x.sum(-1, keepdim=True) > 0, x
    )  # before and after those of the branch
    y, ids = keep("branch", branch)(w["branch"], torch.sin(x) * w["norm"], ids)
    after = decision("after", lambda y: y > 0.5, y)
    return x * later + torch.where(after, 2 * y, y) + ids[0]


def weights(n: int = 3) -> list[Any]:
    torch.manual_seed(0)
    flat = torch.randn(n, 2 * D * D)  # both matrices of a layer in one storage
    branches = [
        {"up": f[: D * D].view(D, D), "down": f[D * D :].view(D, D), "gate": torch.randn(D)}
        for f in flat
    ]
    return [{"norm": torch.randn(D), "branch": b} for b in branches]


def deep(wrap: Callable[..., Any]) -> Callable[..., Tensor]:
    def f(ws: list[Any], x: Tensor) -> Tensor:
        for w in ws:
            x = wrap(layer)(w, x, torch.arange(4))
        return x.square().sum()

    return f


def kept(f: Callable[..., Any]) -> Callable[..., Any]:
    return remat(f, keep=("branch",))


def plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


X = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize(
    "wrap", [kept, lambda f: remat(kept(f)), lambda f: kept(remat(f))], ids=["", "in", "around"]
)
def test_no_bit_changes_and_a_branch_runs_once(wrap: Any) -> None:
    expected = value_and_grad(deep(plain), (0, 1))(weights(), X)
    RUNS.clear()
    got = value_and_grad(deep(wrap), (0, 1))(weights(), X)
    assert same(got, expected)
    if wrap is kept:
        assert RUNS.count("branch") == 3
        assert RUNS.count("layer") == 6
    by_transform = torch.func.grad(deep(wrap), (0, 1))(weights(), X)
    assert same(by_transform, expected[1])


def split(f: Callable[..., Any], ws: Any, x: Tensor) -> tuple[Any, Any]:
    value, backward_input = split_vjp(f, ws, x)
    (of_x,), backward_weight = backward_input(torch.ones_like(value))
    return backward_weight(), of_x


def test_split_pullbacks() -> None:
    """The branch's products put off the gradients of their weights, and no work is done twice."""
    expected = value_and_grad(deep(plain), (0, 1))(weights(), X)[1]
    RUNS.clear()
    assert same(split(deep(kept), weights(), X), expected)
    assert RUNS.count("branch") == 3
    work, whole = (autodiff.check_split(deep(f), weights(), X) for f in (kept, plain))
    assert work == whole


def test_the_pullback_runs_on_another_thread() -> None:
    value, pull = vjp(deep(kept), weights(), X)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pull(torch.ones_like(value))))
    thread.start()
    thread.join()
    assert same(found[0], value_and_grad(deep(plain), (0, 1))(weights(), X)[1])


def held(wrap: Any, differentiate: Any = vjp, num_layers: int = 3) -> tuple[float, int]:
    """Hidden states between forward and backward, and bytes after it."""
    ws = weights(num_layers)
    gc.collect()
    with live_bytes() as live:
        value, pull = differentiate(deep(wrap), ws, X)
        between = live.current / SIZE
        found = pull(torch.ones_like(value))
        if differentiate is split_vjp:
            found[1]()
        del found, pull, value
        return between, live.current


@pytest.mark.parametrize("differentiate", [vjp, split_vjp])
def test_only_the_output_and_the_inside_are_held(differentiate: Any) -> None:
    """Of a layer: what goes in, what comes out of the branch, and two states of its inside (and
    some signs).
    """
    between, after = held(kept, differentiate)
    inside = (
        2 + 1 / 4 + 1 / 4 + 1 / (4 * D)
    )  # two states; the signs inside and after; a bool per row
    # with the last layer's output and without the first one's input; some integers and scalars
    assert between == pytest.approx(3 * (1 + 1 + inside), abs=0.1)
    assert after == 0  # no cycle
    assert held(plain, differentiate)[0] > 3 * (1 + 1 + inside) + 3  # the argument too, and more


@pytest.mark.parametrize("wrap", [plain, kept])
def test_gathered_weights_are_not_held(wrap: Any) -> None:
    """Weights that are made inside of the remat, as by a gather, live on without it only."""

    def gathered(w: Any, *args: Any) -> Tensor:
        return layer(tree.map(lambda x: x * 1, w), *args)

    for differentiate in (vjp, split_vjp):
        ws, x = weights(), X[:1]
        with live_bytes() as live:
            found = differentiate(lambda ws, x: deep(lambda _: wrap(gathered))(ws, x), ws, x)
            assert (live.current < 2 * D * D * 4) == (wrap is kept)  # fewer than those of one layer
        del found


def first_of_its_storage(self: Any, x: Tensor) -> Any:
    for i, whole in self._by_storage.get(omitted_inputs._storage_id(x), ()):
        return omitted_inputs._InputView(
            i, x.shape, x.stride(), int(x.storage_offset() - whole.storage_offset())
        )
    return x.detach()


@pytest.mark.parametrize(
    "pack", [omitted_inputs.OmittedInputs.pack, first_of_its_storage], ids=["by place", "mutant"]
)
def test_inputs_that_share_a_storage_are_told_apart(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first both matrices lie in one storage, in the replay each in its own."""
    monkeypatch.setattr(omitted_inputs.OmittedInputs, "pack", pack)
    runs: list[int] = []

    def regathered(w: Any, *args: Any) -> Tensor:
        runs.append(1)
        return layer(tree.map(torch.clone, w) if len(runs) > 1 else w, *args)

    def f(ws: Any, x: Tensor) -> Tensor:
        return kept(regathered)(ws[0], x, torch.arange(4)).square().sum()

    expected = value_and_grad(deep(plain), (0, 1))(weights(1), X)
    if pack is first_of_its_storage:
        with pytest.raises(RuntimeError, match=r"[Ss]torage"):
            value_and_grad(f, (0, 1))(weights(1), X)
    else:
        assert same(value_and_grad(f, (0, 1))(weights(1), X), expected)


def test_an_impure_surrounding_is_found() -> None:
    flips: list[int] = []

    def impure(w: Any, x: Tensor) -> Tensor:
        flips.append(1)
        h = x[:, : len(flips)]
        return keep("branch", lambda w, h: (h * w).exp())(w, h).sum()

    with pytest.raises(RuntimeError, match="is not pure"):
        value_and_grad(remat(impure, keep=("branch",)))(torch.ones(()), X)


def test_a_second_pullback_is_refused() -> None:
    """What the first one used up is gone: without the check the weights of the branch would have no
    gradient.
    """
    ws = tree.map(lambda w: w.requires_grad_(), weights())
    loss = deep(kept)(ws, X)
    torch.autograd.grad(loss, tree.leaves(ws), retain_graph=True)
    with pytest.raises(RuntimeError, match="pulled back once"):
        torch.autograd.grad(loss, tree.leaves(ws), allow_unused=True)


def test_decisions_of_a_branch_that_is_skipped_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next decision of the layer would be handed one of the branch."""
    monkeypatch.setattr(ValueQueue, "count", property(lambda self: 0))
    try:
        got = value_and_grad(deep(kept), (0, 1))(weights(), X)
    except RuntimeError:
        return
    assert not same(got, value_and_grad(deep(plain), (0, 1))(weights(), X))


def test_higher_derivatives_by_transform_and_a_refusal_without() -> None:
    ws, x = weights(1), X[:2].to(torch.float64)
    ws = tree.map(lambda w: w.to(torch.float64), ws)
    expected = hessian(lambda x: deep(plain)(ws, x))(x)
    torch.testing.assert_close(hessian(lambda x: deep(kept)(ws, x))(x), expected)
    xs = torch.stack([x, 2 * x])
    per_sample = [
        torch.func.vmap(torch.func.grad(deep(f)), (None, 0))(ws, xs) for f in (kept, plain)
    ]
    assert_close_trees(*per_sample, rtol=1e-12, atol=1e-12)

    def squared(x: Tensor) -> Tensor:
        return value_and_grad(lambda x: deep(kept)(ws, x))(x)[1].square().sum()

    with pytest.raises(RuntimeError, match=r"keep is first order only.*remat='none' or 'layer'"):
        value_and_grad(squared)(x)


def test_frozen_weights_cost_nothing() -> None:
    """No gradient is computed for what the layer around stopped."""
    from torch.utils.flop_counter import FlopCounterMode

    def frozen(w: Any, *args: Any) -> Tensor:
        return layer({**w, "branch": autodiff.stop_gradient(w["branch"])}, *args)

    def f(ws: Any, x: Tensor) -> Tensor:
        return remat(frozen, keep=("branch",))(ws[0], x, torch.arange(4)).sum()

    with FlopCounterMode(display=False) as flops:
        grads = value_and_grad(f, (0, 1))(weights(1), X)[1]
    assert not any(g.any() for g in tree.leaves(grads[0][0]["branch"]))
    assert (
        flops.get_total_flops() == 2 * (2 * ROWS * D * D) * 2
    )  # two products, forward and for their input
