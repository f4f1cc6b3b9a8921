"""The benchmark of a whole step: its parts from a trace, and a run of it on the CPU."""

import json
import sys

import pytest
import torch

from benchmarks import step
from benchmarks.step_parts import Kernel, kernels_of, matched, part_of, summary
from tests.trainer import runs

GEMM = "nvjet_tst_128x256"


def event(kind, name, start, length, thread=0, correlation=-1):
    args = {} if correlation < 0 else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": length,
        "tid": thread,
        "args": args,
    }


def test_scopes_of_kernels():
    trace = [
        event("user_annotation", "gradient", 0, 50, 1),
        event("user_annotation", "forward DSA, MoE", 1, 20, 1),
        event("user_annotation", "forward MoE", 5, 10, 1),
        event("user_annotation", "backward DSA", 60, 10, 2),
        event("cuda_runtime", "cudaLaunchKernel", 7, 1, 1, 3),
        event("cuda_runtime", "cudaLaunchKernel", 18, 1, 1, 4),
        event("cuda_runtime", "cudaLaunchKernel", 65, 1, 2, 5),
        event("cuda_runtime", "cudaLaunchKernel", 65, 1, 1, 6),
        event("kernel", "rms_norm_forward", 200, 9, 7, 4),
        event("kernel", GEMM, 100, 9, 7, 3),
        event("kernel", GEMM, 300, 9, 7, 5),
        event("gpu_memset", "Memset (Device)", 400, 9, 7, 6),
    ]
    kernels = kernels_of({"traceEvents": trace})
    assert [kernel.scopes for kernel in kernels] == [
        ("gradient", "forward DSA, MoE", "forward MoE"),
        ("gradient", "forward DSA, MoE"),
        ("backward DSA",),
        (),
    ]
    assert [part_of(kernel) for kernel in kernels] == ["experts", "residual", "DSA", "elementwise"]
    found = summary(kernels)
    assert found["parts"]["idle"] == [pytest.approx(0.273), 3]
    assert found["parts"]["experts"] == [pytest.approx(0.009), 1]
    assert found["total_ms"] == pytest.approx(0.309)


def test_a_graph_has_the_scopes_of_the_launched_step():
    names = ["a", GEMM, "b", "b", "c"]
    launched = [Kernel(name, i, i + 1, (f"scope {i}",)) for i, name in enumerate(names)]
    graph = [Kernel(name, i, i + 1) for i, name in enumerate(["Memcpy", *names, "Memcpy"])]
    graph[1] = Kernel("another", 1, 2)
    places = [None, None, 1, 2, 3, 4, None]
    scopes = [() if i is None else (f"scope {i}",) for i in places]
    assert [kernel.scopes for kernel in matched(graph, launched)] == scopes


@pytest.mark.usefixtures("unchecked")
def test_on_the_cpu(text, tmp_path, monkeypatch, capsys):
    made = runs.write_config(tmp_path / "small.py", runs.recipe(text))
    file = tmp_path / "step.json"
    words = [made, "--device", "cpu", "--count", "2", "--row", "1", "--json", str(file)]
    fields = ["--batch-size", "2", "--micro-batches", "2", "--length", "16"]
    monkeypatch.setattr(sys, "argv", ["step", *words, *fields, "--compute", "bfloat16"])
    assert step.main() == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["tokens"], row["experts"], row["equal"]) == (32, 5, True)
    assert row["eager"]["losses"] == row["captured"]["losses"]
    assert "attn_res" in row["eager"]["references"]
    assert "bits of 2 steps: equal" in capsys.readouterr().out


def test_a_digest_sees_each_bit_and_place():
    x = torch.arange(6.0).to(torch.bfloat16)
    other = x.clone()
    other[3] = 3.015625
    assert step._digest(x) != step._digest(other)
    assert step._digest(x) != step._digest(x.flip(0))
    assert step._digest(x) == step._digest(x.clone())
