"""The run of a schedule on one rank.

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
from k31fn.autodiff.split_vjp import split_vjp
from k31fn.autodiff.transforms import vjp
from k31fn.parallel.axis import Axes
from k31fn.parallel.collective_record import note_event
from k31fn.parallel.collectives import axis_size
from k31fn.parallel.pipeline.actions import Action, Schedule
from k31fn.parallel.pipeline.carry import StageCarry, WireFormat
from k31fn.parallel.pipeline.mailbox import Mailbox
from k31fn.parallel.pipeline.messages import Message
from k31fn.parallel.pipeline.timeline import check
from k31fn.parallel.scan.kept_layers import rebuilds

__all__ = ["PipelineResult", "Stage", "StageOutput", "run"]


class StageOutput(NamedTuple):
    """The results of a stage on a micro-batch.

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
    """The results of a rank in a step.

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
    """Runs this rank's row, and gives loss, sums and gradients of its stages.

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
    for name, actual, expected in (
        ("axis", axis_size(axis), schedule.num_ranks),
        ("stages", len(stages), schedule.num_chunks),
        ("params", len(params), schedule.num_chunks),
        ("batches", len(batches), schedule.num_micro_batches),
        ("carries", len(carries), schedule.num_stages),
    ):
        if actual != expected:
            raise ValueError(f"pipeline: {name} has {actual}, the schedule {expected}")
    # Before anything is sent: a table that cannot end would hang all ranks instead.
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
        # Before the action, not in it: what this rank owes others travels while it computes.
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
        self.schedule = schedule
        self.stages = stages
        self.params = params
        self.batches = batches
        self.wire = wire
        self.mail = Mailbox(schedule, wire, axis, tree.leaves(batches[0])[0].device)
        # By the forward that made them. A pullback holds the residuals of its stage, so what is in
        # these two is what lives between forward and backward.
        self.pulls: dict[Action, tuple[Callable[..., Any], Any]] = {}  # with the loss's seed
        self.weight_pulls: dict[Action, Callable[[], Any]] = {}  # what a split pullback leaves
        self.rebuilds: dict[Action, list[Callable[[], None]]] = {}
        # By micro-batch: the blocks that this rank has, and their cotangents so far.
        self.blocks: dict[int, list[Tensor]] = {}
        self.deposits: dict[int, dict[int, Tensor]] = {}
        self.loss: Any = ()
        self.sums: list[Any] = [()] * len(stages)
        self.largest: list[Any] = [()] * len(stages)
        self.grads: list[list[Tensor]] = [[] for _ in stages]
        self.num_live = 0

    def forward(self, action: Action) -> None:
        i = action.micro_batch
        s = action.stage
        chunk = s // self.schedule.num_ranks
        blocks = self.blocks.setdefault(i, [])
        message = Message.taken_by(action, self.schedule)
        stream, fresh = self.wire.parts(s, self.mail.take(message) if message else [])
        blocks += fresh
        num_taken = len(blocks)
        stage = self.stages[chunk]
        batch = self.batches[i]

        def compute(params: Any, stream: Any, blocks: tuple[Tensor, ...]) -> Any:
            out = stage(params, StageCarry(stream, blocks), batch)
            # Only the blocks of its own: what it passes on as it was is no output, or its
            # cotangent would be counted here and where it was made.
            outputs = (out.carry.stream, out.carry.blocks[num_taken:], out.loss)
            return outputs, (out.sums, out.largest)

        note_event(str(action))
        differentiate = split_vjp if self.schedule.split else vjp
        with rebuilds() as self.rebuilds[action]:
            outputs, pull, (sums, largest) = differentiate(
                compute, self.params[chunk], stream, tuple(blocks), has_aux=True
            )
        stream, new_blocks, loss = outputs
        self.wire.check(s, stream, new_blocks)
        blocks += new_blocks
        self.pulls[action] = pull, tree.map(torch.ones_like, loss)
        self.num_live = max(self.num_live, len(self.pulls) + len(self.weight_pulls))
        self.loss = _combine(torch.add, self.loss, loss)
        self.sums[chunk] = _combine(torch.add, self.sums[chunk], sums)
        self.largest[chunk] = _combine(torch.maximum, self.largest[chunk], largest)
        answer = Message.sent_by(action, self.schedule)
        if answer:
            tensors = tree.leaves(stream)
            tensors += [blocks[j] for j in self.wire.fresh(s + 1)]
            self.mail.give(answer, tensors)

    def backward(self, action: Action) -> None:
        pull, ct = self._cotangent(action)
        note_event(str(action))
        grads, stream_ct, block_cts = pull(ct)
        self._accumulate(action, grads)
        self._return(action, stream_ct, block_cts)

    def backward_input(self, action: Action) -> None:
        pull, ct = self._cotangent(action)
        note_event(str(action))
        (stream_ct, block_cts), self.weight_pulls[_forward(action)] = pull(ct)
        self._return(action, stream_ct, block_cts)

    def backward_weight(self, action: Action) -> None:
        note_event(str(action))
        pull = self.weight_pulls.pop(_forward(action))
        self._accumulate(action, pull())

    def finish(self) -> PipelineResult:
        self.mail.finish()
        assert not any(self.deposits.values())
        grads: list[Any] = []
        for params, leaves in zip(self.params, self.grads, strict=True):
            _, structure = tree.flatten(params)
            grads.append(tree.unflatten(structure, leaves))
        return PipelineResult(
            self.loss, tuple(self.sums), tuple(self.largest), tuple(grads), self.num_live
        )

    def _cotangent(self, action: Action) -> tuple[Callable[..., Any], Any]:
        """A stage's pullback, and what it takes: the cotangents of its stream, its new blocks and
        its loss.
        """
        message = Message.taken_by(action, self.schedule)
        deposits = self.deposits.setdefault(action.micro_batch, {})
        stage_rebuilds = self.rebuilds.pop(_forward(action))
        if stage_rebuilds:
            note_event(f"rebuild for {action}")
            # The last group of layers: its backward comes first. Its cotangent is on its way, for
            # its receive is issued, and is waited for below.
            rebuild = stage_rebuilds[-1]
            rebuild()
        stream_ct: Any = ()
        if message:
            stream_ct, block_cts = self.wire.parts(message.source, self.mail.take(message))
            _deposit(deposits, self.wire.fresh(message.source), block_cts)
        pull, seed = self.pulls.pop(_forward(action))
        # All that read them have deposited: the later stages of this rank, and those behind the
        # message.
        new_cts = tuple(deposits.pop(j) for j in self.wire.new(action.stage))
        return pull, (stream_ct, new_cts, seed)

    def _return(self, action: Action, stream_ct: Any, block_cts: tuple[Tensor, ...]) -> None:
        """Keeps the cotangents of blocks that an earlier stage of this rank has read too; the
        others go back.
        """
        i = action.micro_batch
        s = action.stage
        deposits = self.deposits[i]
        _deposit(deposits, range(len(block_cts)), block_cts)
        answer = Message.sent_by(action, self.schedule)
        if answer:
            tensors = tree.leaves(stream_ct)
            tensors += [deposits.pop(j) for j in self.wire.fresh(s)]
            self.mail.give(answer, tensors)
        if s < self.schedule.num_ranks:
            del self.blocks[i]  # it was the rank's first stage, so its last backward

    def _accumulate(self, action: Action, grads: Any) -> None:
        total = self.grads[action.stage // self.schedule.num_ranks]
        new = tree.leaves(grads)
        if not total:
            total += new
            return
        # Leaf by leaf, so that a total is freed as its sum is made: a third set of gradients, of
        # all sums, never lives beside these two.
        for k, grad in enumerate(new):
            total[k] = total[k] + grad


def _forward(action: Action) -> Action:
    """The forward that a backward, or a part of it, belongs to."""
    return action._replace(kind="forward")


def _deposit(
    deposits: dict[int, Tensor], blocks: Sequence[int], cotangents: Sequence[Tensor]
) -> None:
    for j, ct in zip(blocks, cotangents, strict=True):
        # Not in place: what arrives first may be a buffer of a message, or another's cotangent.
        deposits[j] = deposits[j] + ct if j in deposits else ct


def _combine(f: Callable[[Tensor, Tensor], Tensor], total: Any, new: Any) -> Any:
    """Adds, or takes the larger of, two trees; a stage of the first micro-batch has no total."""
    return tree.map(f, total, new) if tree.leaves(total) else new
