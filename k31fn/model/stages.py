"""The model cut into pipeline stages.

    parts = stages(cfg, stage_ranges(cfg.num_layers, num_stages))
    of_rank = [parts[i] for i in table.stages_of(rank)]
    weights = params.init(select(specs(cfg), of_rank), key)     # of a rank, in one tree
    run(
        table,
        [make_stage(cfg, part, balance=state) for part in of_rank],
        [select(weights, [part]) for part in of_rank],
        batches,
        ...,
    )

A rank's parameters are the model's tree with ``()`` for what others have. Paths, and so initial
values, checkpoints and the rows of the balance state, go by the global numbers of layers, whatever
the cuts.

A residual scheme whose carry has a field ``blocks`` only ever appends to it: those are sent to a
rank once. All else in the carry is the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance as quantile
from k31fn.layers import kinds
from k31fn.model.config import Config, layer_configs, moe_layers
from k31fn.model.forward import finish, run_layers, start
from k31fn.model.layers import Remat
from k31fn.model.loss import Batch, Losses, lm_loss, weigh
from k31fn.model.params import Params
from k31fn.parallel.collectives import axis_size
from k31fn.parallel.pipeline.carry import StageCarry
from k31fn.parallel.pipeline.engine import Stage, StageOutput
from k31fn.parallel.sharding import UNSHARDED, Sharding

__all__ = ["Part", "make_stage", "merge", "select", "stage_carries", "stage_moe_layers", "stages"]


class Part(NamedTuple):
    """What a stage has of the model.

    Attributes:
        layers: global numbers of its layers; possibly none.
        first: whether it has the embedding, the tower and the projector.
        last: whether it has the final mix, the final norm and the head.
    """

    layers: range
    first: bool
    last: bool


def stages(cfg: Config, ranges: Sequence[range]) -> tuple[Part, ...]:
    """The parts of a model whose layers are cut so (:func:`k31fn.parallel.pipeline.stage_ranges`).

    Raises:
        ValueError: ranges that are not all layers in order, or a model with a
            multi-token-prediction layer.
    """
    numbers: list[int] = []
    for layers in ranges:
        numbers.extend(layers)
    if numbers != list(range(cfg.num_layers)):
        raise ValueError(
            f"stages: ranges {list(ranges)} are not the layers 0..{cfg.num_layers - 1} in order"
        )
    if cfg.num_mtp_layers:
        raise ValueError(
            f"model.Config.mtp={cfg.mtp} with {len(ranges)} pipeline "
            "stages: that layer reads "
            "the embedding, which the last stage does not have; set mtp=() or mesh.pp=1"
        )
    last = len(ranges) - 1
    return tuple(Part(layers, i == 0, i == last) for i, layers in enumerate(ranges))


def select(params: Params[Any], parts: Sequence[Part]) -> Params[Any]:
    """What these stages have of a tree like the model's parameters (values, specs or placements);
    ``()`` elsewhere.
    """
    first = any(part.first for part in parts)
    last = any(part.last for part in parts)
    numbers = _numbers(parts)
    # The tree keeps its shape: paths of leaves, and so checkpoints, do not depend on the cuts.
    return Params(
        embedding=params.embedding if first else (),
        layers=tuple(layer if i in numbers else () for i, layer in enumerate(params.layers)),
        final_mix=params.final_mix if last else (),
        final_norm=params.final_norm if last else (),
        head=params.head if last else (),
        mtp=(),
        vision=params.vision if first else (),
        projector=params.projector if first else (),
    )


def merge(trees: Sequence[Params[Any]]) -> Params[Any]:
    """One tree of what several stages have, such as the gradients of a rank's chunks."""

    def present(values: Sequence[Any]) -> Any:
        """The one that is not ``()``: no part of the model is two stages'."""
        for value in values:
            if not isinstance(value, tuple) or value:
                return value
        return ()

    whole = {}
    for field in dataclasses.fields(Params):
        whole[field.name] = present([getattr(tree, field.name) for tree in trees])
    # Layers one by one: each tree has a tuple of all of them, most of it ().
    by_layer = zip(*[tree.layers for tree in trees], strict=True)
    whole["layers"] = tuple(present(layer) for layer in by_layer)
    return Params(**whole)


def stage_moe_layers(cfg: Config, parts: Sequence[Part]) -> tuple[int, ...]:
    """Global numbers of the MoE layers of these stages: the rows of their balance state, possibly
    none.
    """
    numbers = _numbers(parts)
    return tuple(i for i in moe_layers(cfg) if i in numbers)


def _numbers(parts: Sequence[Part]) -> set[int]:
    """Global numbers of the layers of these stages."""
    numbers: set[int] = set()
    for part in parts:
        numbers.update(part.layers)
    return numbers


def make_stage(
    cfg: Config,
    part: Part,
    *,
    balance: quantile.State,
    remat: Remat = "none",
    placements: Any = (),
    sh: Sharding = UNSHARDED,
) -> Stage:
    """The stage as a function ``(params, carry, batch)`` for :func:`k31fn.parallel.pipeline.run`.

    Its loss is its share of :func:`k31fn.model.loss`: the head's cross-entropy on the last stage,
    the KL of its own indexers everywhere, by the denominators of the whole step. Its sums are
    :class:`~k31fn.model.Losses` with a row per layer of its own; the logits, if the config reports
    them, are what it gives the largest of.

    Args:
        cfg: of the whole model.
        part: the stage's.
        balance: the routers' biases, of its layers at least.
        remat: what the backward computes again.
        placements: of the stage's parameters, selected as they are; ``()``: they are whole over the
            data axes.
        sh: sharding.
    """

    def begin(params: Params[Tensor], batch: Batch) -> Any:
        return start(
            params,
            batch.tokens,
            cfg,
            images=batch.images,
            remat=remat,
            placements=placements,
            sh=sh,
        )

    def stage(params: Params[Tensor], carry: StageCarry, batch: Batch) -> StageOutput:
        state = begin(params, batch) if part.first else _enter(carry)
        state, reports = run_layers(
            params,
            state,
            cfg,
            layers=part.layers,
            balance=balance,
            segments=batch.segments,
            remat=remat,
            placements=placements,
            sh=sh,
        )
        # Zeros where another stage has the part, so that all stages' sums have one structure.
        lm = reports.kl.new_zeros(())
        if part.last:
            hidden = finish(params, state, cfg, placements=placements, sh=sh).hidden
            lm = lm_loss(params, hidden, batch.labels, placements=placements, sh=sh)
        sums = Losses(lm, torch.zeros_like(lm), *reports)
        # A stage seeds the backward of its own KL: it never travels to the last one.
        total = weigh(sums, batch, cfg)
        carry = StageCarry() if part.last else _leave(state)
        # Logits go by themselves: micro-batches are added up, and of these the largest counts.
        return StageOutput(carry, total, sums._replace(logits=()), sums.logits)

    return stage


def stage_carries(
    cfg: Config,
    parts: Sequence[Part],
    batch: Batch,
    dtype: torch.dtype,
    *,
    sh: Sharding = UNSHARDED,
) -> tuple[StageCarry, ...]:
    """What each stage takes of micro-batches like ``batch``, as meta tensors.

    Args:
        cfg: of the whole model.
        parts: all its stages.
        batch: this rank's; its shape counts.
        dtype: of the residual state, that of the embedding in use.
        sh: sharding.
    """
    rows, tokens = batch.tokens.shape
    x = torch.empty(
        rows, tokens // axis_size(sh.sequence), cfg.hidden_size, dtype=dtype, device="meta"
    )
    # The scheme's own start on a meta tensor: no file but the scheme's knows what its state is.
    state = kinds.residual_of(cfg.residual).start(x, cfg.residual)
    first = _leave(state)
    has_blocks = "blocks" in _fields(state)
    configs = layer_configs(cfg)

    def carry(part: Part) -> StageCarry:
        if part.first:
            return StageCarry()
        # Every block that an earlier layer closed is still read, so all of them have arrived.
        opened = sum(c.opens_block for c in configs[: part.layers.start])
        return first._replace(blocks=(x,) * opened if has_blocks else ())

    return tuple(carry(part) for part in parts)


def _leave(state: Any) -> StageCarry:
    """A residual scheme's state as what crosses a cut."""
    if "blocks" not in _fields(state):
        return StageCarry(state)
    # Blocks never change once they are there, so the engine sends each to a rank once.
    return StageCarry(dataclasses.replace(state, blocks=()), tuple(state.blocks))


def _enter(carry: StageCarry) -> Any:
    if "blocks" not in _fields(carry.stream):
        return carry.stream
    return dataclasses.replace(carry.stream, blocks=tuple(carry.blocks))


def _fields(state: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(state)}
