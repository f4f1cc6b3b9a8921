"""The vision tower split by heads, width and patches: value and gradients of one device, and the
work divided.
"""

from __future__ import annotations

import pytest
import torch

from k31fn import params, random, tree
from k31fn.layers import projector, vision, vision_block
from k31fn.layers.patches import from_grids
from k31fn.parallel import AxisRules, Mesh, P, partition
from k31fn.testing import Ranks, assert_sharded_equals_dense
from tests.parallel import cases_vision as cases

SPECS = {"tower": vision.specs(cases.TOWER), "projector": projector.specs(cases.PROJECTOR)}
ROWS, N, T = (
    [[(1, 2, 4), (1, 4, 2)], [], [(1, 6, 4)], [(1, 2, 2)]],
    32,
    8,
)  # the third row's image lies on all cp ranks
CLIPS = [[(2, 2, 4), (1, 2, 2)], [(1, 4, 2)], [], [(2, 4, 2)]]
TOKENS, OWN = P(("dp", "fsdp"), "cp"), P(("dp", "fsdp"), ("cp", "tp"))


CP = Mesh(cp=2).axes().cp


def arguments(max_frames: int):
    weights = tree.map(lambda w: 2 * w, params.init(SPECS, random.key(3), dtype=torch.float64))
    patches = from_grids(CLIPS if max_frames > 1 else ROWS, N, max_frames=max_frames)
    pixels = torch.randn(4, N, cases.TOWER.pixels_per_patch, dtype=torch.float64)
    tokens = torch.tensor(
        [
            [9, 9, 9, 9, 1, 1, 1, 1],
            [1, 9, 9, 1, 1, 1, 1, 1],
            [9, 9, 1, 9, 9, 9, 1, 9],
            [1, 1, 1, 1, 1, 1, 9, 1],
        ]
    )
    x = torch.randn(4, T, cases.PROJECTOR.hidden_size, dtype=torch.float64)
    return weights, pixels, patches, x, projector.slots(tokens, 9)


def check(
    mesh: Mesh,
    *,
    max_frames: int = 1,
    ranks: Ranks | None = None,
    backends=("simulated", "threads"),
    **counts,
):
    weights = partition(SPECS, AxisRules(spread=(), expert_spread=()), mesh)
    return assert_sharded_equals_dense(
        cases.images_into_text,
        arguments(max_frames),
        (weights, TOKENS, TOKENS, OWN, TOKENS),
        OWN,
        mesh,
        collectives=counts,
        rtol=1e-10,
        atol=1e-11,
        impls={"interval_attention": "reference"},
        backends=backends,
        ranks=ranks,
    )


# By hand, for two layers: forward, each layer gathers before its two column-parallel products and
# scatters after them, the projector once, place once; backward, the transposes. psum: 8 small
# weights that every tp rank holds whole.
TP = {"all_gather": 11, "psum_scatter": 11, "psum": 8, "all_gather_invariant": 1}


def test_by_heads_and_width_on_every_backend(two_ranks: Ranks):
    report = check(
        Mesh(tp=2), ranks=two_ranks, backends=("simulated", "threads", "processes"), **TP
    )
    assert report.backends == ("simulated", "threads", "processes")
    assert report.flops == pytest.approx(0.5, rel=0.02)


def test_an_image_on_several_ranks(two_ranks: Ranks):
    """Under cp keys and values are gathered once per layer, features once; 22 weights have summed
    gradients.
    """
    backends = ("simulated", "threads", "processes")
    report = check(
        Mesh(cp=2), ranks=two_ranks, backends=backends, all_gather=3, psum_scatter=3, psum=22
    )
    assert report.flops == pytest.approx(0.5, rel=0.02)


BOTH = {"all_gather": 14, "psum_scatter": 14, "psum": 30, "all_gather_invariant": 1}


@pytest.mark.parametrize(
    ("mesh", "counts"),
    [
        (Mesh(cp=2, tp=2), BOTH),
        (Mesh(dp=2, tp=2), {**TP, "psum": 30}),
        (Mesh(fsdp=2, cp=2, tp=2), BOTH),
    ],
    ids=str,
)
def test_on_other_meshes(mesh: Mesh, counts: dict[str, int]):
    report = check(mesh, **counts)
    assert report.flops == pytest.approx(1 / mesh.world_size, rel=0.02)


def test_a_rank_without_images_issues_the_same_collectives():
    """Four rows on four ranks, one of them without images: the counts of all ranks are compared,
    and the gradients.
    """
    check(Mesh(dp=4), psum=22)


def test_clips():
    """The mean over frames gathers the merged features over all ranks of a row, which adds one
    gather per axis.
    """
    check(Mesh(tp=2), max_frames=2, **{**TP, "all_gather": 12, "psum_scatter": 12})
    check(Mesh(cp=2, tp=2), max_frames=2, **{**BOTH, "all_gather": 16, "psum_scatter": 16})


@pytest.mark.parametrize("module", [vision, vision_block, projector], ids=lambda m: m.__name__)
def test_a_forgotten_pvary_is_found(module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "pvary", lambda x, axes: x)
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        check(Mesh(tp=2), backends=("simulated",), **TP)


def test_keys_that_stay_on_their_rank_are_found(monkeypatch: pytest.MonkeyPatch):
    gather = vision_block.all_gather
    monkeypatch.setattr(
        vision_block,
        "all_gather",
        lambda x, a, d: gather(x, a, d) if a[:1] != CP else torch.cat([x, x], d),
    )
    with pytest.raises(AssertionError, match="simulated against one device"):
        check(Mesh(cp=2), backends=("simulated",), all_gather=3, psum_scatter=3, psum=22)
