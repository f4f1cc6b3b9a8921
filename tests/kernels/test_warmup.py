"""Kernels compiled ahead of time are those that a launch asks for, and the cache gives out nothing
damaged.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from k31fn.kernels.norm import rms_norm
from k31fn.kernels.registry import watch_calls
from k31fn.kernels.warmup import OpCalls

ROOT = Path(__file__).parents[2]


def test_a_call_is_noted_once_for_each_kind_of_arguments() -> None:
    calls, w = OpCalls(), torch.ones(4)
    with watch_calls(calls):
        for x in (
            torch.ones(2, 4),
            torch.zeros(2, 4),
            torch.ones(3, 4),
            torch.ones(2, 4, dtype=torch.bfloat16),
        ):
            rms_norm(x, w, 1e-5)
        rms_norm(torch.ones(2, 8)[:, ::2], w, 1e-5)  # another stride
        rms_norm(torch.ones(9)[1:].view(2, 4), w, 1e-5)  # not aligned
    rms_norm(torch.ones(7, 4), w, 1e-5)
    assert [call.leaves[0].shape for call in calls] == [(2, 4), (3, 4), (2, 4), (2, 4), (2, 4)]
    made = [call.leaves[0].zeros(torch.device("cpu")) for call in calls]
    assert [x.stride() for x in made] == [(4, 1), (4, 1), (4, 1), (8, 2), (4, 1)]
    assert [x.data_ptr() % 16 for x in made] == [0, 0, 0, 0, 4]
    assert made[2].dtype == torch.bfloat16


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/kernels/warmed saw in a process without Triton's interpreter."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("warmed")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder / "t"), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.warmed", str(folder)]
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


slow = [pytest.mark.slow, pytest.mark.timeout(300)]


class TestAheadOfTime:
    pytestmark = slow

    def test_what_a_launch_would_compile_is_found_and_compiled_in_parallel(
        self, seen: dict[str, Any]
    ) -> None:
        assert seen["calls"] == 1
        assert seen["functions"] == [
            "attn_res_forward",
            "attn_res_backward_whole",
            "attn_res_d_weights",
        ]
        assert seen["targets"] == [["cuda", 90, 32]]
        assert seen["cold"] == seen["progress"] == ["compiled"] * 3
        assert seen["warm"] == ["found"] * 3

    def test_a_launch_after_loading_compiles_nothing(self, seen: dict[str, Any]) -> None:
        assert seen["compiled_by_load"] == []
        assert "launcher" in seen["launch"]  # it goes straight on to the driver, which is none

    def test_a_damaged_entry_is_built_again(self, seen: dict[str, Any]) -> None:
        assert seen["believed"]  # Triton alone would load half a binary
        assert len(seen["damaged"]) == 7
        for harm, (first, second) in seen["damaged"].items():
            by_triton = harm in (
                "missing file",
                "empty group",
                "odd group",
            )  # which it may notice itself
            assert first in ("rebuilt", *["compiled"] * by_triton), harm
            assert second == "found", harm

    def test_two_at_once_compile_each_kernel_once(self, seen: dict[str, Any]) -> None:
        assert seen["raced"] == [{"compiled": 3, "found": 3}, True]

    def test_a_killed_compiler_is_replaced_and_leaves_nothing_half(
        self, seen: dict[str, Any]
    ) -> None:
        states, whole = seen["killed"]
        assert set(states) <= {"compiled", "rebuilt", "found"}
        assert len(states) == 3
        assert whole
        assert "warmed.dies.kernel: the process that compiled it died, 2 times" in seen["dies"]

    def test_a_kernel_that_does_not_compile_is_named(self, seen: dict[str, Any]) -> None:
        assert seen["wrong"].startswith(
            "kernel k31fn.kernels.attn_res.triton.one_pass.attn_res_forward: "
        )


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_first_step_after_a_warm_up_compiles_nothing(tmp_path: Path) -> None:
    args = ["configs/tiny.py", "--compute", "bfloat16", "--one", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.warmup", *args],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["states"]["compiled"] > 0
    assert found["step_0_compiled"] == []
