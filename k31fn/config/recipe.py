"""A training run as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from k31fn import data, lora, model, trackers
from k31fn.config.mesh_checks import check_mesh
from k31fn.config.model_checks import check_logits, check_size
from k31fn.config.phase import Phase, spans
from k31fn.layers import kinds
from k31fn.layers.kind import TokenMixer
from k31fn.limits import check_numbers, divisors
from k31fn.parallel.mesh import Mesh
from k31fn.parallel.pipeline.schedules import ScheduleKind
from k31fn.precision import Precision, Products

__all__ = ["Optimizer", "Pipeline", "Recipe"]

_Kind = Literal["adamw", "muon"]
_Compute = Literal["float32", "bfloat16", "float64"]
_Trainable = Literal["all", "indexer"]
_Schedule = Literal["cosine", "wsd"]
_NsDtype = Literal["auto", "float32", "bfloat16"]
_StateDtype = Literal["float32", "bfloat16"]
_Norm = Literal["2", "inf"]

_MOST_TOKENS = 1 << 32  # of a step, whose rows some rank holds as numbers of 64 bits

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
        warmup_steps: steps of linear warm-up (the whole run, if that is shorter).
        schedule: after it: ``cosine``, half of one; ``wsd``, the peak, and a straight line down at
            the end.
        decay_fraction: of the run's steps that the line of ``wsd`` takes.
        final_fraction: of the peak, at the last step.
        weight_decay: decoupled; not on norms, biases and the like.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        eps: AdamW's epsilon.
        max_norm: gradients are clipped to this global norm; inf does not clip.
        norm: which norm: ``2``, or ``inf``, the largest magnitude.
        ns_dtype: of Muon's Newton-Schulz; ``auto`` is bfloat16, float32 on the CPU.
        state_dtype: of momentum and moments between steps.
        offload: keep them in the host's memory.
        qk_clip: largest attention logit of Gated MLA and DSA; heads above it have their query and
            key weights scaled down after the step. 100 in Kimi K2. 0: they grow as they like.
        spike: a step whose loss or gradient norm is so many deviations above its running median is
            skipped. 0: none is.
    """

    kind: _Kind = "muon"
    peak_lr: float = 5e-3
    warmup_steps: int = 20
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_norm: float = field(default=1.0, metadata={"infinite": True})
    schedule: _Schedule = "cosine"
    decay_fraction: float = 0.2
    norm: _Norm = "2"
    ns_dtype: _NsDtype = "auto"
    state_dtype: _StateDtype = "float32"
    offload: bool = False
    qk_clip: float = 0.0
    spike: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", _Kind),
            ("schedule", _Schedule),
            ("norm", _Norm),
            ("ns_dtype", _NsDtype),
            ("state_dtype", _StateDtype),
        ):
            _one_of(f"optimizer.{name}", getattr(self, name), allowed)
        # "not value > 0", so that NaN is refused too
        for name in ("peak_lr", "eps", "max_norm"):
            value = getattr(self, name)
            if not value > 0 or (name != "max_norm" and value == math.inf):
                raise ValueError(f"optimizer.{name}={value} must be positive")
        for name in ("warmup_steps", "weight_decay", "qk_clip", "spike"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0")
        # at 1 a moment would never change
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        for name in ("final_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1]")


@dataclass(frozen=True)
class Pipeline:
    """How the micro-batches of a step pass through the stages of ``mesh.pp`` ranks; without effect
    on one.

    Attributes:
        schedule: ``1f1b``; ``interleaved``, with several stages per rank; ``zero_bubble``, with
            split backwards.
        num_chunks: stages per rank.
    """

    schedule: ScheduleKind = "1f1b"
    num_chunks: int = 1

    def __post_init__(self) -> None:
        _one_of("pipeline.schedule", self.schedule, ScheduleKind)
        if self.num_chunks < 1 or (self.num_chunks > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"pipeline.num_chunks={self.num_chunks}: schedule 'interleaved' has 2 or more "
                f"stages per rank, the others 1; schedule is {self.schedule!r}"
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
        compute: dtype of activations and products.
        master: dtype of parameters between steps; "bfloat16" rounds them stochastically after each,
            without a copy.
        products: of linear layers in FP8, with scales by row or by blocks, where ``compute`` is
            bfloat16; held-out text is scored with exact ones.
        remat: what the backward computes again: "layer": all but each layer's input; "intra_layer":
            what joins the sublayers, which are kept; "cross_layer": also the inputs of all but
            every eighth layer.
        trainable: "indexer" freezes all but the lightning indexers (their dense warm-up).
        trackers: services that get the metrics too, "wandb" and "trackio"; changes no number of the
            run.
        lora: trains low-rank adapters of a model, and nothing else; ``()``: none.
        phases: parts of the run with other rows or other trained parameters, one after the other;
            ``()``: none.
        init: a run or a checkpoint of it whose parameters the run starts from; "": drawn from the
            seed.
        eval_every: steps between evaluations during the run.
        eval_bytes: held-out bytes scored then.
        heldout_bytes: held-out bytes scored at the end.
        checkpoint_every: steps between checkpoints.
        keep: newest checkpoints that are kept.
        keep_every: steps whose multiples are kept as well; 0: none.
        keep_best: checkpoints of the lowest held-out losses that are kept as well. A checkpoint has
            one if its step is also one of ``eval_every``.
        mesh: the ranks and what each view of them splits; a run may go on on another one.
        pipeline: how stages of layers work together; may change like the mesh.
    """

    name: str
    model: model.Config
    data: data.Config | data.Prepared = field(default_factory=data.Config)
    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 1000
    batch_size: int = field(default=4, metadata={"most": 1 << 24})
    length: int = field(default=256, metadata={"most": 1 << 27})
    micro_batches: int = 1
    seed: int = field(default=0, metadata={"most": (1 << 64) - 1})
    compute: _Compute = "float32"
    products: Products = "exact"
    master: _StateDtype = "float32"
    remat: model.Remat = "none"
    trainable: _Trainable = "all"
    lora: lora.Config | tuple[()] = ()
    trackers: tuple[trackers.Name, ...] = ()
    phases: tuple[Phase, ...] = ()
    init: str = ""
    eval_every: int = 100
    eval_bytes: int = field(default=20_000, metadata={"most": 1 << 40})
    heldout_bytes: int = field(default=200_000, metadata={"most": 1 << 40})
    checkpoint_every: int = 200
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        check_numbers(self)
        self._check_values()
        # what depends on several fields, first what is asked of one rank, then of a mesh
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} does not divide batch_size={self.batch_size}; "
                f"use one of {divisors(self.batch_size)}"
            )
        if self.batch_size * self.length > _MOST_TOKENS:
            raise ValueError(
                f"batch_size={self.batch_size} x length={self.length}: a step of more than "
                f"{_MOST_TOKENS:,} tokens; lower one of them"
            )
        check_size(self.model)
        if self.trainable == "indexer":
            _indexed(self.model, "trainable='indexer'")
        if self.patches and isinstance(self.model.vision, tuple):
            raise ValueError(
                f"data.patches={self.patches}: the model has no vision; give it one, or set "
                "data.patches=0"
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
        # last, as they make recipes of their own, for which all of the above holds
        self._check_phases()
        self._check_adapters()
        if self.clips_logits:
            check_logits(self.model, self.optimizer.qk_clip)
        _ = self.precision  # checks itself

    def _check_values(self) -> None:
        """Each field by itself."""
        # a leading dot would hide the folder of runs, and ".." would leave it
        letters = all(c.isalnum() or c in "-_." for c in self.name)
        if not self.name or not letters or self.name.startswith("."):
            raise ValueError(
                f"name={self.name!r} must be a folder name of letters, digits, '-', '_' and '.'"
            )
        # Literals are for the type checker and the command line; a config file may hold anything.
        _one_of("compute", self.compute, _Compute)
        _one_of("remat", self.remat, model.Remat)
        _one_of("trainable", self.trainable, _Trainable)
        _one_of("master", self.master, _StateDtype)
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0; 0 keeps none")
        if self.length < 2:
            raise ValueError(
                f"length={self.length} must be at least 2: a row of one token predicts nothing"
            )
        # the bits of a Threefry key (k31fn.random)
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed} must be in [0, 2**64); take it modulo 2**64")

    def phase_of(self, step: int) -> int:
        """The number of the phase that a step is in; that of the last one from the end of the run
        on.
        """
        phase = 0
        for number, span in enumerate(spans(self.phases, self.steps)):
            if span.start <= step:
                phase = number
        return phase

    def at(self, step: int) -> Recipe:
        """What holds at a step: the recipe with the fields of its phase."""
        return self._with(self.phases[self.phase_of(step)]) if self.phases else self

    def _with(self, phase: Phase) -> Recipe:
        changes = {}
        for name in ("length", "batch_size", "micro_batches", "trainable"):
            value = getattr(phase, name)
            if value:  # 0 and "": as the recipe says
                changes[name] = value
        if phase.attention:
            staged = {}
            for name, with_stage in _indexed(self.model, f"attention={phase.attention!r}"):
                staged[name] = with_stage(self.model.sublayers[name], phase.attention)
            changes["model"] = self.model.with_sublayers(**staged)
        # the run's state has optimiser state for what the run trains, and for nothing else
        if changes.get("trainable", self.trainable) != self.trainable != "all":
            raise ValueError(
                f"trainable={phase.trainable!r} in a run with trainable={self.trainable!r}: a "
                "phase can only freeze more; set trainable='all' for the run"
            )
        # phases=(): and so the checks of Recipe hold for each phase by itself
        return replace(self, phases=(), **changes)

    def _check_adapters(self) -> None:
        if not self.lora:
            return
        if any(part.trainable not in ("", "all") for part in (self, *self.phases)):
            raise ValueError(
                "lora: adapters are all that is trained; set trainable='all', in phases too"
            )
        # a second source of the frozen weights, of which only one could be saved by name
        if self.init:
            raise ValueError(
                f"init={self.init!r} with lora: the model that is adapted is lora.base; set init=''"
            )
        # refused, not without effect: a run would look bounded and is not
        if self.optimizer.qk_clip:
            raise ValueError(
                f"optimizer.qk_clip={self.optimizer.qk_clip} with lora: it scales weights that "
                "are frozen; set it to 0"
            )

    def _check_phases(self) -> None:
        spans(self.phases, self.steps)
        for number, phase in enumerate(self.phases):
            try:
                self._with(phase)
            except ValueError as error:
                raise ValueError(f"phases[{number}]: {error}") from error

    @property
    def trains_trunk(self) -> bool:
        """Whether the trunk is trained, to which the routers' biases belong."""
        return self.trainable == "all" and not self.lora

    @property
    def clips_logits(self) -> bool:
        """Whether weights of the attention are scaled when its logits are too large; frozen ones
        are not.
        """
        return bool(self.optimizer.qk_clip) and self.trains_trunk

    @property
    def patches(self) -> int:
        """Patches of images in a row; 0: rows of text."""
        return self.data.patches if isinstance(self.data, data.Prepared) else 0

    @property
    def precision(self) -> Precision:
        """Gradient sums in float32, or float64 in a float64 run; so are parameters, unless
        ``master`` is bfloat16.
        """
        compute = getattr(torch, self.compute)
        wide = torch.promote_types(compute, torch.float32)  # float64 stays float64
        param = torch.bfloat16 if self.master == "bfloat16" else wide
        return Precision(param=param, compute=compute, reduce=wide, products=self.products)


def _indexed(cfg: model.Config, asked: str) -> list[tuple[str, Callable[..., Any]]]:
    """The layers with an indexer by name, and the function to their stages.

    Raises:
        ValueError: the model has none; says what ``asked`` for one.
    """
    indexed, others = [], []
    for name in cfg.used():
        kind = kinds.kind_of(cfg.sublayers[name])
        if isinstance(kind, TokenMixer):
            if kind.with_stage is None:
                others.append(f"model.{name}")
            else:
                indexed.append((name, kind.with_stage))
    if not indexed:
        raise ValueError(
            f"{asked}: {' and '.join(others)} have no indexer; give the model a dsa.Config"
        )
    return indexed


def _one_of(name: str, value: str, allowed: object) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name}={value!r} must be one of {list(get_args(allowed))}")
