from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from k31fn import autodiff, tree
from k31fn.layers.linear import (
    dequantize,
    grouped_linear,
    linear,
    linears,
    per_head,
    split_heads,
    transposed_linear,
)
from k31fn.params import LowRank, Quantized
from k31fn.testing import check_grads

IN, OUT, RANK, EXPERTS = 12, 10, 2, 3
SIZES = torch.tensor([4, 0, 7])


def low_rank(*lead):
    shapes = ((IN, OUT), (IN, RANK), (RANK, OUT))
    return LowRank(*(torch.randn(*lead, *s, dtype=torch.float64) for s in shapes))


def quantized(*lead):
    codes = torch.randint(-7, 8, (*lead, IN, OUT), dtype=torch.int8)
    return Quantized(codes, torch.rand(*lead, IN // 4, OUT, dtype=torch.float64))


class ShapesMade(TorchDispatchMode):
    """The shape of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.shapes.add(tuple(out.shape))
        return out


def test_linear_is_a_product():
    x, w = torch.randn(2, 3, IN, dtype=torch.float64), torch.randn(IN, OUT, dtype=torch.float64)
    torch.testing.assert_close(
        linear(x, w), torch.einsum("bti,io->bto", x, w), rtol=1e-13, atol=1e-13
    )
    assert linear(x.bfloat16(), w.float()).dtype == torch.bfloat16


def test_low_rank_equals_the_merged_weight():
    x, w = torch.randn(2, 3, IN, dtype=torch.float64), low_rank()
    y, pull = autodiff.vjp(linear, x, w)
    merged, merged_pull = autodiff.vjp(lambda x, w: linear(x, w.base + w.a @ w.b), x, w)
    torch.testing.assert_close(y, merged, rtol=1e-12, atol=1e-12)
    ct = torch.randn_like(y)
    torch.testing.assert_close(
        tree.leaves(pull(ct)), tree.leaves(merged_pull(ct)), rtol=1e-12, atol=1e-12
    )


def test_quantized_equals_the_dequantised_weight():
    x, w = torch.randn(2, 3, IN, dtype=torch.float64), quantized()
    dense = torch.stack([w.codes[i] * w.scales[i // 4] for i in range(IN)])
    torch.testing.assert_close(linear(x, w), x @ dense, rtol=1e-13, atol=1e-13)
    on_top = LowRank(w, *(getattr(low_rank(), n) for n in "ab"))
    torch.testing.assert_close(
        linear(x, on_top), x @ (dense + on_top.a @ on_top.b), rtol=1e-12, atol=1e-12
    )
    gradient = torch.func.grad(lambda s: linear(x, Quantized(w.codes, s)).sum())(w.scales)
    torch.testing.assert_close(
        gradient[1], (x.sum((0, 1))[:, None] * w.codes)[4:8].sum(0), rtol=1e-12, atol=1e-12
    )


def test_grouped_linear_equals_a_loop_for_every_leaf():
    x = torch.randn(int(SIZES.sum()), IN, dtype=torch.float64)
    for w in (
        torch.randn(EXPERTS, IN, OUT, dtype=torch.float64),
        low_rank(EXPERTS),
        quantized(EXPERTS),
    ):
        dense = w
        if isinstance(w, LowRank):
            dense = w.base + w.a @ w.b
        elif isinstance(w, Quantized):
            dense = dequantize(w, torch.float64)
        expected = torch.cat([part @ dense[e] for e, part in enumerate(x.split(SIZES.tolist()))])
        torch.testing.assert_close(grouped_linear(x, w, SIZES), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_low_rank_never_forms_the_dense_update(grouped):
    lead = (EXPERTS,) if grouped else ()
    x, w = torch.randn(int(SIZES.sum()), IN, dtype=torch.float64), low_rank(*lead)
    product = (lambda x, w: grouped_linear(x, w, SIZES)) if grouped else linear

    def adapters(a, b, f):
        return f(x, LowRank(w.base, a, b)).sum()

    with ShapesMade() as made:
        autodiff.value_and_grad(lambda a, b: adapters(a, b, product), (0, 1))(w.a, w.b)
    with ShapesMade() as merged:
        autodiff.value_and_grad(
            lambda a, b: adapters(a, b, lambda x, w: product(x, w.base + w.a @ w.b)), (0, 1)
        )(w.a, w.b)
    products = {(IN, OUT), (EXPERTS, IN, OUT)}
    assert merged.shapes & products, "the check must see a dense update where there is one"
    # Splitting a stack of experts gives views of the base, not updates: only the whole stack would
    # be one.
    assert not made.shapes & ({(EXPERTS, IN, OUT)} if grouped else products)


def test_linear_refuses_wrong_shapes():
    x = torch.randn(3, IN)
    with pytest.raises(
        ValueError, match=r"x \[3, 12\] has 12 features.*\[10, 12\].*stored \[in, out\]"
    ):
        linear(x, torch.randn(OUT, IN))
    with pytest.raises(ValueError, match="has 12 features"):
        linear(x, LowRank(torch.randn(IN, OUT), torch.randn(IN + 1, RANK), torch.randn(RANK, OUT)))
    with pytest.raises(ValueError, match="for 3 experts is needed"):
        grouped_linear(x, torch.randn(2, IN, OUT), torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match="has 12 features"):
        grouped_linear(x, torch.randn(3, OUT, IN), torch.tensor([1, 1, 1]))
    for scales in (torch.rand(5, OUT), torch.rand(3, OUT + 1)):
        with pytest.raises(ValueError, match="one scale per group of rows"):
            linear(x, Quantized(torch.ones(IN, OUT), scales))


def test_linear_refuses_forward_mode():
    x, w = torch.randn(3, IN), torch.randn(IN, OUT)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="reverse-mode only"),
    ):
        linear(x, w)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="reverse-mode only"),
    ):
        linears(x, (w, w))


def test_a_weight_that_is_no_leaf_is_refused():
    with pytest.raises(ValueError, match="linear: the weight is None"):
        linear(torch.ones(2, 3), None)


def test_columns_split_into_whole_heads_of_an_equal_share():
    x = torch.arange(12.0)[None]
    assert torch.equal(split_heads(x, 3, 4, "w"), x.view(1, 3, 4))
    assert split_heads(x, 6, 4, "w").shape == (
        1,
        3,
        4,
    )  # half of six heads, as a rank of two holds them
    for num_heads, head_dim in ((3, 5), (4, 4), (2, 4), (1, 24)):
        with pytest.raises(
            ValueError,
            match=rf"w: 12 columns do not divide into num_heads={num_heads} heads of {head_dim}",
        ):
            split_heads(x, num_heads, head_dim, "w")


LEAVES = {
    "tensor": lambda: torch.randn(IN, OUT, dtype=torch.float64),
    "low rank": low_rank,
    "quantized": quantized,
    "low rank on quantized": lambda: LowRank(quantized(), low_rank().a, low_rank().b),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_transposed_linear_multiplies_with_the_transpose(leaf):
    w, y = leaf(), torch.randn(2, 3, OUT, dtype=torch.float64)
    dense = linear(torch.eye(IN, dtype=torch.float64), w)
    torch.testing.assert_close(transposed_linear(y, w), y @ dense.T, rtol=1e-12, atol=1e-12)


def test_transposed_linear_forms_no_dense_update():
    with FlopCounterMode(display=False) as counted:
        transposed_linear(torch.randn(3, OUT, dtype=torch.float64), low_rank())
    assert counted.get_total_flops() == 2 * 3 * (OUT * IN + OUT * RANK + RANK * IN)


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_weight_by_head(leaf):
    """Columns of 2 heads, each of 3 and then 2 columns; also where 4 heads are spread over 2
    ranks.
    """
    w, x = leaf(), torch.randn(7, IN, dtype=torch.float64)
    whole = linear(x, w)
    for num_heads in (2, 4):
        first, second = per_head(w, num_heads, (3, 2), "w")
        assert type(first) is type(w)
        rows = x.expand(2, 7, IN)
        for h in range(2):
            torch.testing.assert_close(
                linear(rows, first)[h], whole[:, 5 * h : 5 * h + 3], rtol=1e-12, atol=1e-12
            )
            torch.testing.assert_close(
                linear(rows, second)[h], whole[:, 5 * h + 3 : 5 * h + 5], rtol=1e-12, atol=1e-12
            )
    with pytest.raises(
        ValueError, match=r"w: 10 columns do not divide into num_heads=2 heads of 4"
    ):
        per_head(w, 2, (3, 1), "w")


def several() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    return x, tuple(torch.randn(IN, columns, dtype=torch.float64) for columns in (OUT, 4, 1))


def test_products_of_one_input_are_each_linear():
    """Values and gradients, to second order, and under vmap of grad."""
    x, weights = several()
    y, pull = autodiff.vjp(linears, x, weights)
    expected, one_by_one = autodiff.vjp(
        lambda x, weights: tuple(linear(x, w) for w in weights), x, weights
    )
    cts = tuple(torch.randn_like(part) for part in y)
    for a, b in ((y, expected), (pull(cts), one_by_one(cts))):
        torch.testing.assert_close(tree.leaves(a), tree.leaves(b), rtol=1e-13, atol=1e-13)
    check_grads(linears, (x, weights), order=2)

    def loss(weights, x):
        return sum(y.sin().sum() for y in linears(x, weights))

    samples = torch.stack([x, -2 * x])
    found = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(weights, samples)
    for i, sample in enumerate(samples):
        one = torch.func.grad(loss, (0, 1))(weights, sample)
        sliced = [g[i] for g in tree.leaves(found)]
        torch.testing.assert_close(sliced, tree.leaves(one), rtol=1e-12, atol=1e-12)


class OpsRun(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("together", [True, False])
def test_gradients_of_the_input_are_added_inside_the_products(together):
    x, weights = several()
    one_by_one = lambda x, weights: tuple(linear(x, w) for w in weights)  # noqa: E731
    y, pull = autodiff.vjp(linears if together else one_by_one, x, weights)
    with OpsRun() as run:
        pull(y)
    assert run.counts["aten::addmm"] == (2 if together else 0)
    # One by one the gradients are tensors of their own, which autograd adds.
    assert (run.counts["aten::add"] + run.counts["aten::add_"] == 0) == together


def test_several_weights_of_any_leaf():
    x, weights = several()
    leaves = (weights[0], low_rank(), quantized())
    for a, b in zip(linears(x, leaves), (linear(x, w) for w in leaves), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"linears: x .* has 12 features"):
        linears(x, (weights[0], torch.zeros(IN + 1, OUT)))
