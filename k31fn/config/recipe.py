"""A training run as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from k31fn import data, model
from k31fn.config.fits import check_mesh
from k31fn.layers import dsa
from k31fn.parallel import Mesh
from k31fn.parallel.pipeline import ScheduleKind
from k31fn.precision import Precision

__all__ = ["Optimizer", "Pipeline", "Recipe"]

_Kind = Literal["adamw", "muon"]
_Compute = Literal["float32", "bfloat16", "float64"]
_Trainable = Literal["all", "indexer"]

_COUNTS = (
    "steps",
    "batch_size",
    "micro_batches",
    "eval_every",
    "eval_bytes",
    "heldout_bytes",
    "checkpoint_every",
    "keep",
)


@dataclass(frozen=True)
class Optimizer:
    """How parameters are stepped.

    Attributes:
        kind: ``muon`` on matrices with AdamW on the rest, or AdamW on everything.
        peak_lr: learning rate after the warm-up.
        warmup_steps: steps of linear warm-up (the whole run, if that is shorter); then half a cosine.
        final_fraction: of the peak, at the last step.
        weight_decay: decoupled; not on norms, biases and the like.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        eps: AdamW's epsilon.
        max_norm: gradients are clipped to this global norm; inf does not clip.
    """

    kind: _Kind = "muon"
    peak_lr: float = 5e-3
    warmup_steps: int = 20
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        _one_of("optimizer.kind", self.kind, _Kind)
        for name in ("peak_lr", "eps", "max_norm"):
            value = getattr(self, name)
            if not value > 0 or (name != "max_norm" and value == math.inf):
                raise ValueError(f"optimizer.{name}={value} must be positive")
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"optimizer.final_fraction={self.final_fraction} must be in [0, 1]")


@dataclass(frozen=True)
class Pipeline:
    """How the micro-batches of a step pass through the stages of ``mesh.pp`` ranks; without effect on one.

    Attributes:
        schedule: ``1f1b``; ``interleaved``, with several stages per rank; ``zero_bubble``, with split backwards.
        num_chunks: stages per rank.
    """

    schedule: ScheduleKind = "1f1b"
    num_chunks: int = 1

    def __post_init__(self) -> None:
        _one_of("pipeline.schedule", self.schedule, ScheduleKind)
        if self.num_chunks < 1 or (self.num_chunks > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"pipeline.num_chunks={self.num_chunks}: schedule 'interleaved' has 2 or more stages per rank, "
                f"the others 1; schedule is {self.schedule!r}"
            )


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on: the same recipe gives the same run, on any mesh up to rounding.

    Attributes:
        name: runs go to ``runs/<name>/<time>``.
        model: the model.
        data: the text, or prepared stores of text and images.
        optimizer: how parameters are stepped.
        steps: length of the run.
        batch_size: rows of a step.
        length: tokens of a row.
        micro_batches: pieces that a step is computed in; changes memory, not the numbers.
        seed: of initial values and of the order of the data.
        compute: dtype of activations and products; parameters and optimiser state stay float32 at least.
        remat: "layer" keeps only each layer's input for the backward.
        trainable: "indexer" freezes all but the lightning indexers (their dense warm-up).
        eval_every: steps between evaluations during the run.
        eval_bytes: held-out bytes scored then.
        heldout_bytes: held-out bytes scored at the end.
        checkpoint_every: steps between checkpoints.
        keep: checkpoints that are kept.
        mesh: the ranks and what each view of them splits; a run may go on on another one.
        pipeline: how stages of layers work together; may change like the mesh.
    """

    name: str
    model: model.Config
    data: data.Config | data.Prepared = field(default_factory=data.Config)
    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 1000
    batch_size: int = 4
    length: int = 256
    micro_batches: int = 1
    seed: int = 0
    compute: _Compute = "float32"
    remat: model.Remat = "none"
    trainable: _Trainable = "all"
    eval_every: int = 100
    eval_bytes: int = 20_000
    heldout_bytes: int = 200_000
    checkpoint_every: int = 200
    keep: int = 2
    mesh: Mesh = field(default_factory=Mesh)
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or self.name.startswith("."):
            raise ValueError(f"name={self.name!r} must be a folder name of letters, digits, '-', '_' and '.'")
        for name, allowed in (("compute", _Compute), ("remat", model.Remat), ("trainable", _Trainable)):
            _one_of(name, getattr(self, name), allowed)
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.length < 2:
            raise ValueError(f"length={self.length} must be at least 2: a row of one token predicts nothing")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed} must be in [0, 2**64); take it modulo 2**64")
        if self.batch_size % self.micro_batches:
            divisors = [d for d in range(1, self.batch_size + 1) if self.batch_size % d == 0]
            raise ValueError(
                f"micro_batches={self.micro_batches} does not divide batch_size={self.batch_size}; "
                f"use one of {divisors}"
            )
        if self.trainable == "indexer" and not isinstance(self.model.full_attention, dsa.Config):
            raise ValueError("trainable='indexer': model.full_attention has no indexer; make it a dsa.Config")
        if self.patches and isinstance(self.model.vision, tuple):
            raise ValueError(
                f"data.patches={self.patches}: the model has no vision; give it one, or set data.patches=0"
            )
        check_mesh(
            self.mesh,
            self.model,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            length=self.length,
            patches=self.patches,
            num_chunks=self.pipeline.num_chunks,
        )

    @property
    def patches(self) -> int:
        """Of images in a row; 0: rows of text."""
        return self.data.patches if isinstance(self.data, data.Prepared) else 0

    @property
    def precision(self) -> Precision:
        """Parameters and gradient sums in float32, or float64 in a float64 run."""
        compute = getattr(torch, self.compute)
        wide = torch.promote_types(compute, torch.float32)
        return Precision(param=wide, compute=compute, reduce=wide)


def _one_of(name: str, value: str, allowed: object) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name}={value!r} must be one of {list(get_args(allowed))}")
