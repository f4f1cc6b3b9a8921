"""What a run says about operators that run by their references."""

import torch

from k31fn.kernels.reference_calls import ReferenceCalls
from k31fn.kernels.registry import OPS, Implementation, Op, use_impl, watch_calls


def test_operator_shape_and_reason(monkeypatch):
    monkeypatch.setattr("k31fn.kernels.registry.OPS", dict(OPS))
    bare = Op("bare_of_test", lambda x: x)
    fused = Op("fused_of_test", lambda x: x)
    fused.register(Implementation("quick", ("cpu",), lambda x: x, dtypes=(torch.float32,)))
    asked = Op("asked_of_test", lambda x: x)
    asked.register(Implementation("quick", (), lambda x: x, on_request=("cpu",)))
    calls = ReferenceCalls()
    with watch_calls(calls):
        for _ in range(2):
            bare(torch.ones(2, 3))
        fused(torch.ones(4))
        asked(torch.ones(5))
        assert calls.lines() == [
            "bare_of_test runs by its reference, 2 calls, the first of [2, 3]: nothing else is "
            "written for cpu",
            "asked_of_test runs by its reference, 1 call, the first of [5]: quick: on request, "
            "--kernels asked_of_test:quick",
        ]
        fused(torch.ones(4, dtype=torch.float64))
        with use_impl(asked_of_test="quick"):
            asked(torch.ones(5))
    assert calls.lines()[1].startswith("asked_of_test runs by its reference, 1 call,")
    assert calls.lines()[2] == (
        "fused_of_test runs by its reference, 1 call, the first of [4]: quick: it computes "
        "torch.float32, got torch.float64"
    )
