"""Owners of matrices: which rank does the work on which whole matrix of a model.

A matrix may be cut over some ranks and be held alike by others. All of them could do its work; one
does, its owner. Owners are chosen once, on the host, from shapes alone: blocks of matrices, the
most expensive first, each to the rank of its group with the least to do (Graham 1969: no rank has
more than the mean and one block). :mod:`k31fn.optim.matrix_work` moves the parts and does the work,
round by round.

A round has at most the elements of the model's largest matrix, but a million at least and 64
million at most, unless one matrix has more: 128 MiB of them in bfloat16.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from k31fn.optim.matrices import Matrices, MatrixBlock
from k31fn.parallel.axis import Axis, num_ranks
from k31fn.parallel.collectives import own_index

__all__ = ["GroupRounds", "MatrixOwners"]

_LEAST = 2**20  # elements of a round at least: many small matrices would each cost an exchange
_MOST = 2**26  # at most: Newton-Schulz holds some four tensors of that size


@dataclass(frozen=True)
class GroupRounds:
    """What the ranks of one group do, round by round.

    Attributes:
        axes: of the group; ``()``: this rank alone.
        members: coordinates of its ranks, in their order.
        rank: this rank's number among them.
        blocks: that each owns: ``blocks[rank][round]``.
    """

    axes: tuple[Axis, ...]
    members: list[dict[str, int]]
    rank: int
    blocks: list[list[list[MatrixBlock]]]

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's."""
        return self.members[self.rank]

    @property
    def count(self) -> int:
        """Rounds of the rank that has most."""
        return max(len(rounds) for rounds in self.blocks)

    def owned(self, rank: int, k: int) -> list[MatrixBlock]:
        """The blocks of a rank in round ``k``; none once it has done all of its own."""
        rounds = self.blocks[rank]
        return rounds[k] if k < len(rounds) else []


class MatrixOwners:
    """Who does the work of which matrices, from one rank's point of view.

    Attributes:
        leaves: of this rank.
        groups: the rounds of each group that it belongs to.
        cost: floating-point operations of Newton-Schulz, up to a factor, of each rank by its
            indices along the axes.
    """

    def __init__(self, leaves: Sequence[Matrices], axes: tuple[Axis, ...]) -> None:
        """Deals out the matrices of ``leaves``.

        Every rank comes to the same result by itself, so nothing is exchanged.

        Args:
            leaves: of this rank, the same on all ranks but for what they have of them.
            axes: of the mesh, real ones, in its order.
        """
        self.leaves = list(leaves)
        self.groups: list[GroupRounds] = []
        self.cost: dict[tuple[int, ...], int] = dict.fromkeys(_indices(axes), 0)
        self._axes = axes
        self._limit = _LEAST
        coordinate = {axis.name: own_index(axis) for axis in axes}
        leaves_of: dict[tuple[Axis, ...], list[int]] = defaultdict(list)
        for number, leaf in enumerate(self.leaves):
            leaves_of[leaf.group].append(number)
            self._limit = max(self._limit, min(math.prod(leaf.shape), _MOST))
        # Small groups first: their blocks have few owners to choose from, and the large ones level
        # out what that leaves uneven. Names make the order the same on every rank.
        for group in sorted(leaves_of, key=lambda g: (num_ranks(g), [axis.name for axis in g])):
            self._deal(group, leaves_of[group], coordinate)

    def _deal(self, group: tuple[Axis, ...], leaves: list[int], coordinate: dict[str, int]) -> None:
        """Deals out the leaves of one group, in each set of ranks that differ along it only."""
        blocks: list[MatrixBlock] = []
        for leaf in leaves:
            blocks += self._cut(leaf, num_ranks(group))
        # The largest first: small ones fill the gaps that they leave. Equal ones by their number.
        blocks.sort(key=lambda block: (-self._cost(block), block))
        members = _coordinates(group)
        for others in _coordinates(tuple(axis for axis in self._axes if axis not in group)):
            dealt = self._deal_among(members, others, blocks)
            # Sets that this rank is not of are dealt out for their cost, from which later groups go
            # on.
            if all(coordinate[name] == index for name, index in others.items()):
                rank = members.index({axis.name: coordinate[axis.name] for axis in group})
                rounds = list(map(self._pack, dealt))
                self.groups.append(GroupRounds(group, members, rank, rounds))

    def _deal_among(
        self, members: list[dict[str, int]], others: dict[str, int], blocks: list[MatrixBlock]
    ) -> list[list[MatrixBlock]]:
        """The blocks that each of ``members`` gets, whose other indices are ``others``.

        Adds their cost to what these ranks had to do before.
        """
        keys: list[tuple[int, ...]] = []
        busy: list[tuple[int, int]] = []
        for number, member in enumerate(members):
            indices = others | member
            key = tuple(indices[axis.name] for axis in self._axes)
            keys.append(key)
            busy.append((self.cost[key], number))
        # The least busy rank is on top; of equally busy ones the first, on every rank alike.
        heapq.heapify(busy)
        dealt: list[list[MatrixBlock]] = [[] for _ in members]
        for block in blocks:
            cost, number = busy[0]
            dealt[number].append(block)
            heapq.heapreplace(busy, (cost + self._cost(block), number))
        for cost, number in busy:
            self.cost[keys[number]] = cost
        return dealt

    def _cut(self, leaf: int, ranks: int) -> list[MatrixBlock]:
        """A leaf in so many blocks that each rank may get one, none of them too large."""
        matrices = self.leaves[leaf]
        count = matrices.count
        size = math.prod(matrices.shape) * matrices.matrices_per_piece
        # At least one matrix: the largest may not fit in a round but must be done.
        step = max(1, min(-(-count // ranks), self._limit // size))
        return [MatrixBlock(leaf, a, min(a + step, count)) for a in range(0, count, step)]

    def _cost(self, block: MatrixBlock) -> int:
        """Multiplications of one Newton-Schulz step.

        With short side m and long side n: two products of m m n each, and one of m m m.
        """
        matrices = self.leaves[block.leaf]
        short, long = sorted(matrices.shape)
        count = (block.stop - block.start) * matrices.matrices_per_piece
        return count * short * short * (2 * long + short)

    def _pack(self, blocks: list[MatrixBlock]) -> list[list[MatrixBlock]]:
        """One rank's blocks by round."""
        rounds: list[list[MatrixBlock]] = []
        room = 0
        for block in blocks:
            matrices = self.leaves[block.leaf]
            count = (block.stop - block.start) * matrices.matrices_per_piece
            size = count * math.prod(matrices.shape)
            if not rounds or size > room:
                rounds.append([])
                room = self._limit
            rounds[-1].append(block)
            room -= size
        return rounds


def _coordinates(axes: tuple[Axis, ...]) -> list[dict[str, int]]:
    """The indices of all ranks of these axes, in the order of ranks."""
    names = [axis.name for axis in axes]
    coordinates: list[dict[str, int]] = []
    for index in _indices(axes):
        coordinates.append(dict(zip(names, index, strict=True)))
    return coordinates


def _indices(axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
    """The same as tuples in the order of ``axes``."""
    return list(itertools.product(*(range(axis.size) for axis in axes)))
