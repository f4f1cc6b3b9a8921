"""The device functions on the CPU, with a stand-in for torch_npu, and on CUDA where there is
one.
"""

import concurrent.futures
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from k31fn import device

CPU = torch.device("cpu")


# With a stand-in for torch_npu that notes each call; in its own process, since torch renames a
# backend for good.
NPU = """
import sys, types, torch
from k31fn import device

class Npu:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda device: "Ascend910")
    get_device_properties = staticmethod(
        lambda device: types.SimpleNamespace(cube_core_num=24, vector_core_num=48)
    )
    def __getattr__(self, name):
        return lambda device: calls.append((name, str(device))) or 123

calls = []
assert "torch_npu" not in sys.modules  # importing k31fn leaves it alone
torch.utils.rename_privateuse1_backend("npu")
sys.modules["torch_npu"] = types.SimpleNamespace(npu=Npu())
torch.cuda.is_available = lambda: False

assert device.default() == torch.device("npu")
one = device.parse("npu:1")
assert one == torch.device("npu", 1)
try:
    device.parse("npu:2")
except ValueError as e:
    assert "device='npu:2' is not on this machine (2 of kind 'npu'); use 'npu'" in str(e), e
else:
    raise AssertionError("npu:2 was accepted")
device.synchronize(one)
device.reset_peak_memory(one)
assert device.memory_allocated(one) == device.peak_memory(one) == 123
names = ["synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"]
assert calls == [(n, "npu:1") for n in names], calls
assert device.num_cores(one) == 24
assert device.peak_rates(one) is None  # nobody has measured it
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
assert device.default() == torch.device("cuda")
"""


def test_npu_functions_go_to_torch_npu() -> None:
    environment = {**os.environ, "PYTHONPATH": ".", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", NPU], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def only_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # makes the import fail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("only_cpu")
def test_default_without_accelerator() -> None:
    assert device.default() == CPU
    assert device.parse("cpu") == CPU


@pytest.mark.usefixtures("only_cpu")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gpu",
            r"device='gpu' must be one of \['cpu', 'cuda', 'npu'\], with an index if need be: "
            r"'cuda:0'",
        ),
        ("cuda:", "device='cuda:' must be one of"),
        ("cuda:-1", "device='cuda:-1' must be one of"),
        ("", "device='' must be one of"),
        ("cuda", r"device='cuda' is not on this machine \(0 of kind 'cuda'\); use 'cpu'"),
        ("npu:0", r"device='npu:0' is not on this machine"),
        ("cpu:1", r"device='cpu:1' is not on this machine \(1 of kind 'cpu'\)"),
    ],
)
def test_parse_refuses(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        device.parse(name)


def test_process_group_backends() -> None:
    assert [device.process_group_backend(k) for k in ("cpu", "cuda", "npu")] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo,npu:hccl",
    ]
    with pytest.raises(
        ValueError, match=r"device_type='tpu' must be one of \['cpu', 'cuda', 'npu'\]"
    ):
        device.process_group_backend("tpu")


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.of_rank(torch.device("cpu"), 5) == torch.device("cpu")
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert device.of_rank(torch.device("cuda"), 3) == torch.device("cuda:3")
    assert current == [3]
    for name, rank in (("cuda", 4), ("cuda:1", 0)):
        with pytest.raises(
            ValueError,
            match=f"device='{name}' for process {rank} of this machine, which has 4 of kind",
        ):
            device.of_rank(torch.device(name), rank)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device.type='meta' must be one of"):
        device.synchronize(torch.device("meta"))


def test_cpu_memory_is_that_of_the_process() -> None:
    device.synchronize(CPU)
    before = device.memory_allocated(CPU)
    # mapped, not malloc's: a run in this process may have told that to keep what is freed
    held = mmap.mmap(-1, 64 << 20)
    for _ in range(64):
        held.write(b"\1" * 2**20)
    after = device.memory_allocated(CPU)
    assert after - before > 60 << 20
    cores = os.cpu_count() or 1
    # The peak sums three of the kernel's counters, each behind by a batch on each core; a batch
    # grows with the cores.
    uncounted = 3 * cores * max(32, 2 * cores) * 4096
    assert device.peak_memory(CPU) >= after - uncounted
    peak = device.peak_memory(CPU)
    held.close()
    device.reset_peak_memory(CPU)
    assert device.memory_allocated(CPU) < after - (60 << 20)
    assert device.peak_memory(CPU) >= peak


def test_cpu_cores_and_rates() -> None:
    assert 1 <= device.num_cores(CPU) <= (os.cpu_count() or 1)
    assert device.peak_rates(CPU) is None


def test_peak_rates_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    rates = device.peak_rates(torch.device("cuda", 0))
    assert rates == device.PeakRates(bf16_flops=790e12, bytes=4.3e12)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL"
    )  # other clocks: not measured
    assert device.peak_rates(torch.device("cuda", 0)) is None


def test_linear_algebra_is_loaded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch's loader, which fails in a thread that calls while another's first
    call loads.
    """
    loads: list[str] = []

    def solve(*args: object, **kwargs: object) -> None:
        loads.append(threading.current_thread().name)
        if len(loads) > 1:
            raise RuntimeError("lazy wrapper should be called at most once")
        time.sleep(0.05)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "eye", lambda n, device: torch.ones(n, n))
    monkeypatch.setattr(torch.linalg, "solve_triangular", solve)
    device._load_linear_algebra.cache_clear()
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: device.attach_thread(), range(8)))
    finally:
        device._load_linear_algebra.cache_clear()
    assert len(loads) == 1


FIRST_USE = """
import torch
from k31fn.parallel import Mesh, P, shard_map

def solve(axes, x):
    return torch.linalg.solve_triangular(x, x, upper=False)

eyes = torch.eye(5, device="cuda").expand(8, 5, 5)
found = shard_map(solve, Mesh(dp=8), (P("dp"),), P("dp"), backend="threads")(eyes)
assert torch.equal(found, eyes)
"""


@pytest.mark.cuda
def test_ranks_as_threads_use_linear_algebra_first() -> None:
    """In a process where nothing has called it yet."""
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=100)


@pytest.mark.cuda
def test_cuda() -> None:
    gpu = device.default()
    assert gpu.type == "cuda"
    assert device.parse("cuda:0").index == 0
    device.reset_peak_memory(gpu)
    before = device.memory_allocated(gpu)
    torch.ones(1 << 20, dtype=torch.uint8, device=gpu)
    device.synchronize(gpu)
    assert device.memory_allocated(gpu) == before
    assert device.peak_memory(gpu) >= before + (1 << 20)
    assert device.num_cores(gpu) > 1


def test_keep_heap_keeps_freed_memory():
    """A freed 20 MB block stays with the process; it went back to the system before."""
    code = (
        "import ctypes, resource, torch\n"
        "from k31fn import device\n"
        "device.keep_heap(torch.device('cpu'))\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "libc.free.argtypes = [ctypes.c_void_p]\n"
        "size = 20_000_000\n"
        "def fill():\n"
        "    block = libc.malloc(size)\n"
        "    ctypes.memset(block, 1, size)\n"
        "    libc.free(block)\n"
        "fill()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "fill()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    faults = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        assert int(faults) < 100  # of the 4883 pages


@pytest.mark.cuda
@pytest.mark.parametrize("recorded", [False, True])
def test_a_branch_waits_and_is_waited_for(recorded: bool):
    x = torch.zeros(2**24, device="cuda")
    before, after = torch.empty_like(x), torch.empty_like(x)

    def work():
        x.zero_()
        for _ in range(100):
            x.add_(1)
        branch = device.Branch(x.device)
        with branch:
            assert torch.cuda.current_stream() != stream
            for _ in range(100):
                before.copy_(x)
        branch.join()
        x.add_(1)
        after.copy_(before)

    stream = torch.cuda.current_stream()
    work()
    if recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            work()
        before.zero_()
        graph.replay()
    assert (before == 100).all()
    assert (after == 100).all()
    assert (x == 101).all()


def test_a_branch_of_a_cpu_is_in_order():
    done = []
    branch = device.Branch(torch.device("cpu"))
    done.append("before")
    with branch:
        done.append("inside")
    branch.join()
    assert done == ["before", "inside"]
