from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from k31fn import autodiff
from k31fn.kernels.registry import OPS, Implementation, Op
from k31fn.testing import assert_close_trees, assert_op_matches, check_grads, live_bytes

F64 = torch.float64


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


# -------------------------------------------------------------------------------------- check_grads


def layer(params: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    h = torch.tanh(x @ params["w"] + params["b"])
    return {"probs": torch.softmax(h, -1), "parts": (h.sum(), h.argmax())}


def layer_args() -> tuple[dict[str, Tensor], Tensor]:
    return {"w": normal(3, 2), "b": torch.zeros(2, dtype=F64)}, normal(2, 3)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("per_coordinate", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, autodiff.remat], ids=["plain", "remat"])
def test_check_grads_passes_right_gradients(
    order: int, per_coordinate: bool, wrap: Callable[..., Any]
):
    check_grads(wrap(layer), layer_args(), order=order, per_coordinate=per_coordinate)


def matmul_with(bwd: Callable[..., Any]) -> Callable[..., Any]:
    """``x @ w`` with the given reverse rule."""
    rule = autodiff.custom_vjp(lambda x, w: (x @ w, (x, w)), bwd, name="matmul")
    return lambda params, x: torch.tanh(rule(x, params["w"])) ** 2


BACKWARDS = {
    "factor 2": lambda r, ct: (ct @ r[1].mT, 2 * (r[0].mT @ ct)),
    "missing transpose": lambda r, ct: (ct @ r[1], r[0].mT @ ct),
    "swapped operands": lambda r, ct: (ct @ r[1].mT, ct.mT @ r[0]),
    "no gradient": lambda r, ct: (ct @ r[1].mT, None),
    "wrong by 1e-5": lambda r, ct: (ct @ r[1].mT, (1 + 1e-5) * (r[0].mT @ ct)),
}
AT_FAULT = dict.fromkeys(BACKWARDS, "0.w") | {"missing transpose": "1"}


def test_the_right_rule_for_the_planted_errors_passes():
    right = matmul_with(lambda r, ct: (ct @ r[1].mT, r[0].mT @ ct))
    check_grads(right, ({"w": normal(6, 6)}, normal(5, 6)), order=2)


@pytest.mark.parametrize("error", BACKWARDS)
@pytest.mark.parametrize("per_coordinate", [False, True])
def test_check_grads_finds_planted_errors_and_names_the_leaf(error: str, per_coordinate: bool):
    args = ({"w": normal(6, 6)}, normal(5, 6))
    with pytest.raises(
        AssertionError,
        match=f"order 1, leaf '{AT_FAULT[error]}'.*reverse mode gives .*relative error",
    ):
        check_grads(matmul_with(BACKWARDS[error]), args, per_coordinate=per_coordinate)


def test_check_grads_names_the_element():
    rule = autodiff.custom_vjp(
        lambda x: (x * x, (x,)),
        lambda r, ct: (2 * r[0] * ct * torch.tensor([1.0, 1.0, 1.1]),),
        name="square",
    )
    with pytest.raises(AssertionError, match=r"leaf '0'\[1, 2\]"):
        check_grads(
            rule,
            (torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], dtype=F64),),
            per_coordinate=True,
        )


def test_check_grads_sees_a_leaf_that_hardly_matters():
    """1e-6 of the output, its gradient wrong by 0.1%: 1e-9 of the whole."""
    wrong = autodiff.custom_vjp(
        lambda x: (x * x, (x,)), lambda r, ct: (2.002 * r[0] * ct,), name="square"
    )
    with pytest.raises(AssertionError, match="leaf '1'"):
        check_grads(lambda x, y: x.exp().sum() + 1e-6 * wrong(y).sum(), (normal(9), normal(9)))


def test_check_grads_finds_a_wrong_second_derivative_under_a_right_first():
    detached = autodiff.custom_vjp(
        lambda x: (x.exp(), (x,)), lambda r, ct: (r[0].detach().exp() * ct,), name="exp"
    )
    check_grads(detached, (normal(4),))
    with pytest.raises(AssertionError, match="order 2, leaf '0'"):
        check_grads(detached, (normal(4),), order=2)


def test_check_grads_compares_the_two_reverse_modes():
    """A function that knows which one it runs under."""

    class Split(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.functional = torch._C._are_functorch_transforms_active()

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> Tensor:
            return ct * (1.5 if ctx.functional else 1.0)

    with pytest.raises(AssertionError, match=r"vjp and torch\.func\.grad differ"):
        check_grads(Split.apply, (normal(3),))


@pytest.mark.parametrize("order", [1, 2])
def test_check_grads_pins_decisions(order: int):
    def route(x: Tensor) -> Tensor:
        return x.gather(-1, autodiff.decision("top", lambda s: s.topk(2).indices, x)) ** 2

    ties = torch.ones(3, 5, dtype=F64)  # any step breaks them
    for f in (route, autodiff.remat(route), autodiff.remat(autodiff.remat(route))):
        check_grads(f, (ties,), order=order)
    with pytest.raises(AssertionError, match="leaf '0'"):
        check_grads(lambda x: x.topk(2).values ** 2, (ties,))


def test_check_grads_asks_a_decision_once():
    calls: list[int] = []

    def choose(s: Tensor) -> Tensor:
        calls.append(1)
        return s.argmax()

    check_grads(lambda x: x[autodiff.decision("max", choose, x)] ** 2, (normal(4),), order=2)
    assert len(calls) == 1


@pytest.mark.parametrize("order", [1, 2])
def test_check_grads_pins_what_is_stopped(order: int):
    """Also a value inside a remat, which notes its own, and one beside a choice that stops too."""

    def loss(x: Tensor) -> Tensor:
        teacher = autodiff.stop_gradient({"t": x.exp(), "name": 3})["t"]
        best = autodiff.decision("top", lambda s: autodiff.stop_gradient(s).topk(2).indices, x)
        return ((x - teacher) ** 2 * autodiff.stop_gradient(teacher)).gather(-1, best)

    for f in (loss, autodiff.remat(loss), lambda x: autodiff.remat(loss)(loss(x) + x[:2])):
        check_grads(f, (normal(4),), order=order)
    with pytest.raises(AssertionError, match="leaf '0'"):
        check_grads(lambda x: (x - x.exp().detach()) ** 2, (normal(4),))
    inner = vmap(lambda x: x * autodiff.stop_gradient(x))  # gone before the replay, so not pinned
    with pytest.raises(AssertionError, match="leaf '0'"):
        check_grads(lambda x: inner(x) + x * autodiff.stop_gradient(x), (normal(4),))


def test_a_frozen_argument_has_no_gradient():
    def loss(x: Tensor, teacher: Tensor) -> Tensor:
        return (
            (x - 2 * autodiff.stop_gradient(teacher)) ** 2 * autodiff.stop_gradient(teacher)
        ).sum()

    x = normal(4)
    check_grads(lambda x: loss(x, x), (x,))
    check_grads(loss, (x, x), frozen=(1,), order=2)
    with pytest.raises(AssertionError, match=r"frozen leaf '1\.t' has a gradient"):
        check_grads(lambda x, tree: x * tree["t"], (x, {"t": x}), frozen=(1,))
    with pytest.raises(ValueError, match="names 2, but there are 2"):
        check_grads(loss, (x, x), frozen=(2,))


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda x: x.to(torch.float32).tanh().to(F64), id="float32 inside"),
        pytest.param(lambda x: (x * 0 + (x > 0) * x.round()) + x, id="jumps"),
        pytest.param(lambda x: torch.relu(x + 1.5), id="a kink at the very point"),
    ],
)
def test_check_grads_says_that_a_function_is_not_smooth(f: Callable[[Tensor], Tensor]):
    with pytest.raises(AssertionError, match=r"leaf '0'"):
        check_grads(f, (torch.tensor([-1.5, 0.5, 1.5, 2.5], dtype=F64),))


def test_check_grads_passes_kinks_that_are_not_at_the_point():
    check_grads(lambda x: (torch.relu(x @ x.mT) * x.sum()).abs(), (normal(4, 4),), order=2)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("sharpness", [1e-2, 1.0, 30.0])
def test_check_grads_passes_steep_and_flat_functions(scale: float, sharpness: float):
    check_grads(
        lambda x: torch.sigmoid(sharpness / scale * x) * scale, (scale * normal(3, 4),), order=2
    )


def test_check_grads_passes_degenerate_leaves():
    """A scalar, an empty leaf, one that is not used, one in which f is linear, integers."""
    args = (
        torch.tensor(0.3, dtype=F64),
        torch.zeros(0, dtype=F64),
        normal(3),
        normal(3),
        torch.arange(2),
    )
    for per_coordinate in (False, True):
        check_grads(
            lambda a, b, c, d, i: (a.sin(), 3 * d[i], i),
            args,
            order=2,
            per_coordinate=per_coordinate,
        )


@pytest.mark.parametrize(
    ("f", "args", "message"),
    [
        (
            lambda x: x["a"],
            ({"a": torch.ones(2)},),
            r"args leaf '0.a' is torch.float32; give float64",
        ),
        (
            lambda x: {"y": x, "z": x.to(torch.float32)},
            (torch.ones(2, dtype=F64),),
            r"output leaf 'z' is torch.float32",
        ),
        (lambda x: x, (torch.arange(2),), "no floating leaf to differentiate with respect to"),
        (lambda x: x.argmax(), (torch.ones(2, dtype=F64),), "output has no floating leaf"),
        (lambda x: x["a"], ({"a": None},), "None is not a leaf"),
    ],
)
def test_check_grads_refuses_what_it_cannot_judge(
    f: Callable[..., Any], args: tuple[Any, ...], message: str
):
    with pytest.raises(ValueError, match=message):
        check_grads(f, args)
    with pytest.raises(ValueError, match="order=3"):
        check_grads(f, args, order=3)


# ------------------------------------------------------------------------------- assert_close_trees


def test_close_trees_pass_within_either_tolerance():
    expected = {
        "a": torch.tensor([1.0, 1e-9, 100.0]),
        "n": 3,
        "s": "x",
        "i": torch.tensor([1, 2]),
        "e": (),
    }
    actual = {**expected, "a": torch.tensor([1.0009, 9e-7, 100.09])}
    assert_close_trees(actual, expected, rtol=1e-3, atol=1e-6)
    for tighter in ({"rtol": 1e-4, "atol": 1e-6}, {"rtol": 1e-3, "atol": 1e-8}):
        with pytest.raises(AssertionError, match="1 of 4 leaves differ"):
            assert_close_trees(actual, expected, **tighter)


def test_the_worst_leaf_comes_first_with_its_worst_element():
    expected = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2), "c": torch.zeros(2)}
    actual = {
        "a": torch.full((2, 2), 0.02),
        "b": torch.tensor([[0.0, 0.5], [0.02, 0.0]]),
        "c": torch.zeros(2),
    }
    with pytest.raises(AssertionError) as e:
        assert_close_trees(actual, expected, rtol=0, atol=0.01)
    first, second = str(e.value).splitlines()[1:]
    assert first.strip().startswith(
        "b: 2 of 4 elements; worst at [0, 1]: got 0.5, expected 0 (error 0.5"
    )
    assert second.strip().startswith("a: 4 of 4 elements")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}, "missing: b"),
        ({"a": torch.ones(1), "c": torch.ones(1)}, {"a": torch.ones(1)}, "not expected: c"),
        ([torch.ones(1)], (torch.ones(1),), "not the same tree"),
        ({"a": torch.ones(2)}, {"a": torch.ones(1)}, r"a: shape \[2\], expected \[1\]"),
        (
            {"a": torch.ones(2)},
            {"a": torch.ones(2, dtype=F64)},
            "a: dtype torch.float32, expected torch.float64",
        ),
        ({"a": 3}, {"a": 4}, "a: got 3, expected 4"),
        ({"a": 3.0}, {"a": torch.tensor(3.0)}, "a: got 3.0, expected a tensor"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), "the tree itself.*got nan"),
        (torch.tensor(1.0), torch.tensor(float("nan")), "got 1, expected nan"),
        (torch.tensor(float("inf")), torch.tensor(float("-inf")), "got inf, expected -inf"),
        (torch.tensor(1e300, dtype=F64), torch.tensor(float("inf"), dtype=F64), "expected inf"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 elements; worst at"),
        (torch.tensor(2**53 + 1), torch.tensor(2**53), "got 9007199254740993"),
        (torch.tensor(1j), torch.tensor(2j), "got 0"),
        ({"a": None}, {"a": torch.ones(1)}, "a: got None"),
    ],
)
def test_close_trees_say_what_differs(actual: Any, expected: Any, message: str):
    with pytest.raises(AssertionError, match=message):
        assert_close_trees(actual, expected, rtol=0, atol=0)


def test_close_trees_with_equal_infinities_and_nans():
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    assert_close_trees(x, x.clone(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(AssertionError, match=r"1 of 4 elements; worst at \[2\]"):
        assert_close_trees(x, x.clone(), rtol=1.0, atol=1.0)


# -------------------------------------------------------------------------------- assert_op_matches


def scaled_square(x: Tensor, parts: tuple[Tensor, ...], scale: float) -> dict[str, Tensor]:
    return {"y": scale * x**2 * parts[0], "largest": x.argmax()}


def square_rule(factor: float, fwd_factor: float = 1.0) -> Callable[..., Any]:
    """The op with a hand-written backward, wrong by ``factor``."""
    rule = autodiff.custom_vjp(
        lambda x, parts, scale: (scaled_square(x, parts, scale * fwd_factor), (x, parts)),
        lambda scale, r, ct: (
            factor * 2 * scale * r[0] * r[1][0] * ct["y"],
            ((scale * ct["y"] * r[0] ** 2).sum(0),),
        ),
        nondiff_argnums=(2,),
        opaque=True,
        name="fused_square",
    )
    return rule


@pytest.fixture
def op() -> Iterator[Op]:
    op = Op("testing_square", scaled_square)
    yield op
    del OPS["testing_square"]


def register(op: Op, fn: Callable[..., Any]) -> None:
    op.register(
        Implementation(
            "fused", ("cpu",), fn, lambda x, parts, scale: "" if x.ndim == 2 else "x is not 2-d"
        )
    )


def op_args() -> tuple[Any, ...]:
    return torch.randn(5, 3), (torch.randn(3),), 0.5


def test_an_op_that_matches(op: Op):
    register(op, square_rule(1.0))
    assert_op_matches(op, "fused", op_args(), rtol=1e-6, atol=1e-6)
    args = op_args()
    low = (args[0].bfloat16(), (args[1][0].bfloat16(),), 0.5)
    assert_op_matches(
        op, "fused", low, rtol=2e-2, atol=1e-3, grad_rtol=2e-2, grad_atol=2e-2, reference_dtype=F64
    )


def writing(x: Tensor, parts: tuple[Tensor, ...], scale: float) -> dict[str, Tensor]:
    x.detach().mul_(1)
    return scaled_square(x, parts, scale)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (square_rule(1.0, fwd_factor=1.01), "'fused', value: 1 of 2 leaves differ:\n  y: 15 of 15"),
        (square_rule(1.01), "'fused', gradient: 1 of 2 leaves differ:\n  0: "),
        (writing, "changed its argument '0' in place"),
        (
            lambda x, parts, scale: scaled_square(x.detach(), parts, scale),
            "gradient: 1 of 2 leaves differ:\n  0: 15 of 15",
        ),
    ],
)
def test_an_op_that_does_not_match(op: Op, fn: Callable[..., Any], message: str):
    register(op, fn)
    with pytest.raises(AssertionError, match=message):
        assert_op_matches(op, "fused", op_args(), rtol=1e-5, atol=1e-5, vmap_grad=fn is not writing)


def test_an_op_that_is_wrong_under_vmap_only(op: Op):
    class Square(torch.autograd.Function):
        """Keeps its residual for the first sample only."""

        @staticmethod
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            return x**2, x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
            ctx.save_for_backward(output[1])

        @staticmethod
        def backward(ctx: Any, ct: Tensor, _: Tensor) -> Tensor:
            return 2 * ct * ctx.saved_tensors[0]

        @staticmethod
        def vmap(
            info: Any, in_dims: Any, x: Tensor
        ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
            return (x**2, x[:1].expand_as(x).clone()), (0, 0)

    register(
        op,
        lambda x, parts, scale: {"y": scale * Square.apply(x)[0] * parts[0], "largest": x.argmax()},
    )
    assert_op_matches(op, "fused", op_args(), rtol=1e-5, atol=1e-5, vmap_grad=False)
    with pytest.raises(
        AssertionError,
        match="gradient of sample 1 under vmap: 1 of 2 leaves differ:\n  0: 15 of 15",
    ):
        assert_op_matches(op, "fused", op_args(), rtol=1e-5, atol=1e-5)


def test_an_op_whose_implementation_did_not_run(op: Op):
    register(op, lambda *args: op(*args))
    with pytest.raises(RecursionError):
        assert_op_matches(op, "fused", op_args(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no implementation 'fast'; known: reference, fused"):
        assert_op_matches(op, "fast", op_args(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="cannot run: x is not 2-d"):
        assert_op_matches(op, "fused", (torch.ones(3), (torch.ones(3),), 0.5), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="compared with itself"):
        assert_op_matches(op, "reference", op_args(), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------- live_bytes

KB = 1000  # of 250 float32 elements


def test_a_chain_of_operations():
    x = torch.randn(250)
    with live_bytes() as live:
        assert (live.current, live.peak, live.largest) == (0, 0, None)
        a = x * 2
        b = a + 1
        del a
        assert (live.current, live.peak) == (KB, 2 * KB)
        c = (b + 1) + 1  # the inner sum lives while the outer is made
        assert (live.current, live.peak) == (2 * KB, 3 * KB)
        del b, c
        assert (live.current, live.peak) == (0, 3 * KB)


def test_views_count_once_and_keep_their_storage():
    with live_bytes() as live:
        a = torch.zeros(250)
        views = [a[10:], a.view(10, 25).t(), a.detach()]
        assert live.current == KB
        del a
        views.pop()
        assert live.current == KB
        views.clear()
        assert live.current == 0


def test_in_place_operations_and_resizing():
    with live_bytes() as live:
        a = torch.zeros(250)
        a += 1
        a.mul_(2)
        torch.add(a, 1, out=a)
        assert (live.current, live.peak) == (KB, KB)
        a.resize_(500)
        assert (live.current, live.peak) == (2 * KB, 2 * KB)


def test_tensors_from_before_do_not_count():
    before = torch.zeros(250)
    with live_bytes() as live:
        before += 1
        view = before[5:]
        assert live.current == 0
        made = torch.tensor([1.0, 2.0])
        assert live.current == 8
        del view, made
        before.resize_(1000)
        assert live.current == 0


def test_what_autograd_keeps_counts():
    with live_bytes() as live:
        x = torch.zeros(250, requires_grad=True)
        y = x.exp().exp().sum()  # exp keeps its result: two besides x
        assert live.current == 3 * KB + 4
        y.backward()
        del y
        assert live.current == 2 * KB  # x and its gradient
        del x
        assert live.current == 0


def test_the_largest_tensor_is_named():
    with live_bytes() as live:
        torch.ones(3, 4) @ torch.ones(4, 50)
        torch.ones(20, dtype=torch.uint8)
    assert live.largest is not None
    assert (live.largest.nbytes, live.largest.shape) == (800, (4, 50))
    assert "ones" in live.largest.op


def test_blocks_nest():
    with live_bytes() as outer:
        a = torch.zeros(250)
        with live_bytes() as inner:
            b = a + 1
            assert (inner.current, outer.current) == (KB, 2 * KB)
        del b
        assert (inner.current, outer.current) == (0, KB)


@pytest.mark.parametrize(
    "transform", [grad, lambda f: vmap(grad(f)), lambda f: autodiff.value_and_grad(f)]
)
def test_live_bytes_under_transforms(transform: Callable[..., Any]):
    x = torch.randn(1, 250) if transform not in (grad,) else torch.randn(250)
    f = (lambda x: x.exp().sum()) if transform in (grad,) else (lambda x: x.exp().sum(-1).sum())
    gc.collect()
    with live_bytes() as live:
        result = transform(f)(x)
        peak = live.peak
        del result
    assert 2 * KB <= peak <= 5 * KB  # the exponential and the gradient, and copies of them at most
    assert live.current == 0


def test_live_bytes_on_another_thread():
    def work() -> None:
        with live.on_this_thread():
            kept.append(torch.zeros(250))
        kept.append(torch.zeros(250))  # not watched

    kept: list[Tensor] = []
    with live_bytes() as live:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert live.current == KB
        kept.clear()
        assert live.current == 0


@pytest.mark.cuda
def test_live_bytes_on_cuda_with_its_backward_threads():
    with live_bytes() as live:
        x = torch.zeros(250, device="cuda", requires_grad=True)
        y = x.exp().exp().sum()
        assert live.current == 3 * KB + 4
        y.backward()
        del y
        assert live.current == 2 * KB
        assert live.peak >= 4 * KB
