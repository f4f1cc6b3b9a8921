"""The intervals of a profile."""

import pytest

from benchmarks.meshes.exposed import measure


def kernel(name, begin, end, cat="kernel", **more):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": float(begin),
        "dur": float(end - begin),
        **more,
    }


def test_what_no_other_kernel_hides():
    trace = {
        "traceEvents": [
            kernel("gemm", 0, 100),
            kernel("gemm", 90, 120),  # on another stream
            kernel("Memcpy DtoD", 200, 250, cat="gpu_memcpy"),
            kernel(
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50, 130
            ),  # 10 behind
            kernel(
                "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 125, 145
            ),  # 20 alone, 5 beside the gather
            kernel("ncclDevKernel_SendRecv", 190, 260),  # 10 before, 10 behind
            kernel("cudaLaunchKernel", 0, 1000, cat="cuda_runtime"),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = measure(trace)
    assert found.compute == pytest.approx(170e-6)
    assert found.communication == pytest.approx((95 + 70) * 1e-6)
    assert found.exposed == pytest.approx((25 + 20) * 1e-6)
    assert found.by_kind == pytest.approx(
        {"AllGather": 10e-6, "ReduceScatter": 20e-6, "SendRecv": 20e-6}
    )


def test_nothing_to_hide():
    found = measure({"traceEvents": [kernel("gemm", 0, 10)]})
    assert (found.communication, found.exposed, found.by_kind) == (0, 0, {})
