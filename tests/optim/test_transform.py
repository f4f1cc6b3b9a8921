import pytest
import torch

from k31fn import optim, tree
from k31fn.kernels.adamw.reference import rates
from tests.optim.tiny import clone, gradients, identical, specs, weights

DTYPES = [torch.float32, torch.bfloat16]


def everything(dtype=torch.float32) -> optim.Transform:
    s = specs(dtype)
    return optim.combine(
        s, optim.muon(s), optim.adamw(s, where=lambda path, spec: "matrix" not in spec.tags)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_donate_reuses_storage(dtype):
    transform, values = everything(dtype), weights(dtype)
    state = transform.init(values)
    pointers = [x.data_ptr() for x in tree.leaves((values, state))]
    before = clone((values, state))
    values, state = transform.update(gradients(0, values), state, values, lr=0.1, donate=True)
    assert [x.data_ptr() for x in tree.leaves((values, state))] == pointers
    changed = [
        not torch.equal(a, b)
        for a, b in zip(tree.leaves((values, state)), tree.leaves(before), strict=True)
    ]
    frozen = [i for i, path in enumerate(tree.paths(values)) if path == "extra.frozen"]
    assert [i for i, c in enumerate(changed) if not c] == frozen


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_changes_no_input(dtype):
    transform, values = everything(dtype), weights(dtype)
    state, grads = transform.init(values), gradients(0, values)
    values, state = transform.update(grads, state, values, lr=0.1)  # a state that is not all zero
    before = clone((grads, state, values))
    new_values, new_state = transform.update(grads, state, values, lr=0.1)
    assert identical((grads, state, values), before)
    inputs = {x.data_ptr() for x in tree.leaves((grads, state, values))}
    outputs = dict(tree.flatten_with_paths((new_values, new_state)))
    assert {p for p, x in outputs.items() if x.data_ptr() in inputs} == {"0.extra.frozen"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("donate", [True, False])
def test_a_rate_in_a_float64_scalar_has_the_bits_of_the_number(dtype, donate):
    """A step that is captured takes its rate from a tensor."""

    def stepped(*rates):
        transform, values = everything(dtype), weights(dtype)
        state = transform.init(values)
        for i, lr in enumerate(rates):
            grads = gradients(i, values)
            values, state = transform.update(grads, state, values, lr=lr, donate=donate)
        return values, state

    numbers = [0.1 / 3, 0.07, 1e-3 / 7]
    wanted = stepped(*numbers)
    assert identical(stepped(*[torch.tensor(x, dtype=torch.float64) for x in numbers]), wanted)


def test_a_rate_in_float32_would_have_other_bits():
    others = 0
    for i in range(1, 100):
        wide = torch.tensor(i / 300, dtype=torch.float64)
        others += rates(wide, 0.1, torch.float32)[0] != rates(wide.float(), 0.1, torch.float32)[0]
    assert others


def test_donated_update_leaves_gradients_alone():
    transform, values = everything(), weights()
    grads = gradients(0, values)
    transform.update(grads, transform.init(values), values, lr=0.1, donate=True)
    assert identical(grads, gradients(0, values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_step_changes_nothing(dtype, donate, bad):
    transform, values = everything(dtype), weights(dtype)
    state = transform.init(values)
    values, state = transform.update(gradients(0, values), state, values, lr=0.1, donate=True)
    before = clone((values, state))

    def step(grads, values, state):
        grads, norm = optim.clip_by_global_norm(grads, 1.0, specs=specs(dtype))
        skip = optim.non_finite(norm)
        return skip, *transform.update(grads, state, values, lr=0.1, skip=skip, donate=donate)

    for path in ("embedding", "layers.1.w_q", "layers.0.norm", "extra.scale"):
        grads = tree.map_with_path(
            lambda p, g, path=path: (
                g.index_fill(0, torch.tensor([0]), bad) if p == path and g.ndim else g
            ),
            gradients(1, values),
        )
        if path == "extra.scale":
            grads = tree.map_with_path(lambda p, g: g * bad if p == "extra.scale" else g, grads)
        skip, values, state = step(grads, values, state)
        assert skip.item() is True
        assert identical((values, state), before)
    skip, values, state = step(gradients(1, values), values, state)
    assert skip.item() is False
    reference_values, reference_state = before
    grads, _ = optim.clip_by_global_norm(gradients(1, values), 1.0, specs=specs(dtype))
    reference = transform.update(grads, reference_state, reference_values, lr=0.1, donate=donate)
    assert identical((values, state), reference)  # as if there had been no bad step


def test_no_host_synchronisation(monkeypatch):
    """Nothing asks a tensor for its value, so nothing waits for the device."""
    transform, values = everything(), weights()
    state, grads = transform.init(values), gradients(0, values)

    def refuse(*args):
        raise AssertionError("the host asked for a value")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    clipped, norm = optim.clip_by_global_norm(grads, 1.0)
    skip = optim.non_finite(norm)
    for donate in (False, True):
        values, state = transform.update(clipped, state, values, lr=0.1, skip=skip, donate=donate)
    optim.select(skip, values, values)


def test_select():
    a, b = (
        {"x": torch.ones(2), "y": (torch.zeros(3),)},
        {"x": torch.zeros(2), "y": (torch.ones(3),)},
    )
    assert identical(optim.select(torch.tensor(True), a, b), a)
    assert identical(optim.select(torch.tensor(False), a, b), b)


def test_non_finite():
    values = {"a": torch.ones(2), "b": torch.ones(3)}
    assert not optim.non_finite(values)
    assert optim.non_finite({**values, "b": torch.tensor([1.0, float("nan")])})
    assert optim.non_finite(torch.tensor(float("inf")))


def test_gradients_may_lack_leaves_that_are_not_stepped():
    transform, values = everything(), weights()
    grads = gradients(0, values)
    expected, _ = transform.update(grads, transform.init(values), values, lr=0.1, donate=False)
    for absent in (None, ()):
        part = tree.map_with_path(lambda p, g, a=absent: a if p == "extra.frozen" else g, grads)
        got, _ = transform.update(part, transform.init(values), values, lr=0.1, donate=False)
        assert identical(got, expected)
        part = tree.map_with_path(lambda p, g, a=absent: a if p == "layers.1.w" else g, grads)
        with pytest.raises(ValueError, match=r"grads have no leaf 'layers.1.w' \(1 missing\)"):
            transform.update(part, transform.init(values), values, lr=0.1, donate=True)


def test_trees_must_match():
    transform, values = everything(), weights()
    with pytest.raises(ValueError, match="trees differ in structure"):
        transform.init({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="trees differ in structure"):
        transform.update(values, transform.init(values), values.layers, lr=0.1, donate=True)


def test_combine_covers_every_leaf_once():
    s = specs()
    with pytest.raises(
        ValueError,
        match=r"transforms\[1\] steps leaves that one before it steps too: \['layers.0.exp",
    ):
        optim.combine(s, optim.muon(s), optim.adamw(s))
    with pytest.raises(ValueError, match=r"no transform steps \['embedding', .* tag them frozen"):
        optim.combine(s, optim.muon(s))
    assert "extra.frozen" not in everything().paths


def test_parameters_that_require_grad():
    transform = everything()
    values = tree.map(lambda x: x.requires_grad_(), weights())
    state = transform.init(values)
    expected, _ = transform.update(gradients(0, values), state, weights(), lr=0.1, donate=False)
    values, _ = transform.update(gradients(0, values), state, values, lr=0.1, donate=True)
    assert all(x.is_leaf and x.requires_grad for x in tree.leaves(values))
    pairs = zip(tree.leaves(values), tree.leaves(expected), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-6


def test_where_a_derivative_leads_through_a_donated_step_is_refused():
    """Muon's gave a gradient of zeros; AdamW's an error about captured tensors."""
    transform, values = everything(), weights()
    state, grads = transform.init(values), gradients(0, values)

    def step(grads, values, lr):
        return transform.update(grads, state, values, lr=lr, donate=True)[0].embedding.sum()

    rates = torch.tensor([0.1, 0.2])
    inside = "inside a torch.func transform .* leave donate=False, the default"
    with pytest.raises(ValueError, match=inside):
        torch.func.vmap(step, (None, None, 0))(grads, values, rates)
    with pytest.raises(ValueError, match=inside):
        torch.func.grad(step)(grads, values, rates[0])
    with pytest.raises(ValueError, match="rate or a scale that are part of an autograd graph"):
        step(grads, values, rates[0].requires_grad_())
    moved = tree.map(lambda x: x.requires_grad_() * 1, weights())
    with pytest.raises(ValueError, match="parameters that are results of an autograd graph"):
        step(grads, moved, 0.1)
