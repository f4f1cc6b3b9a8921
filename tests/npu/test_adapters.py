"""Adapters of torch_npu's operators, over stand-ins: values, gradients, shapes, and what they
refuse.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from k31fn import autodiff, device, tree
from k31fn.kernels.experts import sort_by_expert
from k31fn.kernels.registry import OPS, load_all, use_impl
from k31fn.precision import upcast
from tests.npu.fake_torch_npu import OPERATORS, install

BF16, F32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """``module`` of the adapter, arguments of the op, and a tolerance relative to the largest
    element.
    """

    module: str
    args: Callable[[torch.dtype], tuple[Any, ...]]
    dtypes: tuple[torch.dtype, ...]
    operators: tuple[str, ...]


def norm(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(2, 5, 12).to(dtype), 1 + torch.randn(12) / 3, 1e-5


def gated(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8).to(dtype), 1 + torch.randn(8) / 3, 1e-5


def products(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(12, 6).to(dtype), torch.randn(4, 6, 5).to(dtype), torch.tensor([5, 0, 4, 3])


def routed(dtype: torch.dtype) -> tuple[Any, ...]:
    p = sort_by_expert(torch.rand(7, 5).argsort(1)[:, :3], 5)
    return torch.randn(7, 6).to(dtype), p.order, p.inverse


def joined(dtype: torch.dtype) -> tuple[Any, ...]:
    _, order, inverse = routed(dtype)
    return torch.randn(21, 6).to(dtype), torch.rand(7, 3).to(dtype), order, inverse


def attended(dtype: torch.dtype, heads: int = 4) -> tuple[Any, ...]:
    """Documents of 5, 3 and 1 tokens and two of padding; one of 11."""
    start = torch.tensor([[0, 0, 0, 0, 0, 5, 5, 5, 8, 9, 9], [0] * 11])
    stop = torch.arange(1, 12).repeat(2, 1)
    stop[0, 9:] = 9
    q, k, v = torch.randn(2, 11, 4, 6), torch.randn(2, 11, heads, 4), torch.randn(2, 11, heads, 5)
    return *(x.to(dtype) for x in (q, k, torch.randn(2, 11, 2), v)), start, stop, 0.6


def pictured(dtype: torch.dtype) -> tuple[Any, ...]:
    """Images of 4 and 5 patches and two of padding; one of 11."""
    start = torch.tensor([[0] * 4 + [4] * 5 + [9] * 2, [0] * 11])
    stop = torch.tensor([[4] * 4 + [9] * 7, [11] * 11])
    q, k, v = (torch.randn(2, 11, 4, d).to(dtype) for d in (6, 6, 5))
    return q, k, v, start, stop, 0.6


def streams(dtype: torch.dtype) -> tuple[Any, ...]:
    n, width = 4, 10
    phi = torch.randn(n * width, 24) / (n * width) ** 0.5
    return torch.randn(2, 3, n, width).to(dtype), phi, torch.randn(3), torch.randn(24), 1e-6, 7


def updated(dtype: torch.dtype) -> tuple[Any, ...]:
    return (
        torch.randn(2, 3, 4, 10).to(dtype),
        torch.randn(2, 3, 10).to(dtype),
        torch.rand(2, 3, 4),
        torch.rand(2, 3, 4, 4),
    )


BOTH = (F32, BF16)
FLASH = ("npu_fusion_attention", "npu_fusion_attention_grad")
RMS = ("npu_rms_norm", "npu_rms_norm_backward")
SINKHORN = ("npu_mhc_sinkhorn", "npu_mhc_sinkhorn_backward")
CASES = {
    "rms_norm": Case("norm", norm, BOTH, RMS),
    "gated_norm": Case("gated_norm", gated, BOTH, RMS),
    "grouped_matmul": Case("experts", products, BOTH, ("npu_grouped_matmul",)),
    "dispatch": Case("experts", routed, BOTH, ("npu_moe_token_permute_grad_v2",)),
    "combine": Case(
        "experts", joined, BOTH, ("npu_moe_token_unpermute", "npu_moe_token_unpermute_grad")
    ),
    "attention": Case("attention", attended, BOTH, FLASH),
    "interval_attention": Case("interval_attention", pictured, BOTH, FLASH),
    "mhc_pre": Case(
        "mhc_pre", streams, (BF16,), ("npu_mhc_pre", "npu_mhc_pre_backward", *SINKHORN)
    ),
    "mhc_post": Case("mhc_post", updated, (BF16,), ("npu_mhc_post", "npu_mhc_post_backward")),
}
EACH = [(op, dtype) for op, case in CASES.items() for dtype in case.dtypes]
TOLERANCE = {F32: 1e-5, BF16: 2**-6}  # sums of some 100 products; two roundings to bfloat16


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = install()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def adapter(op: str) -> types.ModuleType:
    return importlib.import_module(f"k31fn.kernels.{CASES[op].module}.npu")


def results(
    f: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Value and gradients of all floating arguments, for cotangents that are exact in bfloat16."""
    values, structure = tree.flatten(args)
    index = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]

    def call(*leaves: Tensor) -> Any:
        given = list(values)
        for i, leaf in zip(index, leaves, strict=True):
            given[i] = leaf
        return f(*tree.unflatten(structure, given))

    out, pull = autodiff.vjp(
        call, *[values[i] if dtype is None else values[i].to(dtype) for i in index]
    )
    cts = tree.map(
        lambda y: torch.linspace(-1, 1, y.numel()).view(y.shape).to(BF16).to(y.dtype), out
    )
    return [*tree.leaves(out), *pull(cts)]


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    pairs = list(zip(ours, exact, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("op", "dtype"), EACH)
def test_values_and_gradients_equal_the_references(op: str, dtype: torch.dtype):
    args = CASES[op].args(dtype)
    ours = results(getattr(adapter(op), op), args)
    assert error(ours, results(OPS[op].reference, args, torch.float64)) < TOLERANCE[dtype]
    expected = results(OPS[op].reference, args)
    assert [(a.shape, a.dtype) for a in ours] == [(b.shape, b.dtype) for b in expected]


def sliced(args: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """Attention of a slice of the queries, as under context parallelism."""
    return args[0][:, part], *args[1:4], args[4][:, part], args[5][:, part], args[6]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: attended(F32, heads=1),
        lambda: sliced(attended(F32), slice(3, 7)),
        lambda: sliced(attended(F32), slice(6, 11)),
        lambda: sliced(attended(F32), slice(10, 11)),
    ],
    ids=["one head of keys", "a slice", "a slice with padding", "one token"],
)
def test_attention_of_other_shapes(changed: Callable[[], tuple[Any, ...]]):
    args = changed()
    ours = results(adapter("attention").attention, args)
    assert error(ours, results(OPS["attention"].reference, args, torch.float64)) < TOLERANCE[F32]


@pytest.mark.parametrize(("op", "dtype"), EACH)
def test_shapes_under_fake_tensors_are_those_of_values(
    op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    args = CASES[op].args(dtype)
    real = results(getattr(adapter(op), op), args)
    if "attention" in op:  # reads the documents on the host
        packing = adapter(op).pack(*args[-3:-1], args[1].shape[1], causal=op == "attention")
        monkeypatch.setattr(adapter(op), "pack", lambda *_, **__: packing)
    with FakeTensorMode() as mode:
        faked = tree.map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, args)
        fake = results(getattr(adapter(op), op), faked)
    assert [(a.shape, a.dtype) for a in fake] == [(b.shape, b.dtype) for b in real]


class Watched:
    """The stand-in with every call counted, and one operator's tensors ``i`` and ``j``
    exchanged.
    """

    def __init__(
        self, module: types.ModuleType, operator: str = "", i: int = 0, j: int = 0
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.tensors: dict[str, list[Tensor]] = {}
        self.npu, self._module, self._swap = module.npu, module, (operator, i, j)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator, i, j = self._swap

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            values, structure = tree.flatten((args, kwargs), allow_none=True)
            index = [n for n, v in enumerate(values) if isinstance(v, Tensor)]
            self.tensors[name] = [values[n] for n in index]
            if name == operator:
                a, b = index[i], index[j]
                values[a], values[b] = values[b], values[a]
            args, kwargs = tree.unflatten(structure, values)
            return getattr(self._module, name)(*args, **kwargs)

        return call


@pytest.mark.parametrize("op", CASES)
def test_arguments_in_another_order_are_noticed(
    op: str, torch_npu: types.ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """Each two tensors of one operator exchanged: refused, or other numbers."""
    args, module = CASES[op].args(CASES[op].dtypes[0]), adapter(op)
    exact = results(OPS[op].reference, args, torch.float64)

    def run(watched: Watched) -> float:
        caller = adapter("attention") if op == "interval_attention" else module
        monkeypatch.setattr(caller, "torch_npu", watched)
        return error(results(getattr(module, op), args), exact)

    watched = Watched(torch_npu)
    good = run(watched)
    assert set(watched.calls) == set(CASES[op].operators)
    exchanged = 0
    for name, tensors in watched.tensors.items():
        for i, j in itertools.combinations(range(len(tensors)), 2):
            if tensors[i].shape == tensors[j].shape and torch.equal(tensors[i], tensors[j]):
                continue
            exchanged += 1
            try:
                assert not run(Watched(torch_npu, name, i, j)) <= 1.5 * good, (name, i, j)
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
    assert exchanged > 0


def test_a_wrong_name_or_number_of_arguments_is_refused(torch_npu: types.ModuleType):
    x, w = torch.randn(2, 4), torch.randn(4)
    torch_npu.npu_rms_norm(x, w, epsilon=1e-5)
    for call in (
        lambda: torch_npu.npu_rms_norm(x, w, eps=1e-5),
        lambda: torch_npu.npu_rms_norm(x),
        lambda: torch_npu.npu_rms_norm(x, 1e-5, w),
        lambda: torch_npu.npu_rms_norm_backward(x, x, w),
        lambda: torch_npu.npu_grouped_matmul(x, [w]),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            call()


def test_every_adapter_and_every_operator_is_in_a_case():
    load_all()
    adapted = {op.name for op in OPS.values() if "npu" in op.implementations}
    assert adapted == set(CASES)
    bound = {name for case in CASES.values() for name in case.operators}
    assert bound == {line.partition("(")[0] for line in OPERATORS.read_text().splitlines()}


@pytest.mark.parametrize("op", CASES)
def test_a_second_derivative_is_refused(op: str):
    args = CASES[op].args(CASES[op].dtypes[0])

    def first(x: Tensor) -> Tensor:
        return torch.func.grad(
            lambda x: upcast(tree.leaves(getattr(adapter(op), op)(x, *args[1:]))[0]).square().sum()
        )(x)

    assert first(args[0]).shape == args[0].shape
    with pytest.raises(RuntimeError, match=r"\(npu\) is first order only"):
        torch.func.grad(lambda x: upcast(first(x)).sum())(args[0])


@pytest.mark.parametrize("wrap", [lambda f: f, autodiff.remat], ids=["plain", "remat"])
def test_a_frozen_weight_costs_no_product(
    wrap: Any, torch_npu: types.ModuleType, monkeypatch: pytest.MonkeyPatch
):
    rows, w, sizes = products(F32)
    watched = Watched(torch_npu)
    monkeypatch.setattr(adapter("grouped_matmul"), "torch_npu", watched)
    f = wrap(lambda rows, w: adapter("grouped_matmul").grouped_matmul(rows, w, sizes).sum())
    for wanted, backward in ((0,), 1), ((1,), 1), ((0, 1), 2):
        watched.calls.clear()
        autodiff.value_and_grad(f, wanted)(rows, w)
        assert watched.calls["npu_grouped_matmul"] == 1 + backward + (wrap is autodiff.remat)


def test_sequences_on_the_host():
    pack = adapter("attention").pack
    start, stop = attended(F32)[4:6]
    assert pack(start, stop, 11, causal=True) == ((5, 8, 9, 11, 22), (5, 8, 9, 11, 22), (), True)
    query_ends, key_ends, keys, _ = pack(start[:, 3:7], stop[:, 3:7], 11, causal=True)
    assert (query_ends, key_ends) == ((2, 4, 8), (5, 7, 14))
    assert keys.tolist() == [0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16, 17]
    alone = torch.arange(1025)[None]
    with pytest.raises(ValueError, match="1025 documents or images in a batch, at most 1024"):
        pack(alone, alone + 1, 1025, causal=False)
    start, stop = pictured(F32)[3:5]
    assert pack(start, stop, 11, causal=False) == ((4, 9, 11, 22), (4, 9, 11, 22), (), False)


def change(args: tuple[Any, ...], **by_place: Any) -> tuple[Any, ...]:
    return tuple(by_place.get(f"a{i}", a) for i, a in enumerate(args))


REFUSED = {
    "among the keys": ("attention", lambda a: change(a, a1=a[1][:, :3])),
    "one dtype, got": ("attention", lambda a: change(a, a3=a[3].bfloat16())),
    "wider than keys": ("attention", lambda a: change(a, a3=torch.randn(2, 11, 4, 7))),
    "at most 256 heads": ("attention", lambda a: change(a, a0=torch.randn(2, 11, 260, 6))),
    "of one dtype": ("grouped_matmul", lambda a: change(a, a1=a[1].bfloat16())),
    "at most 1024 experts": ("grouped_matmul", lambda a: change(a, a1=torch.randn(1025, 6, 5))),
    "round the weights": ("combine", lambda a: change(a, a1=a[1].double())),
    r"takes \(4, 6, 8\) streams": ("mhc_pre", lambda a: change(a, a0=torch.randn(2, 3, 2, 10))),
    "1 to 100 iterations": ("mhc_pre", lambda a: change(a, a5=101)),
    r"\(4, 6, 8\) streams, got 2": ("mhc_post", lambda a: change(a, a0=torch.randn(2, 3, 2, 10))),
    "no empty tensor": ("rms_norm", lambda a: change(a, a0=a[0][:0])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_an_adapter_cannot_do_is_said(reason: str):
    op, changed = REFUSED[reason]
    accepts = getattr(adapter(op), f"{op}_accepts")
    args = CASES[op].args(CASES[op].dtypes[0])
    assert accepts(*args) == ""
    assert re.search(reason, accepts(*changed(args)))


def test_another_chip_has_no_mhc(torch_npu: types.ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        torch_npu, "npu", types.SimpleNamespace(get_device_name=lambda: "Ascend910B3")
    )
    for op in ("mhc_pre", "mhc_post"):
        monkeypatch.setattr(adapter(op), "torch_npu", torch_npu)
        assert "this is Ascend910B3" in getattr(adapter(op), f"{op}_accepts")(*CASES[op].args(BF16))


def test_what_does_not_keep_to_a_contract_is_refused_with_the_reason():
    x = torch.randn(3, 5)
    with (
        pytest.raises(
            ValueError, match="'npu_moe_gating_top_k' was asked for but cannot run: it runs on npu"
        ),
        use_impl(topk="npu_moe_gating_top_k"),
    ):
        OPS["topk"](x, 2)
    assert "not documented" in OPS["topk"].implementations["npu_moe_gating_top_k"].missing()


def test_an_older_torch_npu_is_told_apart():
    assert device.missing_operators("npu_rms_norm") == ""
    assert (
        device.missing_operators("npu_rms_norm", "npu_kda")
        == "torch_npu 2.13.0 has no operator npu_kda; use a later one"
    )
