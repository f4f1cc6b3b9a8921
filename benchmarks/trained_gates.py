"""Decays and betas of a trained model, for the benchmark of KDA to draw from.

``python -m benchmarks.trained_gates RUN --json benchmarks/results/trained_gates.json``, where RUN
is a folder of ``python train.py configs/tiny.py``. One batch of the run's text goes through the
model on the CPU. Of each channel of each KDA layer and head the file has mean and standard
deviation over the tokens of what the decay is the sigmoid of, and of each head those of what beta
is the sigmoid of. How neighbouring tokens hang together is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import told
from k31fn import model, sample, trainer
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.kernels.kda import MIN_LOG_DECAY, kda_gated
from k31fn.kernels.registry import Implementation, use_impl
from k31fn.trainer import folder

__all__ = ["TRAINED", "main", "recorded"]

TRAINED = Path(__file__).parent / "results" / "trained_gates.json"
CPU = torch.device("cpu")


def recorded(run: Path) -> dict[str, Any]:
    """Mean and deviation per channel of the decays, and per head of the betas, of all layers.

    Raises:
        ValueError: it is no run folder, has no checkpoint, or no layer of KDA.
    """
    recipe, params, state = sample.load(run, where=CPU)
    seen: list[tuple[Tensor, Tensor]] = []

    def record(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        ids: Tensor,
        *others: Any,
    ) -> Any:
        valid = ids > 0
        seen.append(((A_log.exp()[:, None] * (z + dt_bias))[valid], beta[valid]))
        return kda_gated.reference(q, k, v, z, beta, A_log, dt_bias, ids, *others)

    kda_gated.register(Implementation("recorded", (), record, on_request=("cpu",)))
    rows = trainer.rows_at(trainer.load_corpus(recipe).dataset, 0)
    with torch.no_grad(), use_impl(kda_gated="recorded"):
        for batch in trainer.make_batches(recipe, rows, CPU):
            model.loss(params, batch, recipe.model, balance=state)
    if not seen:
        raise ValueError(f"RUN={run} has no layer of KDA; train configs/tiny.py")
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        steps = checkpoints.latest()
    gates, betas = (torch.cat([x.flatten(1) for x in some], 1) for some in zip(*seen, strict=True))
    return {"recipe": recipe.name, "steps": steps, "gate": _moments(gates), "beta": _moments(betas)}


def _moments(x: Tensor) -> dict[str, list[float]]:
    mean, deviation = x.double().mean(0), x.double().std(0)
    return {
        "mean": [round(float(a), 4) for a in mean],
        "deviation": [round(float(a), 4) for a in deviation],
    }


def main() -> int:
    """Prints how strong the decays are, and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder of train.py")
    parser.add_argument("--json", type=Path, default=TRAINED)
    args = parser.parse_args()
    found = told(parser, lambda: recorded(folder.resolve(args.run)))
    decays = MIN_LOG_DECAY * torch.sigmoid(torch.tensor(found["gate"]["mean"]))
    quantiles = torch.quantile(decays, torch.tensor([0.05, 0.5, 0.95]))
    print(f"{found['steps']} steps; log-decays per token, at 5, 50 and 95%: {quantiles.tolist()}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
