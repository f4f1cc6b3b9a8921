"""Loss and gradients of the trainer's step on a device; spawned processes import them from here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn import config, trainer, tree
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.parallel import MeshAxes, axes_of_process
from k31fn.trainer.gradient import make_gradient


def gradients(axes: MeshAxes, made: config.Recipe, device: torch.device) -> dict[str, Tensor]:
    """The loss of all ranks, and by path the gradients of this rank's parts of the parameters."""
    state, layout = (
        trainer.init_state(trainer.lay_out(made, axes), device),
        trainer.lay_out(made, axes),
    )
    rows = trainer.rows_at(trainer.load_corpus(made).dataset, 0, axes)
    sums, grads = make_gradient(layout)(state, trainer.make_batches(made, rows, device, axes))
    return {"loss": sums.total, **dict(tree.flatten_with_paths(grads))}


def on_rank(
    made: config.Recipe, device: str, grouped_matmul: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """:func:`gradients` on a process, by one implementation of the experts' product, and which ones
    ran.
    """
    axes, _ = axes_of_process(made.mesh)
    with use_impl(grouped_matmul=grouped_matmul), record_impls() as ran:
        found = gradients(axes, made, torch.device(device))
    counts = {impl: n for (op, impl), n in ran.items() if op == "grouped_matmul"}
    return list(found.values()), {"paths": list(found), "ran": counts}
