import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k31fn import autodiff
from k31fn.kernels.experts import combine, dispatch, grouped_matmul, permute, sort_by_expert
from k31fn.kernels.experts.buckets import _Bucket, split
from k31fn.kernels.registry import record_impls, use_impl

SIZES = [[3, 0, 5, 4], [12, 0, 0, 0], [0, 0, 0, 12], [3, 3, 3, 3], [1, 10, 0, 1], [0, 6, 6, 0]]


def by_hand(rows, w, sizes):
    out, start = [], 0
    for e, n in enumerate(sizes.tolist()):
        out += [rows[r] @ w[e] for r in range(start, start + n)]
        start += n
    return torch.stack(out)


def operands(dtype=torch.float64):
    return torch.randn(12, 3, dtype=dtype), torch.randn(4, 3, 5, dtype=dtype)


def route(tokens, experts, k):
    return torch.rand(tokens, experts).argsort(1)[:, :k]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("impl", ["reference", "ragged", "buckets"])
def test_grouped_matmul_equals_a_loop(impl, sizes):
    rows, w = operands()
    with use_impl(grouped_matmul=impl):
        y = grouped_matmul(rows, w, torch.tensor(sizes))
    torch.testing.assert_close(y, by_hand(rows, w, torch.tensor(sizes)), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 31])
def test_reference_at_odd_row_counts(num_rows):
    sizes = torch.bincount(torch.randint(0, 4, (num_rows,)), minlength=4)
    rows, w = torch.randn(num_rows, 3, dtype=torch.float64), operands()[1]
    with use_impl(grouped_matmul="reference"):
        y = grouped_matmul(rows, w, sizes)
    torch.testing.assert_close(y, by_hand(rows, w, sizes), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("sizes", SIZES)
def test_all_forms_have_one_gradient_at_both_orders(sizes):
    rows, w = operands()
    sizes = torch.tensor(sizes)

    def curvature(rows, w):
        return torch.func.grad(
            lambda r, m: grouped_matmul(r, m, sizes).sin().sum(), argnums=(0, 1)
        )(rows, w)

    results = {}
    for impl in ("reference", "ragged", "buckets"):
        with use_impl(grouped_matmul=impl), record_impls() as ran:
            first = curvature(rows, w)
            second = torch.func.grad(
                lambda r, m: sum(g.cos().sum() for g in curvature(r, m)), argnums=(0, 1)
            )(rows, w)
        results[impl] = (*first, *second)
        assert {name for _, name in ran} == {impl}
    for impl in ("ragged", "buckets"):
        for a, b in zip(results["reference"], results[impl], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert torch.equal(
            results[impl][1][sizes == 0], torch.zeros_like(w[sizes == 0])
        )  # no row: a zero gradient


def test_reference_under_vmap_of_grad_over_sizes():
    rows, w = operands()
    many = torch.stack([rows * (i + 1) for i in range(len(SIZES))])

    def weight_grad(rows, sizes):
        return torch.func.grad(lambda m: grouped_matmul(rows, m, sizes).sin().sum())(w)

    with record_impls() as ran:
        batched = torch.vmap(weight_grad)(many, torch.tensor(SIZES))
    assert ran == {("grouped_matmul", "reference"): 1}
    for i, sizes in enumerate(SIZES):
        torch.testing.assert_close(
            batched[i], weight_grad(many[i], torch.tensor(sizes)), rtol=1e-12, atol=1e-13
        )


def test_ragged_is_the_choice_when_it_can_run():
    rows, w = operands()
    with record_impls() as ran:
        grouped_matmul(rows, w, torch.tensor(SIZES[0]))
        y = grouped_matmul(rows.to("meta"), w.to("meta"), torch.tensor(SIZES[0], device="meta"))
    assert ran == {("grouped_matmul", "ragged"): 1, ("grouped_matmul", "reference"): 1}
    assert y.shape == (12, 5)


@pytest.mark.parametrize("impl", ["ragged", "buckets"])
def test_what_reads_sizes_on_the_host_refuses_with_the_reason(impl):
    rows, w = operands()
    sizes = torch.tensor(SIZES)
    with use_impl(grouped_matmul=impl):
        with pytest.raises(ValueError, match="under vmap it differs between samples"):
            torch.vmap(lambda s: grouped_matmul(rows, w, s))(sizes)
        with pytest.raises(ValueError, match="the arguments are on meta"):
            grouped_matmul(rows.to("meta"), w.to("meta"), sizes[0].to("meta"))
        with pytest.raises(ValueError, match="add up to 11, but there are 12 rows"):
            grouped_matmul(rows, w, torch.tensor([11, 0, 0, 0]))
    with use_impl(grouped_matmul="grouped_mm"), pytest.raises(ValueError, match="runs on cuda"):
        grouped_matmul(rows, w, sizes[0])


def test_buckets_join_what_is_alike():
    of = [(sorted(b.experts), b.batch) for b in split([7, 100, 8, 0, 90, 7, 0, 0])]
    assert of == [([1, 4], 100), ([0, 2, 5], 8), ([3, 6, 7], 0)]
    assert split([15, 16, 15, 16]) == [
        _Bucket((0, 1, 2, 3), 16)
    ]  # a split would save less than a sixteenth
    assert split([4, 4]) == [_Bucket((0, 1), 4)]
    assert split([0, 0]) == [_Bucket((0, 1), 0)]


def test_many_experts_with_few_rows_need_few_products_and_little_padding():
    weights = torch.rand(896)
    sizes = torch.multinomial(weights, 896 * 8, replacement=True).bincount(minlength=896)
    found = split(sizes.tolist())
    assert len([b for b in found if b.batch]) <= 8
    assert sorted(e for b in found for e in b.experts) == list(range(896))
    assert all(sizes[e] <= b.batch for b in found for e in b.experts)
    assert sum(len(b.experts) * b.batch for b in found) < 1.3 * sizes.sum()
    rows, w = (
        torch.randn(896 * 8, 4, dtype=torch.float64),
        torch.randn(896, 4, 3, dtype=torch.float64),
    )
    with use_impl(grouped_matmul="buckets"), FlopCounterMode(display=False) as work:
        y = grouped_matmul(rows, w, sizes)
    torch.testing.assert_close(y, by_hand(rows, w, sizes), rtol=1e-13, atol=1e-14)
    assert work.get_total_flops() == 2 * 4 * 3 * sum(len(b.experts) * b.batch for b in found)


def test_buckets_keep_only_their_inputs():
    rows, w = operands()
    kept = []
    with (
        use_impl(grouped_matmul="buckets"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        grouped_matmul(rows.requires_grad_(), w.requires_grad_(), torch.tensor([1, 10, 0, 1]))
    assert {t.data_ptr() for t in kept if t.is_floating_point()} == {rows.data_ptr(), w.data_ptr()}


@pytest.mark.parametrize("impl", ["ragged", "buckets", "reference"])
@pytest.mark.parametrize("wrap", [lambda f: f, autodiff.remat], ids=["plain", "remat"])
def test_a_frozen_weight_costs_no_product(impl, wrap):
    rows, w, sizes = torch.randn(12, 4), torch.randn(3, 4, 5), torch.tensor([4, 4, 4])
    with use_impl(grouped_matmul=impl):

        def run(*wanted: int) -> int:
            with FlopCounterMode(display=False) as flops:
                autodiff.value_and_grad(
                    wrap(lambda r, m: grouped_matmul(r, m, sizes).sum()), wanted
                )(rows, w)
            return flops.get_total_flops()

        with FlopCounterMode(display=False) as forward:
            grouped_matmul(rows, w, sizes)
        product, replays = forward.get_total_flops(), wrap is autodiff.remat
        assert product > 0
        assert run(0, 1) == (3 + replays) * product
        assert run(0) == run(1) == (2 + replays) * product


def test_permute_and_its_gradient():
    index = torch.tensor([2, 0, 3, 1])
    inverse = index.argsort()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(permute(x, index, inverse), x[index])
    assert torch.autograd.gradcheck(lambda x: permute(x, index, inverse), (x,))
    assert torch.autograd.gradgradcheck(lambda x: permute(x, index, inverse), (x,))
    wrong = torch.autograd.grad(permute(x, index, index), x, torch.eye(4, 3, dtype=torch.float64))[
        0
    ]
    right = torch.autograd.grad(
        permute(x, index, inverse), x, torch.eye(4, 3, dtype=torch.float64)
    )[0]
    assert not torch.equal(wrong, right)


def test_plan_sorts_stably():
    idx = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order, inverse, sizes = sort_by_expert(idx, 5)
    assert order.tolist() == [
        1,
        2,
        0,
        4,
        3,
        5,
    ]  # expert 0: tokens 0, 1; expert 2: tokens 0, 2; expert 3: tokens 1, 2
    assert sizes.tolist() == [2, 0, 2, 2, 0]
    assert torch.equal(inverse.flatten()[order], torch.arange(6))
    batched = torch.vmap(lambda i: sort_by_expert(i, 5))(torch.stack([idx, idx.flip(0)]))
    for one, two in zip(sort_by_expert(idx.flip(0), 5), batched, strict=True):
        assert torch.equal(one, two[1])


def test_dispatch_and_combine_equal_a_loop():
    idx = route(7, 5, 3)
    order, inverse, _ = sort_by_expert(idx, 5)
    x, weights = torch.randn(7, 4, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64)
    rows = dispatch(x, order, inverse)
    flat = idx.flatten()
    expected = [x[n] for e in range(5) for n in range(7) if e in idx[n]]
    assert torch.equal(rows, torch.stack(expected))
    scale = torch.arange(1.0, 6, dtype=torch.float64)  # expert e multiplies by e + 1
    y = combine(rows * scale[flat[order]][:, None], weights, order, inverse)
    expected = [sum(weights[n, g] * scale[idx[n, g]] * x[n] for g in range(3)) for n in range(7)]
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-14, atol=1e-14)


def test_dispatch_and_combine_derivatives():
    order, inverse, _ = sort_by_expert(route(4, 3, 2), 3)
    x, rows, weights = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (8, 3), (4, 2))
    )
    assert torch.autograd.gradcheck(lambda x: dispatch(x, order, inverse), (x,))
    assert torch.autograd.gradgradcheck(lambda x: dispatch(x, order, inverse), (x,))
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, order, inverse), (rows, weights))
    assert torch.autograd.gradgradcheck(lambda r, w: combine(r, w, order, inverse), (rows, weights))


def some_present(tokens, choices, present):
    """Of all copies those in ``present``, in another order: as a rank that computes a part."""
    order = torch.tensor(present)
    inverse = torch.full((tokens * choices,), -1)
    inverse[order] = torch.arange(len(present))
    return order, inverse.view(tokens, choices)


def test_absent_copies_equal_a_loop():
    """One token has two copies here, one has one, two have none."""
    order, inverse = some_present(4, 3, [7, 2, 8])
    x = torch.randn(4, 5, dtype=torch.float64)
    rows, weights = (torch.randn(*s, dtype=torch.float64) for s in ((3, 5), (4, 3)))
    assert torch.equal(dispatch(x, order, inverse), x[[2, 0, 2]])
    y = combine(rows, weights, order, inverse)
    expected = torch.zeros(4, 5, dtype=torch.float64)
    expected[2] = weights[2, 1] * rows[0] + weights[2, 2] * rows[2]
    expected[0] = weights[0, 2] * rows[1]
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    _, pull = autodiff.vjp(lambda w: combine(rows, w, order, inverse), weights)
    assert not pull(torch.ones_like(y))[0][inverse < 0].any()


def test_absent_copies_derivatives():
    order, inverse = some_present(4, 2, [6, 1, 7, 2])
    x, rows, weights = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (4, 3), (4, 2))
    )
    assert torch.autograd.gradcheck(lambda x: dispatch(x, order, inverse), (x,))
    assert torch.autograd.gradgradcheck(lambda x: dispatch(x, order, inverse), (x,))
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, order, inverse), (rows, weights))
    assert torch.autograd.gradgradcheck(lambda r, w: combine(r, w, order, inverse), (rows, weights))
    # A copy that is there is no absent one, and is missed where it is said to be.
    lost = torch.where(inverse == 2, -1, inverse)
    assert not torch.equal(
        combine(rows, weights, order, inverse), combine(rows, weights, order, lost)
    )


def test_dispatch_and_its_transpose_agree():
    order, inverse, _ = sort_by_expert(route(6, 4, 2), 4)
    x, ct = torch.randn(6, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    y, pull = autodiff.vjp(lambda x: dispatch(x, order, inverse), x)
    torch.testing.assert_close((y * ct).sum(), (pull(ct)[0] * x).sum(), rtol=1e-13, atol=1e-13)


def test_combine_sums_in_float32():
    order, inverse, _ = sort_by_expert(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    y = combine(rows, torch.ones(1, 3), order, inverse)
    assert y.dtype == torch.bfloat16
    assert y.item() == 258  # in bf16 256 + 1 is 256
    rows = torch.tensor([[256.0], [-256.0], [1.0]]).bfloat16()
    y = combine(rows, torch.tensor([[1 + 2**-9, 1.0, 1.0]]), order, inverse)
    assert y.item() == 1.5  # a weight rounded to bf16 would give 1


def test_a_weightless_token_leaves_no_trace():
    order, inverse, sizes = sort_by_expert(route(5, 4, 2), 4)
    x, w = torch.randn(5, 3), torch.randn(4, 3, 3)
    weights = torch.rand(5, 2) * torch.tensor([1.0, 1, 0, 1, 1])[:, None]

    def f(x, w):
        return combine(
            grouped_matmul(dispatch(x, order, inverse), w, sizes), weights, order, inverse
        )

    y, pull = autodiff.vjp(f, x, w)
    other_y, other_pull = autodiff.vjp(f, torch.cat([x[:2], 9 + x[2:3], x[3:]]), w)
    assert torch.equal(y, other_y)
    assert torch.equal(y[2], torch.zeros(3))
    ct = torch.randn(5, 3)
    grads, other = pull(ct), other_pull(ct)
    assert torch.equal(grads[0], other[0])
    assert torch.equal(grads[1], other[1])


def test_same_bits_every_run():
    idx = route(200, 8, 2)
    order, inverse, sizes = sort_by_expert(idx, 8)
    x, w, weights = torch.randn(200, 16), torch.randn(8, 16, 16), torch.rand(200, 2)

    def once():
        def f(x, w, weights):
            return combine(
                grouped_matmul(dispatch(x, order, inverse), w, sizes), weights, order, inverse
            )

        y, pull = autodiff.vjp(f, x, w, weights)
        return (y, *pull(torch.ones_like(y)))

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "sizes", [[24, 0, 40, 64], [128, 0, 0, 0], [0, 0, 0, 128], [1, 2, 5, 120], [32, 32, 32, 32]]
)
def test_grouped_mm_equals_the_reference(sizes):
    rows = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4, 64, 48, device="cuda", dtype=torch.bfloat16)
    sizes = torch.tensor(sizes, device="cuda")
    ct = torch.randn(128, 48, device="cuda", dtype=torch.bfloat16)
    with record_impls() as ran:
        y, pull = autodiff.vjp(lambda r, m: grouped_matmul(r, m, sizes), rows, w)
        grads = pull(ct)
    assert ran == {("grouped_matmul", "grouped_mm"): 1}
    with use_impl(grouped_matmul="reference"):
        expected, pull = autodiff.vjp(
            lambda r, m: grouped_matmul(r, m, sizes), rows.double(), w.double()
        )
    expected_grads = pull(ct.double())
    for a, b in ((y, expected), *zip(grads, expected_grads, strict=True)):
        # One rounding to bf16 of sums accumulated in float32.
        torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=2**-7)


@pytest.mark.cuda
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # a vmapped pullback runs sample by sample
def test_grouped_mm_under_transforms():
    rows = torch.randn(16, 8, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2, 8, 8, device="cuda", dtype=torch.bfloat16)
    sizes = torch.tensor([5, 11], device="cuda")

    def f(w):
        return grouped_matmul(rows, w, sizes).sum(0)

    wide = torch.func.jacrev(lambda w: grouped_matmul(rows.double(), w, sizes).sum(0))(w.double())
    torch.testing.assert_close(torch.func.jacrev(f)(w).double(), wide, rtol=2**-6, atol=2**-5)
    per_sample = torch.vmap(
        torch.func.grad(lambda w, s: grouped_matmul(rows, w, s).sum()), (None, 0)
    )
    assert per_sample(w, torch.stack([sizes, sizes.flip(0)])).shape == (2, 2, 8, 8)
    second = torch.func.grad(
        lambda w: torch.func.grad(lambda w: f(w).square().sum())(w).square().sum()
    )(w)
    second_wide = torch.func.grad(
        lambda w: (
            torch.func.grad(
                lambda w: grouped_matmul(rows.double(), w, sizes).sum(0).square().sum()
            )(w)
            .square()
            .sum()
        )
    )(w.double())
    assert (
        (second.double() - second_wide).norm() / second_wide.norm()
    ).item() < 0.03  # three products in bf16


@pytest.mark.cuda
def test_a_frozen_weight_costs_no_gradient():
    rows = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(32, 512, 512, device="cuda", dtype=torch.bfloat16)
    sizes = torch.full((32,), 8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    autodiff.value_and_grad(lambda r: grouped_matmul(r, w, sizes).sum())(rows)
    assert torch.cuda.max_memory_allocated() - before < w.nbytes / 2
