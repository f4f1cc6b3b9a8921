from __future__ import annotations

import contextvars
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from k31fn import autodiff, device, kernels
from k31fn.kernels.__main__ import _table
from k31fn.kernels.__main__ import main as kernels_main
from k31fn.kernels.launch import missing_triton
from k31fn.kernels.registry import OPS, Implementation, Op, load_all, record_impls, use_impl


def scale(x: Tensor, by: float = 1.0, *, parts: Any = ()) -> Tensor:
    """``x`` times ``by``."""
    return x * by


def implementation(
    name: str, factor: float, devices: tuple[str, ...] = ("cpu",), reason: str = ""
) -> Implementation:
    """One that computes something else, so that a value shows which one ran; refuses ``by=0`` with
    ``reason``.
    """
    return Implementation(
        name,
        devices,
        lambda x, by=1.0, *, parts=(): x * by * factor,
        lambda x, by=1.0, *, parts=(): reason * (by == 0),
    )


@pytest.fixture
def op() -> Iterator[Op]:
    op = Op("registry_scale", scale)
    yield op
    del OPS["registry_scale"]


X = torch.ones(2)


def ran(op: Op, *args: Any, **kwargs: Any) -> str:
    with record_impls() as counts:
        op(*args, **kwargs)
    ((_, name),) = counts
    return name


def test_without_an_implementation_the_reference_runs(op: Op):
    assert ran(op, X) == "reference"
    assert torch.equal(op(X, 3.0), 3 * X)
    assert op.__doc__ == scale.__doc__


def test_the_first_implementation_that_accepts_runs(op: Op):
    op.register(implementation("first", 2.0, reason="by is zero"))
    op.register(implementation("second", 3.0))
    assert ran(op, X) == "first"
    assert ran(op, X, 0.0) == "second"
    assert torch.equal(op(X), 2 * X)


def test_the_reference_runs_where_nothing_is_registered(op: Op):
    op.register(implementation("elsewhere", 3.0, devices=("npu",)))
    op.register(dataclasses.replace(implementation("narrow", 2.0), dtypes=(torch.bfloat16,)))
    assert ran(op, X) == "reference"
    assert ran(op, X.bfloat16()) == "narrow"
    with (
        use_impl(registry_scale="narrow"),
        pytest.raises(ValueError, match=r"computes torch.bfloat16, got torch.floa"),
    ):
        op(X)


def test_a_device_with_an_implementation_never_falls_back(op: Op):
    """It raises, with every reason, and says how to run the reference."""
    op.register(implementation("first", 2.0, reason="by is zero"))
    op.register(implementation("elsewhere", 3.0, devices=("npu",)))
    op.register(
        dataclasses.replace(implementation("uninstalled", 3.0), missing=lambda: "no such package")
    )
    with (
        record_impls() as counts,
        pytest.raises(ValueError, match=r"on cpu: no implementation can run") as e,
    ):
        op(X, 0.0)
    assert not counts
    for part in (
        "first: by is zero",
        "uninstalled: no such package",
        "use_impl(registry_scale='reference')",
    ):
        assert part in str(e.value)
    with use_impl(registry_scale="reference"):
        assert ran(op, X, 0.0) == "reference"


def test_the_reference_runs_under_vmap_where_an_implementation_has_declared_that_it_cannot(op: Op):
    op.register(
        dataclasses.replace(implementation("unbatched", 2.0), no_vmap="it reads values on the host")
    )
    with record_impls() as counts:
        assert torch.equal(vmap(op)(torch.ones(3, 2)), torch.ones(3, 2))
        vmap(lambda _: op(X))(torch.ones(3))  # none of its arguments is batched
    assert counts == {("registry_scale", "reference"): 1, ("registry_scale", "unbatched"): 1}
    with (
        use_impl(registry_scale="unbatched"),
        pytest.raises(ValueError, match="cannot run: it reads values on the h"),
    ):
        vmap(op)(torch.ones(3, 2))
    op.register(implementation("second", 3.0))
    assert torch.equal(vmap(op)(torch.ones(3, 2)), torch.full((3, 2), 3.0))


def test_on_request_only(op: Op):
    op.register(
        dataclasses.replace(implementation("slow", 2.0, devices=("npu",)), on_request=("cpu",))
    )
    assert ran(op, X) == "reference"
    with use_impl(registry_scale="slow"):
        assert ran(op, X) == "slow"
    assert op.refusal("slow", X) == ""
    assert op.refusal("slow", X.to("meta")) == "it runs on npu, cpu, the arguments are on meta"


def test_by_default_for_some_of_its_dtypes(op: Op):
    dtypes = (torch.float32, torch.float64)
    some = implementation("some", 2.0)
    op.register(dataclasses.replace(some, dtypes=dtypes, by_default=(torch.float64,)))
    assert ran(op, X.double()) == "some"
    assert ran(op, X.float()) == "reference"
    with use_impl(registry_scale="some"):
        assert ran(op, X.float()) == "some"
    state = "default for float64, on request for float32"
    assert ("registry_scale", "some", "cpu", state, "") in _table("cpu")


def test_a_fused_implementation_is_first_order_and_says_what_is_not(op: Op):
    fused = autodiff.custom_vjp(
        lambda x: (2 * x, ()), lambda _, ct: (2 * ct.detach(),), opaque=True, name="fused scale"
    )
    op.register(Implementation("fused", ("cpu",), fused))
    assert torch.equal(grad(lambda x: op(x).sum())(X), 2 * X)
    assert torch.equal(
        grad(autodiff.remat(lambda x: op(x).sum()))(X), 2 * X
    )  # first order, though two levels deep
    with pytest.raises(
        RuntimeError, match=r"fused scale is first order only.*reference implementation"
    ):
        grad(lambda x: grad(lambda x: op(x).square().sum())(x).sum())(X)


def test_the_table_says_what_runs_here_and_why_the_rest_does_not():
    lines = subprocess.run(
        [sys.executable, "-m", "k31fn.kernels", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    rows = {tuple(line.split()[:2]): line for line in lines}
    assert "default" in rows["kda", "reference"]
    assert "default" in rows["grouped_matmul", "ragged"]
    assert "on request" in rows["grouped_matmul", "buckets"]
    assert "runs on cuda" in rows["grouped_matmul", "grouped_mm"]
    packages = {p.parent.name for p in Path(kernels.__file__).parent.glob("*/reference.py")}
    assert len(rows) >= len(packages) >= 15


def test_an_op_is_chosen_before_its_package_is_imported():
    begin = "from k31fn.kernels.registry import OPS, use_impl"
    program = f"{begin}\nassert 'kda' not in OPS\nwith use_impl(kda='reference'): pass"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_of_a_device_that_is_not_here_the_table_says_so(monkeypatch: pytest.MonkeyPatch, capsys):
    for here, first in ((0, "no npu device on this machine; what would run"), (1, "op ")):
        monkeypatch.setattr(device, "num_devices", lambda kind, n=here: n if kind == "npu" else 1)
        monkeypatch.setattr(sys, "argv", ["k31fn.kernels", "--device", "npu"])
        kernels_main()
        assert capsys.readouterr().out.startswith(first)


def test_the_table_has_the_adapters_and_why_they_do_not_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # makes the import fail
    load_all()
    here, there = ({row[:2]: row[3] for row in _table(kind)} for kind in ("cpu", "npu"))
    for op in (
        "rms_norm",
        "gated_norm",
        "attention",
        "interval_attention",
        "grouped_matmul",
        "combine",
        "mhc_pre",
    ):
        assert there[op, "npu"].startswith("no: torch_npu is not installed")
        assert here[op, "npu"].startswith("no: it runs on npu; torch_npu is not installed")
    assert (
        there["topk", "npu_moe_gating_top_k"]
        == "no: which of equal scores it takes is not documented"
    )
    assert there["attention", "reference"] == "default for other dtypes"  # of these a call raises
    assert there["topk", "reference"] == "default"
    assert there["grouped_matmul", "ragged"] == "default"
    assert there["grouped_matmul", "reference"] == "on request"
    captured = {row[:2]: row[4] for row in _table("npu")}
    reads = "the number of rows per expert is read on the host"
    assert captured["grouped_matmul", "ragged"] == captured["grouped_matmul", "buckets"] == reads
    assert captured["attention", "npu"].startswith("CANN's operator takes the lengths")
    assert not captured["rms_norm", "npu"]
    monkeypatch.setattr(device, "missing_operators", lambda *_: "")
    found = {row[:2]: row[3] for row in _table("npu")}
    assert found["rms_norm", "npu"] == "default for bfloat16, float32"
    if not missing_triton():
        assert found["mhc_pre", "npu"] == "also for bfloat16"
    assert found["combine", "npu"] == "on request"


def test_the_device_is_that_of_the_first_tensor_wherever_it_is(op: Op):
    op.register(implementation("meta only", 2.0, devices=("meta",)))
    meta = torch.ones(2, device="meta")
    assert ran(op, meta) == "meta only"
    assert ran(op, x=meta) == "meta only"
    assert ran(op, X, parts=[{"k": meta}]) == "reference"
    listed = Op("registry_sum", lambda xs: xs[0])
    listed.register(Implementation("meta only", ("meta",), lambda xs: xs[0], lambda xs: ""))
    try:
        assert ran(listed, [meta]) == "meta only"
        assert ran(listed, [X]) == "reference"
    finally:
        del OPS["registry_sum"]


def test_an_implementation_that_is_asked_for_runs_or_says_why_not(op: Op):
    op.register(implementation("first", 2.0))
    op.register(implementation("second", 3.0, reason="by is zero"))
    op.register(implementation("elsewhere", 4.0, devices=("cuda", "npu")))
    with use_impl(registry_scale="second"):
        assert ran(op, X) == "second"
        with pytest.raises(
            ValueError, match=r"'registry_scale': implementation 'second'.*cannot run: by is zero"
        ):
            op(X, 0.0)
    with (
        use_impl(registry_scale="elsewhere"),
        pytest.raises(
            ValueError, match="cannot run: it runs on cuda, npu, the arguments are on cpu"
        ),
    ):
        op(X)
    with use_impl(registry_scale="reference"):
        assert ran(op, X) == "reference"
    assert ran(op, X) == "first"


def test_choices_nest_and_end_with_their_block(op: Op):
    op.register(implementation("first", 2.0))

    def fail() -> None:
        with use_impl(registry_scale="first"):
            assert ran(op, X) == "first"
            raise ZeroDivisionError

    with use_impl(registry_scale="reference"):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert ran(op, X) == "reference"


def test_unknown_names_are_refused_with_the_known_ones(op: Op):
    op.register(implementation("first", 2.0))
    with (
        pytest.raises(ValueError, match=r"unknown op 'no_such_op'; known: .*registry_scale"),
        use_impl(no_such_op="x"),
    ):
        pass
    with (
        pytest.raises(
            ValueError,
            match="'registry_scale' has no implementation 'triton'; known: reference, first",
        ),
        use_impl(registry_scale="triton"),
    ):
        pass


def test_names_are_unique(op: Op):
    op.register(implementation("first", 2.0))
    for name in ("first", "reference"):
        with pytest.raises(ValueError, match=f"has an implementation '{name}' already"):
            op.register(implementation(name, 2.0))
    with pytest.raises(ValueError, match="'registry_scale' exists already"):
        Op("registry_scale", scale)


def test_every_call_is_counted_once_in_every_record(op: Op):
    op.register(implementation("first", 2.0))
    with record_impls() as outer:
        op(X)
        with record_impls() as inner:
            op(X)
            with use_impl(registry_scale="reference"):
                op(X)
        op(X)
    assert inner == {("registry_scale", "first"): 1, ("registry_scale", "reference"): 1}
    assert outer == {("registry_scale", "first"): 3, ("registry_scale", "reference"): 1}
    op(X)
    assert sum(outer.values()) == 4


def test_a_refused_call_is_not_counted(op: Op):
    op.register(implementation("first", 2.0, reason="by is zero"))
    with (
        record_impls() as counts,
        use_impl(registry_scale="first"),
        pytest.raises(ValueError, match="cannot run"),
    ):
        op(X, 0.0)
    assert not counts


def test_replays_are_counted_also_after_the_block(op: Op):
    x = torch.ones(2)
    with record_impls() as counts:
        value, pull = autodiff.vjp(autodiff.remat(lambda x: op(x).sum()), x)
    pull(torch.ones_like(value))
    assert counts == {("registry_scale", "reference"): 2}


def test_ops_under_reverse_mode_transforms(op: Op):
    op.register(implementation("first", 2.0))
    with record_impls() as counts:
        assert torch.equal(
            vmap(grad(lambda x: op(x).sum()))(torch.ones(3, 2)), torch.full((3, 2), 2.0)
        )
    assert counts == {("registry_scale", "first"): 1}


@pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.script:DeprecationWarning"
)  # torch's own first use of jvp
def test_forward_mode_is_refused_whatever_would_run(op: Op):
    for impl in ("reference", "first"):
        for forward in (
            lambda: torch.func.jvp(op, (X,), (X,)),
            lambda: torch.func.jacfwd(op)(X),
            lambda: torch.func.hessian(lambda x: op(x).sum())(X),
        ):
            with pytest.raises(
                RuntimeError, match=r"op 'registry_scale' under forward-mode.*reverse-mode only"
            ):
                forward()
        if impl == "reference":
            op.register(implementation("first", 2.0))


def test_another_thread_starts_from_the_defaults_and_may_be_given_the_context(op: Op):
    op.register(implementation("first", 2.0))
    seen: list[float] = []
    with use_impl(registry_scale="reference"):
        context = contextvars.copy_context()
        for run in (lambda f: f(), context.run):
            thread = threading.Thread(target=run, args=(lambda: seen.append(float(op(X)[0])),))
            thread.start()
            thread.join()
    assert seen == [2.0, 1.0]
