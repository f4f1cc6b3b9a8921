"""A checkpoint with vision, imported by the ranks of a mesh: each reads its slices, and the model
computes the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import hf, model, params, tree
from k31fn.layers import latent_moe
from k31fn.parallel import (
    AxisRules,
    Mesh,
    Sharding,
    all_gather_invariant,
    each_rank,
    fsdp,
    partition,
)
from k31fn.parallel.tiling import cut
from tests import small
from tests.parallel import cases_model as cases

# experts of 64, so that the halves of two ranks are whole groups of MXFP4
CFG = small.replace(
    cases.CONFIGS["k31 vision"],
    moe=latent_moe.Config(
        cases.D, latent_size=64, expert_size=64, shared_size=64, num_experts=8, top_k=2
    ),
)
SPECS, ROWS = model.specs(CFG), cases.batch(cases.CONFIGS["k31 vision"])


def logits(
    weights: Any, balance: Any, rows: model.Batch, placements: Any = (), sh: Sharding | None = None
) -> Tensor:
    how: Any = {"placements": placements, "sh": sh} if sh is not None else {}
    seen: Any = {"segments": rows.segments, "images": rows.images}
    hidden = model.apply(weights, rows.tokens, CFG, balance=balance, **seen, **how).hidden
    head = fsdp.gather(weights.head, placements.head) if placements else weights.head
    if sh is not None:
        hidden = all_gather_invariant(hidden, sh.sequence, 1)
        return all_gather_invariant(hidden @ head, sh.vocab, 2)
    return hidden @ head


PLAIN, MXFP4 = False, True
DEFAULT, SLOW = (
    [(Mesh(tp=2), PLAIN), (Mesh(fsdp=2, ep=2), MXFP4)],
    [(Mesh(fsdp=2), PLAIN), (Mesh(tp=2), MXFP4)],
)


@pytest.mark.parametrize(
    ("mesh", "quantise"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_the_same_logits(tmp_path: Path, mesh: Mesh, quantise: bool):
    folder = tmp_path / "all"
    weights = params.cast(cases.shaken(SPECS), SPECS, torch.bfloat16)
    hf.export(weights, cases.biases(CFG), CFG, folder, quantise=quantise)
    expected = logits(*hf.load(folder, CFG, dtype=torch.float64), ROWS)
    split = partition(SPECS, AxisRules(), mesh)

    def on_rank(axes: Any, coordinate: dict[str, int]) -> Tensor:
        mine = hf.part_of(SPECS, split, mesh, axes, coordinate)
        weights, balance = hf.load(folder, CFG, dtype=torch.float64, part=mine)
        values, structure = tree.flatten(ROWS)
        rows = tree.unflatten(
            structure, cut(tree.leaves(cases.batch_specs(ROWS)), values, mesh, coordinate)
        )
        return logits(
            weights, balance, rows, fsdp.placements(SPECS, split, axes), Sharding.on(axes)
        )

    found = each_rank(on_rank, mesh, lambda coordinate: (coordinate,))
    whole = torch.cat(found) if mesh.fsdp == 2 else found[0]
    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-11)
