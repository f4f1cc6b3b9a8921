"""The recipes of the cookbook against other forms. Run: ``pytest examples/test_cookbook.py``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from examples import cookbook
from k31fn import optim, params, random, tree
from k31fn.autodiff import value_and_grad
from k31fn.testing import assert_close_trees

TOKENS = (torch.arange(3 * 5) ** 2 % 7).reshape(3, 5)


def _weights(seed: int = 0) -> Any:
    return params.init(cookbook.SPECS, random.key(seed), dtype=torch.float64)


def _gradient(p: Any, tokens: Tensor) -> Any:
    return value_and_grad(cookbook.loss)(p, tokens)[1]


def _along(p: Any, v: Any, tokens: Tensor, step: float = 1e-5) -> Any:
    """The Hessian times ``v``, by central differences of the gradient."""
    after = _gradient(tree.add(p, tree.scale(step, v)), tokens)
    before = _gradient(tree.add(p, tree.scale(-step, v)), tokens)
    return tree.map(lambda a, b: (a - b) / (2 * step), after, before)


def test_per_sample_gradients():
    rows = cookbook.per_sample_gradients(_weights(), TOKENS)
    for i in range(len(TOKENS)):
        alone = _gradient(_weights(), TOKENS[i : i + 1])
        of_row = tree.map(lambda g, i=i: g[i], rows)
        assert_close_trees(of_row, alone, rtol=1e-9, atol=1e-12)


def test_the_sharpest_direction_is_an_eigenvector():
    p = _weights()
    value, v = cookbook.sharpest_direction(p, TOKENS, _weights(2), 12)
    rest = tree.add(_along(p, v, TOKENS), tree.scale(-value, v))
    # power iteration: the rest shrinks by the ratio of two eigenvalues a step
    assert tree.vdot(rest, rest).sqrt() < 0.05 * value.abs()


def test_influence_solves_the_damped_system():
    p = _weights()
    # damping above the most negative eigenvalue, so that the system is positive definite
    values, u = cookbook.influence(p, TOKENS, TOKENS[:1], damping=5.0, steps=25)
    left = tree.add(_along(p, u, TOKENS), tree.scale(5.0, u))
    # 1e-7: of the central differences, step squared times the third derivative
    assert_close_trees(left, _gradient(p, TOKENS[:1]), rtol=0, atol=1e-7)
    expected = [-tree.vdot(_gradient(p, row[None]), u) for row in TOKENS]
    torch.testing.assert_close(values, torch.stack(expected))


def test_mamls_gradient_goes_through_the_inner_step():
    p, v = _weights(), _weights(1)
    tasks = [(TOKENS[:1], TOKENS[1:2]), (TOKENS[1:2], TOKENS[2:])]

    def at(t: float) -> Tensor:
        return cookbook.maml_loss(tree.add(p, tree.scale(t, v)), tasks, 0.3)

    _, grads = value_and_grad(cookbook.maml_loss)(p, tasks, 0.3)
    torch.testing.assert_close(
        tree.vdot(grads, v), (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-7, atol=0
    )
    # without the inner step's own derivative, as first-order MAML has it, it is another number
    stopped = []
    for support, query in tasks:
        adapted = tree.add(p, tree.scale(-0.3, _gradient(p, support)))
        stopped.append(tree.vdot(_gradient(adapted, query), v))
    assert (torch.stack(stopped).mean() - tree.vdot(grads, v)).abs() > 1e-2


def test_an_ensemble_is_its_members():
    keys = random.split(random.key(0), 2)
    stacked = cookbook.ensemble(keys, torch.float64)
    values = cookbook.ensemble_losses(stacked, TOKENS)
    for i, key in enumerate(keys):
        member = params.init(cookbook.SPECS, key, dtype=torch.float64)
        assert all(
            map(
                torch.equal,
                tree.leaves(tree.map(lambda x, i=i: x[i], stacked)),
                tree.leaves(member),
            )
        )
        torch.testing.assert_close(values[i], cookbook.loss(member, TOKENS))


def test_many_rates_are_runs_of_one_rate():
    p = _weights()
    before = tree.map(torch.clone, p)
    rates = torch.tensor([0.01, 0.1], dtype=torch.float64)
    values = cookbook.losses_by_rate(p, TOKENS, rates, 2)
    assert all(tree.leaves(tree.map(torch.equal, p, before)))
    transform = optim.adamw(cookbook.SPECS)
    for i, rate in enumerate(rates):
        weights, state = before, transform.init(before)
        for _ in range(2):
            grads = _gradient(weights, TOKENS)
            weights, state = transform.update(grads, state, weights, lr=float(rate))
        torch.testing.assert_close(values[i], cookbook.loss(weights, TOKENS))


def test_only_the_head_is_trained():
    p = _weights()
    after = cookbook.train_head_alone(p, TOKENS, 2)
    assert cookbook.loss(after, TOKENS) < cookbook.loss(p, TOKENS)
    same = tree.map(torch.equal, p, after)
    assert not same.pop("head")
    assert all(tree.leaves(same))


def test_a_tied_table_has_the_gradient_of_both_uses():
    p = _weights()
    p["head"] = p["embedding"].weight.mT
    both = _gradient(p, TOKENS)
    tied = {name: leaf for name, leaf in p.items() if name != "head"}
    _, grads = value_and_grad(cookbook.tied_loss)(tied, TOKENS)
    torch.testing.assert_close(
        grads["embedding"].weight, both["embedding"].weight + both["head"].mT
    )


@pytest.mark.parametrize("choose", [cookbook.greedy, cookbook.sampled])
def test_decoding_is_the_model_on_all_tokens_before(choose: Any):
    p, key = _weights(), random.key(2)
    tokens = TOKENS
    for i in range(3):
        logits = cookbook.hidden(p, tokens)[:, -1] @ p["head"]
        tokens = torch.cat([tokens, choose(logits, random.fold_in(key, i))[:, None]], dim=1)
    assert torch.equal(cookbook.generate(p, TOKENS, 3, choose, key), tokens[:, TOKENS.shape[1] :])


def test_it_runs(capsys: Any):
    cookbook.main()
    assert "sharpness" in capsys.readouterr().out
