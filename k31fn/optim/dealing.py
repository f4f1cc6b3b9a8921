"""Work on the whole matrices of a model, dealt out to the ranks that hold them.

A matrix may be cut over some ranks and be held alike by others. All of them could do its work; one
does. Which one is decided once, on the host, from shapes alone: blocks of matrices, the most
expensive first, each to the rank of its group with the least to do (Graham 1969: no rank has more
than the mean and one block). Then, round by round::

    parts of each rank's next blocks travel to it       ragged_all_to_all
    y = f(whole matrices)                               while the parts of the next round travel
    parts of y travel back to all ranks that hold them  ragged_all_to_all

A rank has at most the elements of the model's largest matrix (or a million) in work, and as many
arriving.

In the simulated mesh, where a program cannot differ by rank, every rank does the work of all
matrices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from k31fn.parallel import Axis, all_gather_invariant, pslice, ragged_all_to_all
from k31fn.parallel.fsdp import Placement
from k31fn.parallel.overlap import Pending, start, wait
from k31fn.parallel.point_to_point import own_index
from k31fn.typing import Float, Tensor

__all__ = ["Block", "Matrices", "Plan", "axes_of", "run", "run_alike"]

_LEAST = 2**20  # elements of a round that spare many small ones

Work = Callable[[Tensor], Tensor]
"""A function of a batch of matrices ``[matrices rows columns]`` that treats each alone."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of one leaf, and this rank's part of them, seen as ``[batch rows columns]``.

    Attributes:
        batch: matrices beside each other, whole or in part: those of this rank's experts.
        rows: of its part.
        columns: of its part.
        head_dim: columns of one matrix, if there is one per head; 0: all columns.
        row_axes: that cut rows, outermost first.
        column_axes: that cut through the columns of a matrix, outermost first.
        group: ranks that can do the work, in the mesh's order: those that hold parts of the same
            matrices.
    """

    batch: int
    rows: int
    columns: int
    head_dim: int
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]
    group: tuple[Axis, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], head_dim: int, place: Placement | None, axes: tuple[Axis, ...]
    ) -> Matrices:
        """Of a leaf.

        Args:
            shape: of this rank's part, ``[..., in, out]``.
            head_dim: as the attribute.
            place: of its parts; None: it is whole.
            axes: of the mesh, in its order.
        """
        dims = place.dims if place else ((),) * len(shape)
        *batch, rows, columns = shape
        cut = len(dims[-1]) if not head_dim else 0
        while (
            head_dim
            and columns * math.prod(a.size for a in dims[-1][len(dims[-1]) - cut :]) % head_dim
        ):
            cut += 1
        row_axes, column_axes = dims[-2], dims[-1][len(dims[-1]) - cut :]
        apart = [a for own in (*dims[:-2], dims[-1][: len(dims[-1]) - cut]) for a in own]
        group = tuple(a for a in axes if a not in apart)
        return cls(math.prod(batch), rows, columns, head_dim, row_axes, column_axes, group)

    @property
    def shape(self) -> tuple[int, int]:
        """Of one matrix."""
        rows = self.rows * math.prod(a.size for a in self.row_axes)
        return rows, self.head_dim or self.joined

    @property
    def joined(self) -> int:
        """Columns that the ranks of ``column_axes`` have together: of whole matrices."""
        return self.columns * math.prod(a.size for a in self.column_axes)

    @property
    def count(self) -> int:
        """How many matrices the group has in pieces along the dimension that blocks cut."""
        return self.joined // self.head_dim if self.head_dim else self.batch

    def piece(self, block: Block, at: dict[str, int]) -> tuple[slice, slice, slice]:
        """What the rank at these indices has of a block: slices of its part."""
        if not self.head_dim:
            return slice(block.start, block.stop), slice(0, self.rows), slice(0, self.columns)
        first = _index(self.column_axes, at) * self.columns
        columns = (
            min(max(n * self.head_dim - first, 0), self.columns) for n in (block.start, block.stop)
        )
        return slice(0, self.batch), slice(0, self.rows), slice(*columns)

    def inside(self, block: Block, at: dict[str, int]) -> tuple[slice, slice, slice]:
        """The same piece as slices of the whole block ``[batch rows columns]``."""
        batch, _, columns = self.piece(block, at)
        row = _index(self.row_axes, at) * self.rows
        first = _index(self.column_axes, at) * self.columns - block.start * self.head_dim
        where = slice(columns.start + first, columns.stop + first)
        return slice(0, batch.stop - batch.start), slice(row, row + self.rows), where


class Block(NamedTuple):
    """Matrices ``start`` to ``stop`` of a leaf: of its batch, or of its heads with the whole
    batch.
    """

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Rounds:
    """What the ranks of one group do, in the order of ranks: ``blocks[rank][round]``."""

    group: tuple[Axis, ...]
    members: list[dict[str, int]]
    me: int
    blocks: list[list[list[Block]]]


class Plan:
    """Who does the work of which matrices, from one rank's point of view.

    Attributes:
        leaves: of this rank.
        rounds: of each group that it belongs to.
        cost: floating-point operations of Newton-Schulz, up to a factor, of each rank by its
            indices along the axes.
    """

    def __init__(self, leaves: Sequence[Matrices], axes: tuple[Axis, ...]) -> None:
        """Deals out the matrices of ``leaves``; the same on all ranks of ``axes``, real ones, in
        the mesh's order.
        """
        self.leaves = list(leaves)
        self.rounds: list[_Rounds] = []
        self.cost: dict[tuple[int, ...], int] = dict.fromkeys(
            itertools.product(*(range(a.size) for a in axes)), 0
        )
        self._axes, self._limit = axes, max(_LEAST, *(math.prod(m.shape) for m in leaves), 0)
        mine = {a.name: own_index(a) for a in axes}
        groups: dict[tuple[Axis, ...], list[int]] = defaultdict(list)
        for i, matrices in enumerate(self.leaves):
            groups[matrices.group].append(i)
        for group in sorted(
            groups, key=lambda g: (math.prod(a.size for a in g), [a.name for a in g])
        ):
            self._deal(group, groups[group], mine)

    def _deal(self, group: tuple[Axis, ...], leaves: list[int], mine: dict[str, int]) -> None:
        """The blocks of the leaves of one group, to the ranks of each set that differ along it
        only.
        """
        blocks = [b for i in leaves for b in self._blocks(i, math.prod(a.size for a in group))]
        blocks.sort(key=lambda b: (-self._cost(b), b))
        members = _members(group)
        for others in _members(tuple(a for a in self._axes if a not in group)):
            keys = [tuple({**others, **at}[a.name] for a in self._axes) for at in members]
            todo = [(self.cost[key], i) for i, key in enumerate(keys)]
            heapq.heapify(todo)
            dealt: list[list[Block]] = [[] for _ in members]
            for block in blocks:
                cost, i = todo[0]
                dealt[i].append(block)
                heapq.heapreplace(todo, (cost + self._cost(block), i))
            self.cost.update((keys[i], cost) for cost, i in todo)
            if all(mine[name] == index for name, index in others.items()):
                me = next(
                    i for i, at in enumerate(members) if all(mine[n] == k for n, k in at.items())
                )
                self.rounds.append(_Rounds(group, members, me, [self._pack(own) for own in dealt]))

    def _blocks(self, leaf: int, ranks: int) -> list[Block]:
        """A leaf in so many blocks that each rank may get one, none of them too large."""
        m = self.leaves[leaf]
        size = math.prod(m.shape) * (m.batch if m.head_dim else 1)
        step = max(1, min(-(-m.count // ranks), self._limit // size))
        return [Block(leaf, a, min(a + step, m.count)) for a in range(0, m.count, step)]

    def _cost(self, block: Block) -> int:
        m = self.leaves[block.leaf]
        short, long = sorted(m.shape)
        return (
            (block.stop - block.start)
            * (m.batch if m.head_dim else 1)
            * short
            * short
            * (2 * long + short)
        )

    def _pack(self, blocks: list[Block]) -> list[list[Block]]:
        """One rank's blocks by round."""
        rounds: list[list[Block]] = []
        room = 0
        for block in blocks:
            m = self.leaves[block.leaf]
            size = (block.stop - block.start) * math.prod(m.shape) * (m.batch if m.head_dim else 1)
            if not rounds or size > room:
                rounds.append([])
                room = self._limit
            rounds[-1].append(block)
            room -= size
        return rounds


def run(
    f: Work, parts: Sequence[Tensor], plan: Plan
) -> Iterator[tuple[int, Float[Tensor, "batch rows columns"]]]:
    """``f`` of all matrices: for each leaf its number and this rank's part of the result, as they
    come.

    Args:
        f: what is done; keeps shape and dtype.
        parts: of this rank, ``[batch rows columns]`` as :class:`Matrices` says, all of one dtype
            and device.
        plan: whose leaves they are.
    """
    done: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for rounds in plan.rounds:
        for block, part in (_exchange if rounds.group else _stay)(f, parts, plan, rounds):
            m, kept = plan.leaves[block.leaf], done[block.leaf]
            kept[block.start] = part
            dim, size = (2, m.columns) if m.head_dim else (0, m.batch)
            if sum(p.shape[dim] for p in kept.values()) == size:
                pieces = [p for _, p in sorted(done.pop(block.leaf).items()) if p.numel()]
                yield block.leaf, torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def _stay(
    f: Work, parts: Sequence[Tensor], plan: Plan, rounds: _Rounds
) -> Iterator[tuple[Block, Tensor]]:
    """Blocks that no other rank has anything of, and what becomes of them."""
    for own in rounds.blocks[0]:
        blocks = [parts[b.leaf][plan.leaves[b.leaf].piece(b, {})] for b in own]
        yield from zip(own, _work(f, blocks, plan, own), strict=True)


def _exchange(
    f: Work, parts: Sequence[Tensor], plan: Plan, rounds: _Rounds
) -> Iterator[tuple[Block, Tensor]]:
    """All blocks of a group, and this rank's pieces of what becomes of them."""
    count = max(len(own) for own in rounds.blocks)
    arriving = _send_parts(parts, plan, rounds, 0)
    for k in range(count):
        own, arrived = _at(rounds, rounds.me, k), arriving
        blocks = _whole(wait(arrived), plan, rounds, own)
        if k + 1 < count:
            arriving = _send_parts(parts, plan, rounds, k + 1)
        returned = _send_back(_work(f, blocks, plan, own), parts[0], plan, rounds, k)
        yield from _returned(wait(returned), plan, rounds, k)


def run_alike(
    f: Work, x: Float[Tensor, "batch rows columns"], m: Matrices
) -> Float[Tensor, "batch rows columns"]:
    """``f`` of the matrices of one leaf, on every rank: this rank's part of the result."""
    moves = [(a, 1) for a in reversed(m.row_axes)] + [(a, 2) for a in reversed(m.column_axes)]
    for axis, dim in moves:
        x = all_gather_invariant(x, axis, dim)
    y = _join(f(_split(x, m)), m, x.shape[0])
    for axis, dim in reversed(moves):
        y = pslice(y, axis, dim)
    return y


def axes_of(places: Sequence[Placement]) -> tuple[Axis, ...]:
    """The axes of the mesh, in its order, whose ranks hold other parts or the same part of one of
    these leaves.
    """
    found = {a for place in places for a in (*place.axes, *place.vary)}
    return tuple(sorted(found, key=lambda a: a.host.names.index(a.name) if a.host else 0))


def _index(axes: tuple[Axis, ...], at: dict[str, int]) -> int:
    index = 0
    for axis in axes:
        index = index * axis.size + at[axis.name]
    return index


def _members(axes: tuple[Axis, ...]) -> list[dict[str, int]]:
    """The indices of all ranks of these axes, in the order of ranks."""
    names = [a.name for a in axes]
    return [
        dict(zip(names, index, strict=True))
        for index in itertools.product(*(range(a.size) for a in axes))
    ]


def _at(rounds: _Rounds, rank: int, k: int) -> list[Block]:
    own = rounds.blocks[rank]
    return own[k] if k < len(own) else []


def _sends(m: Matrices, source: dict[str, int], worker: dict[str, int]) -> bool:
    """Whether, of all ranks that hold this part, it is ``source`` that sends it: the one most like
    the worker.
    """
    cut = {a.name for a in (*m.row_axes, *m.column_axes)}
    return all(source[a.name] == worker[a.name] for a in m.group if a.name not in cut)


def _size(m: Matrices, block: Block, at: dict[str, int]) -> int:
    return math.prod(s.stop - s.start for s in m.piece(block, at))


def _send_parts(parts: Sequence[Tensor], plan: Plan, rounds: _Rounds, k: int) -> Pending:
    mine = rounds.members[rounds.me]
    pieces, send, recv = [], [], []
    for rank, worker in enumerate(rounds.members):
        theirs = [b for b in _at(rounds, rank, k) if _sends(plan.leaves[b.leaf], mine, worker)]
        pieces += [parts[b.leaf][plan.leaves[b.leaf].piece(b, mine)].flatten() for b in theirs]
        send.append(sum(_size(plan.leaves[b.leaf], b, mine) for b in theirs))
        own = [b for b in _at(rounds, rounds.me, k) if _sends(plan.leaves[b.leaf], worker, mine)]
        recv.append(sum(_size(plan.leaves[b.leaf], b, worker) for b in own))
    return start(ragged_all_to_all, _cat(pieces, parts[0]), rounds.group, send, recv)


def _whole(received: Tensor, plan: Plan, rounds: _Rounds, own: list[Block]) -> list[Tensor]:
    """This rank's blocks ``[batch rows columns]`` out of what their holders sent."""
    mine = rounds.members[rounds.me]
    where = [(s, b) for s in rounds.members for b in own if _sends(plan.leaves[b.leaf], s, mine)]
    pieces = received.split([_size(plan.leaves[b.leaf], b, s) for s, b in where])
    grids: dict[Block, dict[int, dict[int, Tensor]]] = {b: defaultdict(dict) for b in own}
    for (source, block), piece in zip(where, pieces, strict=True):
        m = plan.leaves[block.leaf]
        shape = [s.stop - s.start for s in m.piece(block, source)]
        row, column = _index(m.row_axes, source), _index(m.column_axes, source)
        grids[block][row][column] = piece.view(shape)
    return [_tiled(grids[block]) for block in own]


def _tiled(grid: dict[int, dict[int, Tensor]]) -> Tensor:
    rows = [[row[j] for j in sorted(row) if row[j].numel()] for _, row in sorted(grid.items())]
    joined = [torch.cat(row, 2) if len(row) > 1 else row[0] for row in rows]
    return torch.cat(joined, 1) if len(joined) > 1 else joined[0]


def _work(f: Work, blocks: list[Tensor], plan: Plan, own: list[Block]) -> list[Tensor]:
    """``f`` of the blocks, those of equal matrices at once."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, block in enumerate(own):
        alike[plan.leaves[block.leaf].shape].append(i)
    results = list(blocks)
    for numbers in alike.values():
        split = [_split(blocks[i], plan.leaves[own[i].leaf]) for i in numbers]
        y = f(torch.cat(split) if len(split) > 1 else split[0])
        for i, part in zip(numbers, y.split([len(s) for s in split]), strict=True):
            results[i] = _join(part, plan.leaves[own[i].leaf], blocks[i].shape[0])
    return results


def _split(
    x: Float[Tensor, "batch rows columns"], m: Matrices
) -> Float[Tensor, "matrices rows one"]:
    return x.unflatten(-1, (-1, m.head_dim or x.shape[-1])).movedim(-2, -3).flatten(0, 1)


def _join(
    y: Float[Tensor, "matrices rows one"], m: Matrices, batch: int
) -> Float[Tensor, "batch rows columns"]:
    return y.unflatten(0, (batch, -1)).movedim(-3, -2).flatten(-2)


def _send_back(results: list[Tensor], like: Tensor, plan: Plan, rounds: _Rounds, k: int) -> Pending:
    mine, own = rounds.members[rounds.me], _at(rounds, rounds.me, k)
    pieces, send, recv = [], [], []
    for rank, holder in enumerate(rounds.members):
        for block, y in zip(own, results, strict=True):
            pieces.append(y[plan.leaves[block.leaf].inside(block, holder)].flatten())
        send.append(sum(_size(plan.leaves[b.leaf], b, holder) for b in own))
        recv.append(sum(_size(plan.leaves[b.leaf], b, mine) for b in _at(rounds, rank, k)))
    return start(ragged_all_to_all, _cat(pieces, like), rounds.group, send, recv)


def _returned(
    received: Tensor, plan: Plan, rounds: _Rounds, k: int
) -> Iterator[tuple[Block, Tensor]]:
    """This rank's pieces of all blocks of a round."""
    mine = rounds.members[rounds.me]
    blocks = [b for rank in range(len(rounds.members)) for b in _at(rounds, rank, k)]
    pieces = received.split([_size(plan.leaves[b.leaf], b, mine) for b in blocks])
    for block, piece in zip(blocks, pieces, strict=True):
        yield (
            block,
            piece.view([s.stop - s.start for s in plan.leaves[block.leaf].piece(block, mine)]),
        )


def _cat(pieces: list[Tensor], like: Tensor) -> Tensor:
    if not pieces:
        return like.new_empty(0)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
