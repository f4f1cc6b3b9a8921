"""The list of kernels that is compiled ahead of time is complete, or refused."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from k31fn.kernels import attn_res as attn_res_package
from k31fn.kernels.attn_res.triton import one_pass as attn_res_kernels
from tools import kernel_builds
from tools.kernel_builds import KINDS, builds, modules


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
