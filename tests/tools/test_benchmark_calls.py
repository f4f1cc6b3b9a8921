"""What a benchmark cannot run is said in a line, before any work."""

import importlib
import sys
from pathlib import Path

import pytest

from k31fn import device

CONFIG = str(Path(__file__).parents[2] / "configs" / "tiny.py")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("attn_res", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("kda_layer", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("experts", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("mhc", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("head", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("optimizer_step", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA"),
        ("gdn", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("dsa", ["--device", "cpu"], "--device cpu: times kernels, which need a CUDA device"),
        ("mhc", ["--device", "gpu"], "device='gpu' must be one of"),
        ("fp8", ["--device", "cpu"], "on the cpu only --small"),
        ("table", ["nowhere.md"], "nowhere.md: no such file"),
        ("grouped_experts", ["--device", "gpu"], "device='gpu' must be one of"),
        ("grouped_experts", ["--dtype", "float8"], "invalid choice: 'float8'"),
        ("recompute", ["--device", "gpu"], "device='gpu' must be one of"),
        ("recompute", ["--repeats", "-1"], "--repeats -1 must be at least 0"),
        ("warmup", ["nowhere.py"], "nowhere.py"),
        ("optimizers", ["--config", "nowhere.py"], "nowhere.py"),
        ("trainer_overhead", ["--config", "nowhere.py"], "nowhere.py"),
        ("moonep_sim", ["out.png", "--ranks", "1"], "--ranks [1]: at least 2 ranks"),
        ("warmup", [CONFIG], "no device with kernels to compile"),
    ],
)
def test_what_it_needs(
    name: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(device, "num_devices", lambda kind: int(kind == "cpu"))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert said in last
