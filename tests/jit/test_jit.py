"""The rules of capture: over the recorder for the CPU, and on a GPU where there is one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k31fn import jit, random, tree
from k31fn.autodiff import custom_vjp, value_and_grad
from k31fn.jit import function, recorders
from k31fn.kernels import registry
from k31fn.kernels.norm import rms_norm
from k31fn.testing import captures_on_cpu

CALLS = 6


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    torch.set_default_device(request.param)
    with captures_on_cpu():
        yield request.param
    torch.set_default_device(None)


@tree.dataclass
class State:
    step: Tensor
    weights: Any
    name: str = tree.static(default="a")


def start() -> State:
    w = random.normal(random.key(0, device=torch.get_default_device()), (4, 3))
    return State(torch.zeros((), dtype=torch.int64), {"w": w, "b": torch.zeros(3)})


def loss(weights, x):
    return torch.tanh(x @ weights["w"] + weights["b"]).square().sum()


def descend(state: State, x: Tensor, lr: Tensor):
    """Writes into the weights; counts in a new tensor."""
    value, grads = value_and_grad(loss)(state.weights, x)
    with torch.no_grad():
        for p, g in zip(tree.leaves(state.weights), tree.leaves(grads), strict=True):
            p.sub_(lr.to(p.dtype) * g)
    return State(state.step + 1, state.weights, state.name), {"loss": value, "step": state.step}


def inputs(i: int):
    x = random.normal(random.key(i, device=torch.get_default_device()), (5, 4))
    return x, torch.full((), 0.1 / (i + 1), dtype=torch.float64)


def run(f, calls: int = CALLS):
    state, losses = start(), []
    for i in range(calls):
        state, numbers = f(state, *inputs(i))
        losses.append(numbers)
    return state, losses


def same(a, b) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def test_captured_calls_have_the_bits_of_eager_ones():
    lines: list[str] = []
    captured = jit.jit(descend, donate=(0,), strict=True, note=lines.append)
    assert same(run(captured), run(descend))
    assert len(lines) == 1
    assert lines[0].startswith("jit: descend is captured, in ")
    assert f"launched {CALLS - 2} times" in jit.describe(captured)


def test_results_are_the_callers():
    """Kept from call to call they do not change: eager ones do not either."""
    f = jit.jit(lambda x: (x + 1, x), strict=True)
    given = [torch.full((2,), float(i)) for i in range(CALLS)]
    results = [f(x) for x in given]
    for x, (more, itself) in zip(given, results, strict=True):
        assert torch.equal(more, x + 1)
        assert torch.equal(itself, x)


def test_donated_leaves_keep_their_addresses():
    f = jit.jit(descend, donate=(0,), strict=True)
    state = start()
    addresses = set()
    for i in range(CALLS):
        state, _ = f(state, *inputs(i))
        if i >= 2:
            addresses.add(tuple(x.data_ptr() for x in tree.leaves(state)))
    assert len(addresses) == 1
    # another state, such as a restored one, is copied in
    again, _ = f(start(), *inputs(0))
    assert [x.data_ptr() for x in tree.leaves(again)] == list(*addresses)
    assert same(again, descend(start(), *inputs(0))[0])


def test_leaves_that_change_places():
    def swap(a, b):
        return (b, a + 1), a.sum()

    f = jit.jit(lambda ab: swap(*ab), donate=(0,), strict=True)
    wanted = mine = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    mine = tree.map(torch.clone, mine)
    for _ in range(CALLS):
        (wanted, total), (mine, own_total) = swap(*wanted), f(mine)
        assert same(wanted, mine)
        assert torch.equal(total, own_total)
    # and the caller may change them
    wanted, mine = swap(*wanted[::-1])[0], f(mine[::-1])[0]
    assert same(wanted, mine)


COUNT = [0.0]


def reads(x):
    return x * x.sum().item()


def lists(x):
    return x * x.tolist()[0]


def branches(x):
    return x * 2 if x.sum() > 0 else x


def made_on_the_host(x):
    return x + torch.tensor([1.0, 2.0])


def of_numpy(x):
    return x + torch.from_numpy(np.ones(2, dtype=np.float32)).to(x.device)


def masked(x):
    return x[x > 0].sum() + x


def chosen(x):
    return torch.nonzero(x).sum() + x


def listed(x):
    return x[[1, 0]]


def writes_one(x):
    y = x.clone()
    y[0] = 2.0
    return y


def counts(x):
    COUNT[0] += 1.0
    return x * COUNT[0]


def alternates(x):
    COUNT[0] += 1.0
    return x * 2 if COUNT[0] % 2 else x + 2


def repeats(x):
    return x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)) + x


def in_the_backward(x):
    f = custom_vjp(
        lambda x: (x * 2, (x,)), lambda kept, ct: (ct * kept[0].sum().item(),), name="reads"
    )
    return value_and_grad(lambda x: f(x).sum())(x)[1]


REFUSED = [
    (reads, r"test_jit.py:\d+: aten._local_scalar_dense.default reads a number on the host"),
    (lists, r"test_jit.py:\d+: (Tensor.tolist reads values on|aten._to_copy.* copies to) the host"),
    (branches, r"test_jit.py:\d+: aten._local_scalar_dense.default reads a number"),
    (made_on_the_host, r"test_jit.py:\d+: aten.lift_fresh.default makes a tensor of Python val"),
    (
        of_numpy,
        r"test_jit.py:\d+: aten.(lift_fresh.* makes a tensor of Python|_to_copy.* from the)",
    ),
    (masked, r"test_jit.py:\d+: aten.index.Tensor takes a mask"),
    (chosen, r"test_jit.py:\d+: aten.nonzero.default has a result whose shape"),
    (listed, r"test_jit.py:\d+: aten.(lift_fresh.default makes a tensor of|index.* host wait)"),
    (writes_one, r"test_jit.py:\d+: aten.copy_.default copies from the host"),
    (counts, r"test_jit.py:\d+: aten.mul.Tensor is given 2.0 in one call and 3.0 in another"),
    (alternates, r"test_jit.py:\d+: aten.mul.Tensor runs in one call and not in another"),
    (repeats, r"test_jit.py:\d+: aten.repeat_interleave.Tensor has a result whose shape"),
    (in_the_backward, r"test_jit.py:\d+: aten._local_scalar_dense.default reads a number"),
]


@pytest.mark.parametrize(("f", "message"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
class TestRefused:
    def test_runs_as_it_is_and_says_where(self, f, message):
        lines: list[str] = []
        g = jit.jit(f, note=lines.append)
        for i in range(CALLS):
            x = torch.tensor([1.0 + i, -2.0])
            COUNT[0] = float(i)
            got = g(x)
            COUNT[0] = float(i)
            # the call that cannot be captured runs what counts on the host twice
            assert torch.equal(got, f(x)) or (f in (counts, alternates) and i == 2)
        assert len(lines) == 1
        with pytest.raises(ValueError, match=message):
            raise ValueError(lines[0])
        with pytest.raises(ValueError, match=message):
            raise ValueError(jit.describe(g))

    def test_strict_raises_before_the_call(self, f, message):
        COUNT[0] = 0.0
        g = jit.jit(f, strict=True)
        x = torch.tensor([1.0, -2.0])
        g(x)
        g(x)
        with pytest.raises(jit.CaptureError, match=message):
            g(x)


def test_numbers_written_into_slices_are_fills():
    def f(x):
        y = x.clone()
        y[:2] = 2.0
        return y

    f = jit.jit(f, strict=True)
    for i in range(CALLS):
        assert f(torch.tensor([1.0, 3.0, float(i)])).tolist() == [2.0, 2.0, float(i)]


class TestArguments:
    def test_a_python_float_is_refused_by_name(self):
        f = jit.jit(descend, donate=(0,))
        with pytest.raises(ValueError, match=r"jit: 2=0.1 of descend is a Python float"):
            f(start(), inputs(0)[0], 0.1)
        with pytest.raises(ValueError, match=r"jit: 2.lr=0.1 of descend is a Python float"):
            f(start(), inputs(0)[0], lr=0.1)

    def test_an_argument_elsewhere(self, device, monkeypatch):
        recorder = recorders.STAND_IN.get()
        if device == "cpu":
            monkeypatch.setattr(function, "recorder_of", lambda kind: recorder)
        f = jit.jit(lambda x, y: (y, x), strict=True)
        with pytest.raises(jit.CaptureError, match=r"1.x of its arguments is on cpu, oth"):
            f(
                torch.ones(2, device="meta" if device == "cpu" else device),
                {"x": torch.ones(2, device="cpu")},
            )

    def test_values_that_are_no_tensors_are_kinds(self):
        f = jit.jit(lambda x, n: x * n, strict=True)
        for n in (2, 3) * CALLS:
            assert f(torch.ones(2), n).tolist() == [n, n]
        assert "2 of at most" in jit.describe(f)

    def test_none_and_words_are_values_as_any(self):
        f = jit.jit(lambda x, how=None: (x + 1, how, None), donate=(0,), strict=True)
        for i in range(CALLS):
            for how in (None, "so"):
                y, said, nothing = f(torch.full((1,), float(i)), how)
                assert (y.item(), said, nothing) == (i + 1, how, None)
        g = jit.jit(lambda s: {"a": s["a"] + 1, "n": None}, donate=(0,), strict=True)
        state = {"a": torch.zeros(1), "n": None}
        for _ in range(CALLS):
            state = g(state)
        assert state["a"].item() == CALLS

    def test_more_kinds_than_are_kept(self):
        lines: list[str] = []
        f = jit.jit(lambda x: x + 1, note=lines.append)
        for n in range(1, 25):
            for _ in range(4):
                assert f(torch.zeros(n)).tolist() == [1.0] * n
        assert len(lines) == 4 + 1
        assert "more than 4 kinds" in lines[-1]
        assert jit.describe(f).count("captured in") == 4

    def test_other_implementations_are_another_kind(self):
        f = jit.jit(lambda x, w: rms_norm(x, w, 1e-6), strict=True)
        x = random.normal(random.key(0, device=torch.get_default_device()), (4, 8))
        for _ in range(CALLS):
            f(x, torch.ones(8))
            with registry.use_impl(rms_norm="reference"):
                f(x, torch.ones(8))
        assert "2 of at most" in jit.describe(f)

    def test_a_gradient_from_outside_runs_as_it_is(self):
        f = jit.jit(lambda x: (x * x).sum(), strict=True)
        for _ in range(CALLS):
            x = torch.ones(2, requires_grad=True)
            assert torch.autograd.grad(f(x), x)[0].tolist() == [2.0, 2.0]
            assert torch.func.grad(f)(torch.ones(2)).tolist() == [2.0, 2.0]

    def test_no_successor(self):
        f = jit.jit(lambda x: x.sum(), donate=(0,), strict=True)
        f(torch.ones(2))
        f(torch.ones(2))
        with pytest.raises(jit.CaptureError, match=r"donate=\(0,\): the result has no item"):
            f(torch.ones(2))


def test_an_implementation_that_says_that_it_cannot(monkeypatch):
    op = registry.Op("planted", lambda x: x + 1)
    try:
        op.register(
            registry.Implementation(
                "fast", ("cpu", "cuda"), lambda x: x + 1, no_capture="it counts"
            )
        )
        f = jit.jit(op, strict=True)
        f(torch.ones(2))
        f(torch.ones(2))
        with pytest.raises(jit.CaptureError, match="operator planted, implementation fast: it co"):
            f(torch.ones(2))
    finally:
        del registry.OPS["planted"]


def breaks(state: State, x: Tensor, lr: Tensor):
    """Has no memory the third time, after it has written into the state."""
    COUNT[0] += 1
    result = descend(state, x, lr)
    if COUNT[0] == 3:
        raise torch.OutOfMemoryError("no memory")
    return result


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_that_breaks_off_changes_nothing(strict):
    COUNT[0] = 0
    lines: list[str] = []
    f = jit.jit(breaks, donate=(0,), strict=strict, note=lines.append)
    if not strict:
        assert same(run(f), run(descend))
        assert "OutOfMemoryError: no memory" in lines[0]
        return
    state, _ = run(f, 2)
    before = tree.map(torch.clone, state)
    with pytest.raises(jit.CaptureError, match=r"test_jit.py:\d+: OutOfMemoryError: no memory"):
        f(state, *inputs(2))
    assert same(state, before)


def test_a_jitted_function_inside_is_a_part():
    inner = jit.jit(lambda x: x + 1, strict=True)
    outer = jit.jit(lambda x: inner(x) * 2, strict=True)
    for i in range(CALLS):
        assert outer(torch.full((1,), float(i))).item() == 2 * (i + 1)
    assert "0 of at most" in jit.describe(inner)


def test_without_graphs_it_is_the_function(device):
    if device != "cpu":
        pytest.skip("a GPU has graphs")
    token = recorders.STAND_IN.set(None)
    try:
        f = jit.jit(reads, strict=True)
        for _ in range(CALLS):
            assert torch.equal(f(torch.ones(2)), reads(torch.ones(2)))
        assert "0 of at most" in jit.describe(f)
    finally:
        recorders.STAND_IN.reset(token)


def test_describe_of_another_function():
    with pytest.raises(ValueError, match="is not a function that jit gave"):
        jit.describe(reads)


@pytest.mark.cuda
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def only_there(self, device):
        if device == "cpu":
            pytest.skip("of the GPU")

    def test_nothing_leaks(self):
        f = jit.jit(descend, donate=(0,), strict=True)
        state, _ = run(f)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        x, lr = inputs(0)
        for _ in range(2000):
            state, numbers = f(state, x, lr)
        del numbers, x, lr
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 4096
        reserved = []
        for _ in range(20):
            f = jit.jit(descend, donate=(0,), strict=True)
            run(f)
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[-1] <= reserved[2]

    def test_a_wait_that_is_no_operator(self):
        def waits(x):
            y = x + 1
            torch.cuda.synchronize()
            return y * 2

        lines: list[str] = []
        f = jit.jit(waits, note=lines.append)
        for i in range(CALLS):
            assert f(torch.full((2,), float(i))).tolist() == [2.0 * (i + 1)] * 2
        assert len(lines) == 1
        # and the device is not left in a capture
        assert not torch.cuda.is_current_stream_capturing()
