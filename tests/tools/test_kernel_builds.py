"""The list of kernels that is compiled ahead of time is complete, or refused; and all of it
compiles for sm_90.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from k31fn.kernels import attn_res as attn_res_package
from k31fn.kernels.attn_res.triton import one_pass as attn_res_kernels
from tools import kernel_builds
from tools.kernel_builds import KINDS, builds, modules

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_op_with_kernels_is_listed_both_ways(kind: str) -> None:
    found = builds(kind)
    assert len(modules()) >= 3
    assert {b.direction for b in found} == {"forward", "backward"}
    assert len({b.name for b in found}) == len(found)
    for build in found:
        assert set(build.signature) | set(build.constants) == set(build.kernel.arg_names), (
            build.name
        )
        assert not set(build.signature) & set(build.constants)


def with_builds(change: Any) -> ModuleType:
    """The kernels of attn_res with another list."""
    module: Any = SimpleNamespace(**vars(attn_res_kernels))
    module.builds = lambda kind: change(attn_res_kernels.builds(kind))
    return module


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: [b for b in found if b.direction == "forward"], "no backward kernel"),
        (
            lambda found: [b for b in found if "backward_scores" not in b.name],
            "'attn_res_backward_scores'.* are in no",
        ),
        (lambda found: [], "no forward kernel"),
    ],
)
def test_what_would_be_left_out_is_refused(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_builds, "modules", lambda: {"attn_res": with_builds(change)})
    with pytest.raises(ValueError, match=message):
        builds("cuda")


def test_none_at_all_and_kernels_that_no_implementation_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    implementations = attn_res_package.attn_res.implementations
    monkeypatch.delitem(implementations, "triton")
    with pytest.raises(
        ValueError, match=r"'attn_res_forward'.* a module that an implementation names"
    ):
        builds("cuda")
    monkeypatch.setattr(kernel_builds, "modules", dict)
    with pytest.raises(ValueError, match="no kernel is registered"):
        builds("cuda")


# a minute and more of compiling, twice that where other work shares the cores
@pytest.mark.timeout(400)
def test_all_compile_for_sm_90_without_a_gpu() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.compile_cuda"],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{len(builds('cuda'))} kernels compiled for sm_90"
