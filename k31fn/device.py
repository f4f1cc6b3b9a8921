"""The only file that names a device: which ones there are, and what differs between them.

Everything else in k31fn takes a ``torch.device`` or follows the device of its inputs. ``torch_npu``
is imported here, and only when the device is an NPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "Branch",
    "PeakRates",
    "attach_thread",
    "default",
    "graphs",
    "keep_heap",
    "memory_allocated",
    "missing_operators",
    "name",
    "num_cores",
    "num_devices",
    "number",
    "of_rank",
    "parse",
    "peak_memory",
    "peak_rates",
    "process_group_backend",
    "reset_peak_memory",
    "synchronize",
]


def __dir__() -> list[str]:
    return __all__


# Beside the device's own, gloo: for what ranks agree on and exchange on the host, without waiting
# for the device.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}

_LOADING = threading.Lock()

# glibc's malloc.h, which Python has no names for
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


class PeakRates(NamedTuple):
    """Most that a device can do, measured, in SI units per second (FLOP/s of a bfloat16 matmul,
    bytes/s).
    """

    bf16_flops: float
    bytes: float


# By the name that the driver reports. Measured values only: add a line when you have measured a
# device.
_PEAK_RATES = {"NVIDIA H200": PeakRates(bf16_flops=790e12, bytes=4.3e12)}


def keep_heap(device: torch.device) -> None:
    """Lets the C allocator keep memory that tensors on the CPU freed, for the whole process;
    nothing for other devices.

    By default glibc gives each temporary of half a megabyte back to the system, and the next one
    faults its pages in again: 8 to 10% of the loss and gradient of configs/tiny.py (two paired
    runs, one thread, medians). Elsewhere than on glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if device.type == "cpu" and mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # never
        mallopt(_M_TOP_PAD, 2**26)
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes


def default() -> torch.device:
    """The best device of this machine: cuda, else npu, else cpu."""
    return torch.device(next(kind for kind in ("cuda", "npu", "cpu") if num_devices(kind)))


def parse(name: str) -> torch.device:
    """The device of a name: ``cpu``, ``cuda``, ``cuda:1``, ``npu:0``.

    Raises:
        ValueError: no such kind of device, or it is not on this machine.
    """
    kind, colon, index = name.partition(":")
    if kind not in _BACKENDS or (colon and not index.isdecimal()):
        raise ValueError(
            f"device={name!r} must be one of {list(_BACKENDS)}, with an index if need be: 'cuda:0'"
        )
    count = num_devices(kind)
    if not count or (colon and int(index) >= count):
        raise ValueError(
            f"device={name!r} is not on this machine ({count} of kind {kind!r}); use '{default()}'"
        )
    # for an NPU, torch knows the name since num_devices imported torch_npu
    return torch.device(name)


def of_rank(device: torch.device, local_rank: int) -> torch.device:
    """The device of one of this machine's processes, made the current one: ``cuda:3`` of ``cuda``;
    the CPU is shared.

    Raises:
        ValueError: ``device`` has an index already, or the machine has too few.
    """
    if device.type == "cpu":
        return device
    count = num_devices(device.type)
    if str(device) != device.type or local_rank >= count:
        raise ValueError(
            f"device='{device}' for process {local_rank} of this machine, which has {count} of "
            f"kind {device.type!r}: name the kind alone, and start at most {count} processes on it"
        )
    _module(device.type).set_device(local_rank)
    return torch.device(device.type, local_rank)


def attach_thread() -> None:
    """Makes this thread ready for a GPU that the process already uses; each of several threads
    calls it first.

    It is bound to the GPU's context: its first kernel would do that, but cuBLAS, if that comes
    first, warns. And the linear algebra for GPUs is there: torch loads it at the first call, and
    fails in a thread that calls meanwhile (pytorch/pytorch#90613).
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        with _LOADING:
            _load_linear_algebra()


@functools.cache
def _load_linear_algebra() -> None:
    one = torch.eye(1, device="cuda")
    torch.linalg.solve_triangular(one, one, upper=False)


def synchronize(device: torch.device) -> None:
    """Waits until all work queued on ``device`` is done; the CPU has no queue."""
    if device.type != "cpu":
        _module(device.type).synchronize(device)


def memory_allocated(device: torch.device) -> int:
    """Bytes held by tensors on ``device``; for the CPU the resident set of the process (outside
    Linux, its peak).
    """
    if device.type != "cpu":
        return _module(device.type).memory_allocated(device)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_memory(device)
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_memory(device: torch.device) -> int:
    """Most bytes held by tensors since :func:`reset_peak_memory`.

    For the CPU: the largest resident set in the life of the process, which includes code and the
    interpreter and cannot be reset. Measure a CPU peak in a fresh process.
    """
    if device.type != "cpu":
        return _module(device.type).max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of :func:`peak_memory`; nothing on the CPU, where the system keeps
    the peak.
    """
    if device.type != "cpu":
        _module(device.type).reset_peak_memory_stats(device)


def process_group_backend(device_type: str) -> str:
    """The ``backend`` for ``torch.distributed.init_process_group``.

    Raises:
        ValueError: no such kind of device.
    """
    if device_type not in _BACKENDS:
        raise ValueError(f"device_type={device_type!r} must be one of {list(_BACKENDS)}")
    return _BACKENDS[device_type]


def num_cores(device: torch.device) -> int:
    """Cores that run kernels side by side: the size of a persistent grid.

    CUDA: multiprocessors. NPU: cube cores (each has two vector cores beside it: a kernel of vector
    work only may start twice as many programs). CPU: cores that this process may use.
    """
    if device.type == "cpu":
        # a container may allow fewer cores than the machine has; macOS does not tell
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    properties = _module(device.type).get_device_properties(device)
    return properties.cube_core_num if device.type == "npu" else properties.multi_processor_count


def num_devices(kind: str) -> int:
    """Number of devices of a kind on this machine."""
    if kind == "cpu":
        return 1
    try:
        module = _module(kind)
    except ImportError:  # no torch_npu: a machine without NPUs
        return 0
    return module.device_count() if module.is_available() else 0


def number(value: float, device: torch.device) -> torch.Tensor:
    """A number that a step is given, as a scalar on the device: filled there, so that nobody waits.

    float64, in which a rate has the bits of the Python number; float32 on NPUs, which have no wider
    one that is fast.
    """
    dtype = torch.float32 if device.type == "npu" else torch.float64
    return torch.full((), value, dtype=dtype, device=device)


def missing_operators(*names: str) -> str:
    """``""`` if torch_npu is here and has these operators, else what is missing and how to get
    it.
    """
    try:
        import torch_npu  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "torch_npu is not installed (pip install 'k31fn[npu]', beside CANN)"
    except ImportError as e:
        return f"torch_npu cannot be loaded: {e}"
    absent = [name for name in names if not hasattr(torch.ops.npu, name)]
    if absent:
        return (
            f"torch_npu {torch_npu.__version__} has no operator {', '.join(absent)}; use a later "
            "one"
        )
    return ""


class Branch:
    """Work of a CUDA device that runs beside what is queued after it; on other devices in order.

    What is queued inside ``with branch`` waits for all that was queued before it, and for the
    branch's own work; :meth:`join` lets what follows wait for the branch. A graph that is recorded
    meanwhile has the two side by side. Tensors are made outside, so that their memory is given back
    behind the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = _side_stream(device) if device.type == "cuda" else None
        self._entered: Any = None

    def __enter__(self) -> None:
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
            self._entered = torch.cuda.stream(self._side)
            self._entered.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._side is not None:
            self._entered.__exit__(*exception)

    def join(self) -> None:
        """Lets what is queued from here on wait for the branch."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


_STREAMS = threading.local()  # ranks that are threads of one GPU do not wait for each other


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One of this thread, since making one costs more than a launch."""
    streams = _STREAMS.__dict__.setdefault("of", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def graphs(kind: str) -> tuple[Any, Callable[[], Any]] | None:
    """The module and the class that record a stream's work on that kind of device; None: it has
    none.
    """
    if kind == "cuda":
        return torch.cuda, torch.cuda.CUDAGraph
    if kind == "npu":
        module = _module(kind)
        return module, module.NPUGraph
    return None


def name(device: torch.device) -> str:
    """The driver's name of the device, such as ``NVIDIA H200``; ``cpu`` for the CPU."""
    return "cpu" if device.type == "cpu" else _module(device.type).get_device_name(device)


def peak_rates(device: torch.device) -> PeakRates | None:
    """Measured peak rates of ``device``; None if nobody has measured this kind: report no
    utilisation then.
    """
    if device.type == "cpu":
        return None
    return _PEAK_RATES.get(name(device))


def _module(kind: str) -> Any:
    """``torch.cuda`` or ``torch.npu``: the same functions under the same names."""
    if kind == "cuda":
        return torch.cuda
    if kind == "npu":
        # an optional package of one kind of machine
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu
    raise ValueError(f"device.type={kind!r} must be one of {list(_BACKENDS)}")
