"""What recomputation keeps of a run of layers at K3's width, as benchmarks/recompute.py measures
it.
"""

from __future__ import annotations

import functools

import pytest

from benchmarks import recompute
from k31fn.autodiff import keep
from k31fn.model import layers

NEEDED = {  # by how much what a scheme keeps beyond the outputs of the branches falls at least
    ("mhc, broadcast", "intra_layer"): 0.84,
    ("mhc, einsum", "intra_layer"): 0.88,
    ("mhc, broadcast", "cross_layer"): 0.98,
    ("mhc, einsum", "cross_layer"): 0.98,
}

measure = functools.cache(functools.partial(recompute.kept, tokens=4))


def rows(form: str) -> list[recompute.Kept]:
    policies = ("none", "intra_layer", "cross_layer")
    return [measure("plain", "none"), *[measure(form, p) for p in policies]]


@pytest.mark.parametrize("form", ["mhc, einsum", "mhc, broadcast", "mhc"])
@pytest.mark.slow
def test_what_is_kept_falls(form: str) -> None:
    found = {r.policy: r for r in recompute.reductions(rows(form))}
    kept = {r.policy: r.kept for r in rows(form) if r.scheme == form}
    streams, outputs = 4 * 2, 2 * 2  # bytes per B*S*D
    assert kept["intra_layer"] == pytest.approx(streams + outputs, abs=0.1)
    assert kept["cross_layer"] == pytest.approx(streams / recompute.LAYERS + outputs, abs=0.1)
    for policy, reduction in found.items():
        assert reduction.new >= NEEDED.get((form, policy), 0.5)


@pytest.mark.slow
def test_branches_that_are_not_kept_outside_of_the_norm_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A policy that knows them by other names keeps no output, but runs them again."""
    monkeypatch.setattr(layers.block, "BRANCHES", ())
    assert recompute.kept("mhc, einsum", "intra_layer", tokens=4).kept == pytest.approx(
        4 * 2, abs=0.1
    )


@pytest.mark.slow
def test_a_norm_inside_of_the_kept_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its insides would be kept."""

    def wider(name, f):
        def run(w, x):
            return f(w, x.tanh().sin())

        return keep(name, run)

    monkeypatch.setattr(recompute, "keep", wider)
    kept = recompute.kept("mhc, einsum", "intra_layer", tokens=4).kept
    assert kept > 4 * 2 + 2 * 2 + 1
