"""Gated DeltaNet over heads, tokens and slices of documents: equal to one device, and only what
must travel does.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.kernels.kda import KdaFragment
from k31fn.layers import gdn
from k31fn.parallel import AxisRules, Mesh, P, partition
from k31fn.segments import Segments, from_lengths
from k31fn.testing import Ranks, assert_sharded_equals_dense
from tests.parallel import cases_gdn as cases

T = 80
# The cuts are at 40, or at 20, 40 and 60. Documents that span three slices, end at a cut, begin at
# a cut, or begin 1, 2 and 3 tokens before one; a padded tail, and slices of nothing but padding.
LENGTHS = [[7, 53, 20], [20, 33], [37, 38], [19, 2, 17, 42]]
PACKED = from_lengths(LENGTHS, T)
X, PACKING = P(("dp", "fsdp"), ("cp", "tp")), P(("dp", "fsdp"), "cp")
WEIGHTS = 13  # leaves
ON_FOUR = Mesh(cp=4)
IN_PROCESS = ("simulated", "threads")


def arguments() -> tuple[gdn.Params[Tensor], Tensor, Segments]:
    """Weights moved off the initial values that hide a term; the state lasts, as most decays are
    weak.
    """
    weights = params.init(gdn.specs(cases.CFG), random.key(2), dtype=torch.float64)
    weights = tree.map(lambda w: w * 15 if w.ndim > 1 else w + 0.3 * torch.rand_like(w), weights)
    return weights, torch.randn(len(LENGTHS), T, cases.CFG.hidden_size, dtype=torch.float64), PACKED


def counts(mesh: Mesh) -> dict[str, int]:
    """What one rank issues: over tp, x in and y out, and the gradient of o_norm; over cp, the halo
    of the three convolutions together, one pair of states, and each weight's gradient.
    """
    tp, cp, data = mesh.tp > 1, mesh.cp > 1, mesh.dp * mesh.fsdp * mesh.cp > 1
    gathered = 2 * tp + cp
    found = {"all_gather": gathered, "psum_scatter": gathered, "ppermute": 2 * cp}
    found["psum"] = tp + WEIGHTS * data
    return {kind: n for kind, n in found.items() if n}


def check(mesh: Mesh, **kwargs):
    return assert_sharded_equals_dense(
        cases.whole,
        arguments(),
        (partition(gdn.specs(cases.CFG), AxisRules(spread=()), mesh), X, PACKING),
        X,
        mesh,
        collectives=counts(mesh),
        rtol=1e-10,
        atol=1e-10,
        **kwargs,
    )


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2)], ids=str)
def test_two_ranks_on_every_backend(mesh: Mesh, two_ranks: Ranks):
    assert check(mesh, ranks=two_ranks).backends == ("simulated", "threads", "processes")


@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(cp=2, tp=2)], ids=str)
def test_on_four_ranks(mesh: Mesh):
    check(mesh, backends=IN_PROCESS)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=4), Mesh(dp=2, cp=2)], ids=str)
def test_on_other_meshes_of_four(mesh: Mesh):
    check(mesh, backends=IN_PROCESS)


def test_a_transition_across_a_document_start_is_found(monkeypatch):
    def across(k, v, g, beta, ids, fragment=gdn.gdn_fragment) -> KdaFragment:
        return fragment(k, v, g, beta, ids)._replace(
            transition=fragment(k, v, g, beta, (ids > 0).long()).transition
        )

    monkeypatch.setattr(gdn, "gdn_fragment", across)
    with pytest.raises(AssertionError, match="simulated against one device"):
        check(ON_FOUR, backends=("simulated",))


def test_a_forgotten_pvary_is_found(monkeypatch):
    monkeypatch.setattr(gdn, "pvary", lambda w, axes: w)
    with pytest.raises(ValueError, match=r"does not name 'tp'|varies over an axis"):
        check(Mesh(tp=2), backends=("simulated",))
