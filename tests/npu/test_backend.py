"""k31fn on a device ``npu`` that is made of Python and of the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(170)
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="of torch 2.13; older has none",
)
def test_on_a_device_named_npu_the_numbers_are_those_of_the_cpu(tmp_path: Path):
    """Devices, initial weights, a gradient with remat, a training step; then with the adapters of
    torch_npu.
    """
    alone = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **alone}
    command = [sys.executable, "-m", "tests.npu.on_backend", str(tmp_path)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"
