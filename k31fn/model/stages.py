"""The model cut into pipeline stages.

    parts = stages(cfg, stage_ranges(cfg.num_layers, num_stages)) mine = [parts[i] for i in
    table.stages_of(rank)] held = params.init(select(specs(cfg), mine), key)
    # this rank's, in one tree run(table, [make_stage(cfg, p, balance=state) for p in mine],
    [select(held, [p]) for p in mine], batches, ...)

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
from k31fn.model.forward import finish, start
from k31fn.model.layers import Remat, run_layers
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
    if [i for r in ranges for i in r] != list(range(cfg.num_layers)):
        raise ValueError(
            f"stages: ranges {list(ranges)} are not the layers 0..{cfg.num_layers - 1} in order"
        )
    if cfg.num_mtp_layers:
        raise ValueError(
            f"model.Config.mtp={cfg.mtp} with {len(ranges)} pipeline "
            "stages: that layer reads "
            "the embedding, which the last stage does not have; set mtp=() or mesh.pp=1"
        )
    return tuple(Part(r, i == 0, i == len(ranges) - 1) for i, r in enumerate(ranges))


def select(params: Params[Any], parts: Sequence[Part]) -> Params[Any]:
    """What these stages have of a tree like the model's parameters (values, specs or placements);
    ``()`` elsewhere.
    """
    first, last = any(p.first for p in parts), any(p.last for p in parts)
    numbers = {i for p in parts for i in p.layers}
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
        return next((v for v in values if not isinstance(v, tuple) or v), ())

    whole = {
        f.name: present([getattr(t, f.name) for t in trees]) for f in dataclasses.fields(Params)
    }
    whole["layers"] = tuple(
        present(layer) for layer in zip(*(t.layers for t in trees), strict=True)
    )
    return Params(**whole)


def stage_moe_layers(cfg: Config, parts: Sequence[Part]) -> tuple[int, ...]:
    """Global numbers of the MoE layers of these stages: the rows of their balance state, possibly
    none.
    """
    numbers = {i for p in parts for i in p.layers}
    return tuple(i for i in moe_layers(cfg) if i in numbers)


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
        lm = reports.kl.new_zeros(())
        if part.last:
            hidden = finish(params, state, cfg, placements=placements, sh=sh).hidden
            lm = lm_loss(params, hidden, batch.labels, placements=placements, sh=sh)
        sums = Losses(lm, torch.zeros_like(lm), *reports)
        total, largest = weigh(sums, batch, cfg), sums.logits
        return StageOutput(
            StageCarry() if part.last else _leave(state), total, sums._replace(logits=()), largest
        )

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
    state, configs = kinds.residual_of(cfg.residual).start(x, cfg.residual), layer_configs(cfg)
    first, has_blocks = _leave(state), "blocks" in _fields(state)

    def carry(part: Part) -> StageCarry:
        if part.first:
            return StageCarry()
        opened = sum(c.opens_block for c in configs[: part.layers.start])
        return first._replace(blocks=(x,) * opened if has_blocks else ())

    return tuple(carry(part) for part in parts)


def _leave(state: Any) -> StageCarry:
    """A residual scheme's state as what crosses a cut."""
    if "blocks" not in _fields(state):
        return StageCarry(state)
    return StageCarry(dataclasses.replace(state, blocks=()), tuple(state.blocks))


def _enter(carry: StageCarry) -> Any:
    if "blocks" not in _fields(carry.stream):
        return carry.stream
    return dataclasses.replace(carry.stream, blocks=tuple(carry.blocks))


def _fields(state: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(state)}
