import math

import pytest
import torch

from k31fn import optim, tree
from k31fn.optim import orthogonalize
from tests.optim.tiny import clone, gradients, identical, largest_difference, spec, specs, weights

A, B, C = 3.4445, -4.7750, 2.0315


def by_svd(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz leaves singular vectors alone and acts on each singular value: a polynomial,
    applied to those.
    """
    U, S, Vh = torch.linalg.svd(x.to(torch.float64), full_matrices=False)
    S = S / S.square().sum(-1, keepdim=True).sqrt()
    for _ in range(steps):
        S = A * S + B * S**3 + C * S**5
    return U * S[..., None, :] @ Vh


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 6), (4, 6, 9), (2, 3, 9, 6)])
def test_orthogonalize_against_svd(shape):
    x = torch.randn(shape, dtype=torch.float64)
    # Coefficients above 3 amplify roundings: 3.4^5 = 480 per unit.
    torch.testing.assert_close(orthogonalize(x), by_svd(x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        orthogonalize(x.to(torch.float32)), by_svd(x).to(torch.float32), rtol=1e-4, atol=1e-4
    )


def test_singular_values_end_near_one():
    for x in (torch.randn(32, 32), torch.randn(16, 64), torch.diag(torch.logspace(-3, 3, 7))):
        S = torch.linalg.svdvals(orthogonalize(x))
        large = torch.linalg.svdvals(x) > 3e-3 * x.norm()
        assert S.max() < 1.14
        assert S[large].min() > 0.68
    five, four = (orthogonalize(torch.diag(torch.tensor([1.0, 3e-3])), steps=n) for n in (5, 4))
    assert five[1, 1] > 0.68 > four[1, 1]  # the fifth step is needed


def test_orthogonalize_ignores_scale_and_keeps_zero():
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(1e-4 * x), orthogonalize(x))
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float32, 1e-5), (torch.float64, 0.0)]
)
def test_precision_of_newton_schulz(dtype, tolerance):
    """Relative to float64, and the singular values, of random blocks."""
    x = torch.randn(4, 128, 512)
    got, exact = orthogonalize(x, dtype=dtype), orthogonalize(x.to(torch.float64))
    assert got.dtype == torch.float32
    assert (got - exact).norm() <= max(tolerance, 1e-6) * exact.norm()
    S = torch.linalg.svdvals(got)
    assert 0.6 < S.min() < S.max() < 1.3
    assert tolerance != 5e-2 or (got - exact).norm() > 1e-4 * exact.norm()  # it is bfloat16


def test_a_head_without_gradient_leaves_the_others_alone():
    """Bit for bit; its own columns only decay."""
    s = {"w": spec(16, 24, tags=["matrix", "per_head"], head_dim=6)}
    w, g = {"w": torch.randn(16, 24)}, torch.randn(16, 24)
    without = g.clone()
    without[:, 6:12] = 0
    transform = optim.muon(s)
    new = [
        transform.update({"w": x}, transform.init(w), w, lr=0.1, donate=False)[0]["w"]
        for x in (g, without)
    ]
    others = [i for i in range(24) if not 6 <= i < 12]
    assert torch.equal(new[0][:, others], new[1][:, others])
    torch.testing.assert_close(new[1][:, 6:12], (1 - 0.1 * 0.1) * w["w"][:, 6:12])
    whole = optim.muon({"w": spec(16, 24, tags=["matrix"])})
    joint = [
        whole.update({"w": x}, whole.init(w), w, lr=0.1, donate=False)[0]["w"] for x in (g, without)
    ]
    assert not torch.equal(joint[0][:, others], joint[1][:, others])


def reference(start, steps: int, lr: float, momentum=0.95, decay=0.1):
    """Loops over matrices in float64."""
    kinds = dict(tree.flatten_with_paths(specs()))
    values = {p: x.to(torch.float64) for p, x in tree.flatten_with_paths(start)}
    buffers = {p: torch.zeros_like(x) for p, x in values.items()}
    for step in range(steps):
        for p, g in tree.flatten_with_paths(gradients(step, start)):
            if "matrix" not in kinds[p].tags or "frozen" in kinds[p].tags:
                continue
            g = g.to(torch.float64)
            buffers[p] = momentum * buffers[p] + g
            direction = g + momentum * buffers[p]
            if "per_head" in kinds[p].tags:  # [in, heads * 4]: three blocks of four columns
                blocks = [by_svd(direction[:, h : h + 4]) for h in (0, 4, 8)]
                change = torch.cat(blocks, dim=1) * 0.2 * math.sqrt(8)
            else:
                change = by_svd(direction) * 0.2 * math.sqrt(max(g.shape[-2:]))
            values[p] = values[p] * (1 - lr * decay) - lr * change
    return tree.map_with_path(lambda p, _: values[p], start)


def ours(start, steps, lr, donate=True, **kwargs):
    transform = optim.muon(specs(), **kwargs)
    values = clone(start)
    state = transform.init(values)
    for step in range(steps):
        values, state = transform.update(
            gradients(step, start), state, values, lr=lr, donate=donate
        )
    return values, state


@pytest.mark.parametrize("donate", [True, False])
def test_against_svd_reference(donate):
    start = tree.map(lambda x: x.to(torch.float64), weights())
    expected = reference(start, 10, 0.05)
    got, _ = ours(start, 10, 0.05, donate)
    assert largest_difference(got, expected) < 1e-11
    in_float32, _ = ours(weights(), 10, 0.05, donate)
    assert largest_difference(in_float32, expected) < 2e-4
    for broken in ({"momentum": 0.9}, {"weight_decay": 0.2}, {"ns_steps": 4}):
        assert largest_difference(ours(start, 10, 0.05, **broken)[0], expected) > 1e-3


def test_per_head_is_a_run_per_block():
    w, g = torch.randn(10, 12, dtype=torch.float64), torch.randn(10, 12, dtype=torch.float64)

    def step(spec, w, g):
        transform = optim.muon({"w": spec})
        return transform.update({"w": g}, transform.init({"w": w}), {"w": w}, lr=0.1, donate=False)[
            0
        ]["w"]

    whole = step(spec(10, 12, tags=["matrix", "per_head"], head_dim=3), w, g)
    blocks = [
        step(spec(10, 3, tags=["matrix"]), w[:, i : i + 3], g[:, i : i + 3])
        for i in range(0, 12, 3)
    ]
    torch.testing.assert_close(whole, torch.cat(blocks, dim=1), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(whole, step(spec(10, 12, tags=["matrix"]), w, g), atol=1e-3)
    local = [
        step(spec(10, 12, tags=["matrix", "per_head"], head_dim=3), w[:, s], g[:, s])
        for s in HALVES
    ]
    torch.testing.assert_close(
        torch.cat(local, dim=1), whole, rtol=1e-12, atol=1e-12
    )  # a shard of whole heads


HALVES = (slice(0, 6), slice(6, 12))


def test_update_has_the_size_of_adamw():
    w = {"w": torch.zeros(64, 96)}
    transform = optim.muon({"w": spec(64, 96, tags=["matrix"])}, weight_decay=0.0)
    new, _ = transform.update(
        {"w": torch.randn(64, 96)}, transform.init(w), w, lr=1.0, donate=False
    )
    assert 0.15 < new["w"].square().mean().sqrt() < 0.25


def test_leaves():
    transform = optim.muon(specs())
    assert transform.paths == {f"layers.{i}.{n}" for i in (0, 1) for n in ("w", "w_q", "experts")}
    start = weights()
    new, state = transform.update(
        gradients(0, start), transform.init(start), clone(start), lr=0.1, donate=True
    )
    assert state.momentum.embedding == ()
    for path, before in tree.flatten_with_paths(start):
        changed = not torch.equal(dict(tree.flatten_with_paths(new))[path], before)
        assert changed == (path in transform.paths)


def test_bf16_parameters_have_float32_masters():
    start = weights(torch.bfloat16)
    transform = optim.muon(specs(torch.bfloat16), weight_decay=0.0)
    values, state = clone(start), transform.init(start)
    assert state.momentum.layers[0].w.dtype == state.master.layers[0].w.dtype == torch.float32
    for step in range(40):  # steps of 1e-4: each alone is below the rounding of weights about 0.5
        values, state = transform.update(
            gradients(step, start), state, values, lr=5e-4, donate=True
        )
    for layer, master in zip(values.layers, state.master.layers, strict=True):
        assert torch.equal(layer.w, master.w.to(torch.bfloat16))
    assert (values.layers[0].w != start.layers[0].w).float().mean() > 0.3


def test_combined_with_adamw_and_differentiable():
    start = tree.map(lambda x: x.to(torch.float64), weights())
    both = optim.combine(
        specs(),
        optim.muon(specs()),
        optim.adamw(specs(), where=lambda _, s: "matrix" not in s.tags),
    )

    def after(lr):
        values, state = start, both.init(start)
        for step in range(2):
            values, state = both.update(gradients(step, start), state, values, lr=lr, donate=False)
        return sum(x.square().sum() for x in tree.leaves(values))

    lr = torch.tensor(0.02, dtype=torch.float64)
    h = 1e-5
    torch.testing.assert_close(
        torch.func.grad(after)(lr), (after(lr + h) - after(lr - h)) / (2 * h), rtol=1e-6, atol=0
    )
    assert identical(start, tree.map(lambda x: x.to(torch.float64), weights()))


def test_errors():
    for bad in ({"momentum": 1.0}, {"weight_decay": -0.1}, {"ns_steps": 0}):
        with pytest.raises(ValueError, match="must be in"):
            optim.muon(specs(), **bad)
    with pytest.raises(ValueError, match="w: tagged matrix, but its shape is"):
        optim.muon({"w": spec(3, tags=["matrix"])})


@pytest.mark.cuda
def test_on_cuda():
    x = torch.randn(3, 40, 24)
    S = torch.linalg.svdvals(orthogonalize(x.cuda()).cpu())
    assert 0.6 < S.min() < S.max() < 1.25  # bfloat16: the band and some hundredths
    start = weights()
    transform = optim.muon(specs())
    values = tree.map(lambda x: x.cuda(), start)
    state = transform.init(values)
    for step in range(10):
        grads = tree.map(lambda g: g.cuda(), gradients(step, start))
        values, state = transform.update(
            grads, state, values, lr=0.05, skip=torch.tensor(False, device="cuda"), donate=True
        )
    assert largest_difference(tree.map(lambda x: x.cpu(), values), ours(start, 10, 0.05)[0]) < 0.03
    before, bad = (
        clone((values, state)),
        tree.map(lambda p: torch.full_like(p, float("nan")), values),
    )
    after = transform.update(bad, state, values, lr=1e-2, skip=optim.non_finite(bad), donate=True)
    assert identical(after, before)
