import pytest
import torch

from k31fn import optim, random, tree
from k31fn import params as parameters
from k31fn.kernels.registry import use_impl
from k31fn.params import Normal, ParamSpec
from tests.optim.tiny import clone, gradients, identical, largest_difference, specs, weights

NUMBERS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.3}


def torch_adamw(start, steps, lr=1e-2, **kwargs):
    """torch.optim.AdamW with the same groups."""
    values = {p: x.clone().requires_grad_() for p, x in tree.flatten_with_paths(start)}
    kind = dict(tree.flatten_with_paths(specs()))
    trained = [p for p in values if "frozen" not in kind[p].tags]
    groups = [
        {
            "params": [values[p] for p in trained if "no_decay" not in kind[p].tags],
            "weight_decay": 0.3,
        },
        {"params": [values[p] for p in trained if "no_decay" in kind[p].tags], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **kwargs)
    for step in range(steps):
        for p, g in tree.flatten_with_paths(gradients(step, start)):
            values[p].grad = g
        optimizer.step()
    return tree.map_with_path(lambda p, _: values[p].detach(), start)


def ours(start, steps, lr=1e-2, donate=True, transform=None):
    transform = transform or optim.adamw(specs(), **NUMBERS)
    values = clone(start)
    state = transform.init(values)
    for step in range(steps):
        values, state = transform.update(
            gradients(step, start), state, values, lr=lr, donate=donate
        )
    return values, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype):
    start = tree.map(lambda x: x.to(dtype), weights())
    in_place, _ = ours(start, 20)
    assert identical(in_place, torch_adamw(start, 20, fused=True))  # the same kernel: bit for bit
    # Other orders of operations: some roundings a step, of numbers about 1.
    tolerance = 20 * torch.finfo(dtype).eps
    assert largest_difference(in_place, torch_adamw(start, 20, fused=False)) < tolerance
    functional, _ = ours(start, 20, donate=False)
    assert largest_difference(functional, torch_adamw(start, 20, fused=False)) < tolerance


@pytest.mark.parametrize(
    "change", [{"beta1": 0.8}, {"beta2": 0.9}, {"eps": 1e-3}, {"weight_decay": 0.0}]
)
def test_each_number_matters(change):
    values, _ = ours(weights(), 3, transform=optim.adamw(specs(), **{**NUMBERS, **change}))
    assert largest_difference(values, ours(weights(), 3)[0]) > 1e-4


def test_without_the_kernel():
    start = weights()
    with use_impl(adamw_step="reference"):
        assert largest_difference(ours(start, 20)[0], torch_adamw(start, 20)) < 20 * 1.2e-7


def test_gradients_of_any_layout():
    """The CPU kernel reads memory in order, whatever the strides: transposed and expanded gradients
    must be copied.
    """
    start = weights()
    transform = optim.adamw(specs(), **NUMBERS)

    def step(layout):
        grads = tree.map(
            layout,
            tree.map(lambda g: g.mean(-1, keepdim=True).expand_as(g) if g.ndim else g, plain),
        )
        return transform.update(grads, transform.init(start), clone(start), lr=0.1, donate=True)[0]

    plain = gradients(0, start)
    assert identical(step(lambda g: g), step(lambda g: g.contiguous()))
    assert identical(
        step(lambda g: g.mT.contiguous().mT if g.ndim > 1 else g), step(lambda g: g.contiguous())
    )


def test_weights_of_any_layout():
    spec = ParamSpec((4, 6), ("", ""), Normal(1.0), torch.float32)
    transform = optim.adamw({"w": spec})
    w, g = torch.randn(4, 6), {"w": torch.randn(4, 6)}
    expected, _ = transform.update(g, transform.init({"w": w}), {"w": w}, lr=0.1, donate=False)
    turned = {"w": w.T.contiguous().T}
    got, _ = transform.update(g, transform.init(turned), turned, lr=0.1, donate=True)
    torch.testing.assert_close(got["w"], expected["w"], rtol=1e-6, atol=1e-6)


def test_groups_come_from_the_specs():
    start = weights()
    transform = optim.adamw(specs(), **NUMBERS)
    zero = tree.map(torch.zeros_like, start)
    values, state = transform.update(zero, transform.init(start), clone(start), lr=0.1, donate=True)
    shrunk = {"embedding", "layers.0.w", "layers.0.w_q", "layers.1.experts", "extra.scale"}
    for path, before in tree.flatten_with_paths(start):
        after = dict(tree.flatten_with_paths(values))[path]
        if path in ("extra.frozen", "layers.0.norm", "layers.1.norm"):
            assert torch.equal(after, before)
        else:
            torch.testing.assert_close(after, before * (1 - 0.1 * 0.3))
    assert shrunk < transform.paths
    assert "extra.frozen" not in transform.paths
    assert state.mu.extra["frozen"] == ()
    part = optim.adamw(specs(), where=lambda path, spec: path.startswith("layers.1"))
    assert part.paths == {f"layers.1.{n}" for n in ("w", "w_q", "experts", "norm")}


def test_bf16_parameters_have_float32_masters():
    start = weights(torch.bfloat16)
    transform = optim.adamw(specs(torch.bfloat16), weight_decay=0.0)
    wide = tree.map(lambda x: x.to(torch.float32), start)
    state, reference = transform.init(start), transform.init(wide)
    assert (state.master.embedding.dtype, state.master.layers[0].norm) == (torch.float32, ())
    assert state.mu.embedding.dtype == state.nu.embedding.dtype == torch.float32
    values = clone(start)
    for step in range(40):  # steps of 1e-4: each alone is below the rounding of weights about 0.5
        grads = gradients(step, start)
        values, state = transform.update(grads, state, values, lr=1e-4, donate=True)
        wide, reference = transform.update(
            tree.map(lambda g: g.to(torch.float32), grads), reference, wide, lr=1e-4, donate=False
        )
    assert values.embedding.dtype == torch.bfloat16
    torch.testing.assert_close(state.master.embedding, wide.embedding, rtol=1e-6, atol=1e-6)
    assert identical(
        values, tree.map(lambda w, p: w.to(p.dtype), with_masters(values, state), start)
    )
    assert (values.embedding != start.embedding).float().mean() > 0.3


def with_masters(values, state):
    masters = dict(tree.flatten_with_paths(state.master))
    return tree.map_with_path(lambda p, x: masters.get(p, x), values)


def test_functional_update_is_differentiable():
    spec = {"w": ParamSpec((3,), ("",), Normal(1.0), torch.float64, frozenset())}
    transform = optim.adamw(spec, weight_decay=0.1)
    w = torch.randn(3, dtype=torch.float64)

    def after(lr, w):
        values, state = {"w": w}, transform.init({"w": w})
        for target in (1.0, 2.0):
            grads = {
                "w": torch.where(torch.arange(3) == 0, 0.0, 2 * (values["w"] - target))
            }  # one always zero
            values, state = transform.update(grads, state, values, lr=lr, donate=False)
        return values["w"].square().sum()

    lr = torch.tensor(0.01, dtype=torch.float64)
    for i in (0, 1):
        grad = torch.func.grad(after, argnums=i)(lr, w)
        h = 1e-6 * torch.ones_like((lr, w)[i])
        up, down = ((lr + h, w), (lr - h, w)) if i == 0 else ((lr, w + h), (lr, w - h))
        assert grad.isfinite().all()
        torch.testing.assert_close(
            grad.sum() * 1e-6, (after(*up) - after(*down)) / 2, rtol=1e-5, atol=1e-12
        )


def test_many_runs_at_once():
    tiny = {"w": ParamSpec((3, 2), ("", ""), Normal(1.0), torch.float32)}
    transform = optim.adamw(tiny)
    runs = torch.func.vmap(lambda key: parameters.init(tiny, key))(random.split(random.key(0), 4))
    lrs, g = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.randn(4, 3, 2)

    def step(w, g, lr):
        return transform.update({"w": g}, transform.init(w), w, lr=lr, donate=False)

    got, _ = torch.func.vmap(step)(runs, g, lrs)
    for i in range(4):
        one, _ = step({"w": runs["w"][i]}, g[i], lrs[i])
        torch.testing.assert_close(got["w"][i], one["w"])


def test_state_on_meta():
    transform = optim.adamw(specs(torch.bfloat16))
    state = transform.init(parameters.abstract(specs(torch.bfloat16)))
    real = transform.init(weights(torch.bfloat16))
    assert tree.paths(state) == tree.paths(real)
    assert all(x.is_meta for x in tree.leaves(state))


@pytest.mark.parametrize(
    "bad", [{"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0.0}, {"weight_decay": -1.0}]
)
def test_errors(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        optim.adamw(specs(), **bad)


@pytest.mark.cuda
def test_on_cuda():
    start = weights()
    transform = optim.adamw(specs(), **NUMBERS)
    values = tree.map(lambda x: x.cuda(), start)
    state = transform.init(values)
    for step in range(20):
        grads = tree.map(lambda g: g.cuda(), gradients(step, start))
        values, state = transform.update(
            grads, state, values, lr=1e-2, skip=torch.tensor(False, device="cuda"), donate=True
        )
    assert (
        largest_difference(tree.map(lambda x: x.cpu(), values), torch_adamw(start, 20))
        < 20 * 1.2e-7
    )
    before, bad = (
        clone((values, state)),
        tree.map(lambda p: torch.full_like(p, float("nan")), values),
    )
    after = transform.update(bad, state, values, lr=1e-2, skip=optim.non_finite(bad), donate=True)
    assert identical(after, before)
