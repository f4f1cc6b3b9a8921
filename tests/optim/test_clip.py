import pytest
import torch

from k31fn import optim, tree
from tests.optim.tiny import clone, gradients, identical, specs, weights


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0, float("inf")])
def test_equals_torch(max_norm):
    grads = gradients(0, weights())
    before = clone(grads)
    got, norm = optim.clip_by_global_norm(grads, max_norm)
    holders = [torch.nn.Parameter(torch.zeros_like(g)) for g in tree.leaves(grads)]
    for p, g in zip(holders, tree.leaves(grads), strict=True):
        p.grad = g.clone()
    expected = torch.nn.utils.clip_grad_norm_(holders, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for a, p in zip(tree.leaves(got), holders, strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-6, atol=0)
    assert identical(grads, before)


def test_by_the_largest_magnitude():
    grads = {"a": torch.tensor([3.0, -8.0]), "b": torch.tensor([[2.0]])}
    got, norm = optim.clip_by_global_norm(grads, 4.0, p=float("inf"))
    assert norm == 8
    torch.testing.assert_close(got["a"], torch.tensor([1.5, -4.0]), rtol=1e-6, atol=0)
    assert optim.clip_by_global_norm(grads, 8.5, p=float("inf"))[0]["b"] == 2
    assert optim.clip_by_global_norm(grads, 8.5)[0]["b"] < 2


def test_norm_is_computed_in_float32():
    grads = {
        "a": torch.full((3000,), 1.0, dtype=torch.bfloat16),
        "b": torch.full((1000,), 1.0, dtype=torch.float64),
    }
    norm = optim.global_norm(grads)
    torch.testing.assert_close(
        norm, torch.tensor(4000.0, dtype=norm.dtype).sqrt(), rtol=1e-7, atol=0
    )
    got, _ = optim.clip_by_global_norm(grads, 1.0)
    assert [x.dtype for x in got.values()] == [torch.bfloat16, torch.float64]
    assert optim.global_norm({"a": torch.ones(2, dtype=torch.bfloat16)}).dtype == torch.float32


def test_frozen_leaves_do_not_count():
    grads = gradients(0, weights())
    without = [g for p, g in tree.flatten_with_paths(grads) if p != "extra.frozen"]
    torch.testing.assert_close(optim.global_norm(grads, specs()), optim.global_norm(without))
    assert optim.global_norm(grads) > optim.global_norm(grads, specs())
    poisoned = tree.map_with_path(
        lambda p, g: g * float("nan") if p == "extra.frozen" else g, grads
    )
    assert optim.clip_by_global_norm(poisoned, 1.0, specs=specs())[1].isfinite()


def test_differentiable():
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda g: optim.clip_by_global_norm({"g": g}, 1.0)[0]["g"])(g)
    unit = g / 5
    torch.testing.assert_close(
        jacobian, (torch.eye(2) - torch.outer(unit, unit)) / 5, rtol=1e-5, atol=1e-6
    )


def test_errors():
    with pytest.raises(ValueError, match=r"max_norm=0\.0 must be positive"):
        optim.clip_by_global_norm({"a": torch.ones(1)}, 0.0)
    with pytest.raises(ValueError, match="no leaf to take the norm of"):
        optim.global_norm(())
