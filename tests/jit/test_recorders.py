"""The adapter of graphs over a stand-in for a device's module: what it calls, in which order.

CUDA's and torch_npu's modules have these names; torch_npu's was never run.
"""

import contextlib
import warnings

import pytest
import torch

from k31fn import device as devices
from k31fn.jit import recorders
from k31fn.jit.watch import Watch


class Module:
    """``torch.npu``, as far as a recorder knows it."""

    def __init__(self):
        self.calls = []
        self.mode = 0
        self.reserved = 100

    class Stream:
        def wait_stream(self, other):
            pass

    def __getattr__(self, name):
        return lambda *a: self.calls.append(name)

    def current_stream(self):
        return self.Stream()

    def current_device(self):
        return 0

    def device(self, index):
        return contextlib.nullcontext()

    def memory_reserved(self):
        return self.reserved

    def stream(self, stream):
        return contextlib.nullcontext()

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode

    def NPUGraph(self):
        module = self

        class Graph:
            def capture_begin(self, *, pool, capture_error_mode):
                module.calls.append(f"begin {pool} {capture_error_mode}")

            def capture_end(self):
                module.reserved += 50
                module.calls.append("end")

            def pool(self):
                return "pool"

            def replay(self):
                module.calls.append("replay")

        return Graph()


@pytest.fixture
def module(monkeypatch):
    module = Module()
    monkeypatch.setattr(devices, "_module", lambda kind: module)
    return module


def recorder():
    found = recorders.recorder_of("npu")
    assert found is not None
    return found


def test_records_and_launches(module):
    npu = recorder()
    recording = npu.record(lambda: module.calls.append("run"), [])
    recording.replay()
    before = ["synchronize", "empty_cache"]
    first = [*before, "begin None thread_local", "run", "end", "replay"]
    assert module.calls == first
    assert recording.nbytes == 50
    # a second one shares the pool of the first
    npu.record(lambda: None, [])
    assert module.calls == [*first, *before, "begin pool thread_local", "end"]


def test_a_capture_that_breaks_off_is_ended(module):
    def breaks():
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        recorder().record(breaks, [])
    assert module.calls[-1] == "end"


def test_the_device_tells_what_waits(module):
    watch = Watch("cpu", [])
    with recorder().watching(watch), watch:
        torch.ones(2)
        warnings.warn("called a synchronizing operation", stacklevel=1)
        assert module.mode == "warn"
    assert module.mode == 0
    (reason,) = watch.reasons
    assert reason.startswith("tests/jit/test_recorders.py:")
    assert reason.endswith("aten.ones.default makes the host wait")


def test_no_graphs():
    assert recorders.recorder_of("cpu") is None
    assert recorders.recorder_of("meta") is None
