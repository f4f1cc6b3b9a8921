"""Runs a schedule on one rank.

Before every action the rank issues what it may, in the order of
:func:`~k31fn.parallel.pipeline.messages.messages`: sends of what it has made, and receives ahead of
their use up to the next send. The residuals of a stage are its pullback: they live from its forward
until its backward (of both parts) ends. What a stage makes again for its backward without a
cotangent (:func:`k31fn.parallel.scan.rebuilds`) is made after the cotangent was asked for and
before it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import split_vjp, vjp
from k31fn.parallel.axis import Axes
from k31fn.parallel.collective_record import note_event
from k31fn.parallel.collectives import axis_size
from k31fn.parallel.pipeline.actions import Action, Schedule
from k31fn.parallel.pipeline.carry import StageCarry, WireFormat
from k31fn.parallel.pipeline.mailbox import Mailbox
from k31fn.parallel.pipeline.messages import sent_by, taken_by
from k31fn.parallel.pipeline.timeline import check
from k31fn.parallel.scan import rebuilds

__all__ = ["PipelineResult", "Stage", "StageOutput", "run"]


class StageOutput(NamedTuple):
    """What a stage computes of a micro-batch.

    Attributes:
        carry: for the next stage.
        loss: the scalar that this stage adds to the training loss; ``()`` for nothing.
        sums: a tree of tensors to be summed over micro-batches, without gradient.
        largest: a tree of tensors of which the largest over micro-batches is kept, without
            gradient.
    """

    carry: StageCarry
    loss: Any = ()
    sums: Any = ()
    largest: Any = ()


Stage = Callable[[Any, StageCarry, Any], StageOutput]
"""``stage(params, carry, batch)``, a pure function; everything in it that is differentiated is an
argument.
"""


class PipelineResult(NamedTuple):
    """What a rank has of a step.

    Attributes:
        loss: summed over its stages and the micro-batches; ``()`` if none of its stages has a loss.
        sums: of each of its stages, summed over micro-batches.
        largest: of each of its stages, the largest over micro-batches.
        grads: of each of its stages' parameters, summed over micro-batches.
        num_live: most residual sets alive at once.
    """

    loss: Any
    sums: tuple[Any, ...]
    largest: tuple[Any, ...]
    grads: tuple[Any, ...]
    num_live: int


def run(
    schedule: Schedule,
    stages: Sequence[Stage],
    params: Sequence[Any],
    batches: Sequence[Any],
    *,
    axis: Axes,
    carries: Sequence[StageCarry],
) -> PipelineResult:
    """Loss, sums and gradients of this rank's stages.

    Args:
        schedule: the table.
        stages: of this rank, one per chunk.
        params: of each of them.
        batches: the micro-batches, of equal shapes; every rank has all.
        axis: of the pipeline; ``()`` for one rank.
        carries: what each stage of the pipeline takes, by global number (shapes and dtypes; meta
            tensors will do).

    Raises:
        ValueError: a table that is no schedule (:func:`~k31fn.parallel.pipeline.check`), another
            number of ranks, stages, parameters, micro-batches or carries than the schedule's, a
            simulated mesh, or a stage that gives another carry than is said.
    """
    for name, given, expected in (
        ("axis", axis_size(axis), schedule.num_ranks),
        ("stages", len(stages), schedule.num_chunks),
        ("params", len(params), schedule.num_chunks),
        ("batches", len(batches), schedule.num_micro_batches),
        ("carries", len(carries), schedule.num_stages),
    ):
        if given != expected:
            raise ValueError(f"pipeline: {name} has {given}, the schedule {expected}")
    check(schedule)
    rank = _Rank(
        schedule, stages, params, batches, axis, WireFormat(tuple(carries), schedule.num_ranks)
    )
    perform = {
        "forward": rank.forward,
        "backward": rank.backward,
        "backward_input": rank.backward_input,
        "backward_weight": rank.backward_weight,
    }
    for action in schedule.rows[rank.mail.index]:
        rank.mail.progress()
        perform[action.kind](action)
    return rank.finish()


class _Rank:
    """One rank in the middle of a step."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        params: Sequence[Any],
        batches: Sequence[Any],
        axis: Axes,
        wire: WireFormat,
    ) -> None:
        self.schedule, self.stages, self.params, self.batches, self.wire = (
            schedule,
            stages,
            params,
            batches,
            wire,
        )
        self.mail = Mailbox(schedule, wire, axis, tree.leaves(batches[0])[0].device)
        self.pulls: dict[
            Action, tuple[Callable[..., Any], Any]
        ] = {}  # by forward: the pullback, and the loss's seed
        self.rebuilds: dict[Action, list[Callable[[], None]]] = {}  # by forward
        self.put_off: dict[
            Action, Callable[[], Any]
        ] = {}  # by forward: the rest of a split pullback
        self.blocks: dict[int, list[Tensor]] = {}  # by micro-batch: those that this rank has
        self.deposits: dict[
            int, dict[int, Tensor]
        ] = {}  # by micro-batch and block: its cotangent so far
        self.loss: Any = ()
        self.sums: list[Any] = [()] * len(stages)
        self.largest: list[Any] = [()] * len(stages)
        self.grads: list[list[Tensor]] = [[] for _ in stages]
        self.num_live = 0

    def forward(self, action: Action) -> None:
        i, s, chunk = action.micro_batch, action.stage, action.stage // self.schedule.num_ranks
        message, blocks = taken_by(action, self.schedule), self.blocks.setdefault(i, [])
        stream, fresh = self.wire.parts(s, self.mail.take(message) if message else [])
        blocks += fresh
        stage, batch, num_taken = self.stages[chunk], self.batches[i], len(blocks)

        def compute(params: Any, stream: Any, blocks: tuple[Tensor, ...]) -> Any:
            out = stage(params, StageCarry(stream, blocks), batch)
            return (out.carry.stream, out.carry.blocks[num_taken:], out.loss), (
                out.sums,
                out.largest,
            )

        note_event(str(action))
        differentiate = split_vjp if self.schedule.split else vjp
        with rebuilds() as self.rebuilds[action]:
            (stream, made, loss), pull, (sums, largest) = differentiate(
                compute, self.params[chunk], stream, tuple(blocks), has_aux=True
            )
        self.wire.check(s, stream, made)
        blocks += made
        self.pulls[action] = pull, tree.map(torch.ones_like, loss)
        self.num_live = max(self.num_live, len(self.pulls) + len(self.put_off))
        self.loss, self.sums[chunk] = (
            _joined(torch.add, self.loss, loss),
            _joined(torch.add, self.sums[chunk], sums),
        )
        self.largest[chunk] = _joined(torch.maximum, self.largest[chunk], largest)
        if to := sent_by(action, self.schedule):
            self.mail.give(to, [*tree.leaves(stream), *(blocks[j] for j in self.wire.fresh(s + 1))])

    def backward(self, action: Action) -> None:
        pull, ct = self._cotangent(action)
        note_event(str(action))
        grads, *of_carry = pull(ct)
        self._accumulate(action, grads)
        self._return(action, *of_carry)

    def backward_input(self, action: Action) -> None:
        pull, ct = self._cotangent(action)
        note_event(str(action))
        of_carry, self.put_off[_forward(action)] = pull(ct)
        self._return(action, *of_carry)

    def backward_weight(self, action: Action) -> None:
        note_event(str(action))
        self._accumulate(action, self.put_off.pop(_forward(action))())

    def finish(self) -> PipelineResult:
        self.mail.finish()
        assert not any(self.deposits.values())
        structures = [tree.flatten(p)[1] for p in self.params]
        grads = tuple(tree.unflatten(s, g) for s, g in zip(structures, self.grads, strict=True))
        return PipelineResult(
            self.loss, tuple(self.sums), tuple(self.largest), grads, self.num_live
        )

    def _cotangent(self, action: Action) -> tuple[Callable[..., Any], Any]:
        """A stage's pullback, and what it takes: the cotangents of its stream, its new blocks and
        its loss.
        """
        message, deposits = (
            taken_by(action, self.schedule),
            self.deposits.setdefault(action.micro_batch, {}),
        )
        if found := self.rebuilds.pop(_forward(action)):
            note_event(f"rebuild for {action}")
            found[-1]()
        stream: Any = ()
        if message:
            stream, of_blocks = self.wire.parts(message.source, self.mail.take(message))
            _deposit(deposits, self.wire.fresh(message.source), of_blocks)
        pull, seed = self.pulls.pop(_forward(action))
        return pull, (stream, tuple(deposits.pop(j) for j in self.wire.made(action.stage)), seed)

    def _return(self, action: Action, of_stream: Any, of_blocks: tuple[Tensor, ...]) -> None:
        """Keeps the cotangents of blocks that an earlier stage of this rank has read too; the
        others go back.
        """
        i, s = action.micro_batch, action.stage
        deposits = self.deposits[i]
        _deposit(deposits, range(len(of_blocks)), of_blocks)
        if to := sent_by(action, self.schedule):
            self.mail.give(
                to, [*tree.leaves(of_stream), *(deposits.pop(j) for j in self.wire.fresh(s))]
            )
        if s < self.schedule.num_ranks:  # its first stage, so its last backward
            del self.blocks[i]

    def _accumulate(self, action: Action, grads: Any) -> None:
        total, new = self.grads[action.stage // self.schedule.num_ranks], tree.leaves(grads)
        if not total:
            total += new
            return
        for k in range(
            len(total)
        ):  # leaf by leaf: two whole sets of gradients never live at once for longer
            total[k] = total[k] + new[k]
            new[k] = None


def _forward(action: Action) -> Action:
    return action._replace(kind="forward")


def _deposit(
    deposits: dict[int, Tensor], blocks: Sequence[int], cotangents: Sequence[Tensor]
) -> None:
    for j, ct in zip(blocks, cotangents, strict=True):
        deposits[j] = deposits[j] + ct if j in deposits else ct


def _joined(f: Callable[[Tensor, Tensor], Tensor], total: Any, new: Any) -> Any:
    return tree.map(f, total, new) if tree.leaves(total) else new
