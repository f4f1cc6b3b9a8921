"""Work on whole matrices of which ranks have parts.

Round by round, with the owners of :mod:`k31fn.optim.matrix_owners`::

    parts of each rank's next blocks travel to it       ragged_all_to_all
    y = f(whole matrices)                               while the parts of the next round travel
    parts of y travel back to all ranks that hold them  ragged_all_to_all

So a rank has one round in work and another arriving; parts are made when they are sent. In the
simulated mesh, where a program cannot differ by rank, every rank does the work of all matrices
(:func:`on_every_rank`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from k31fn.optim.matrices import Matrices, MatrixBlock
from k31fn.optim.matrix_owners import GroupRounds, MatrixOwners
from k31fn.parallel.axis import Axis
from k31fn.parallel.collectives import all_gather_invariant, pslice, ragged_all_to_all
from k31fn.parallel.overlap import Pending, start, wait
from k31fn.typing import Float, Tensor

__all__ = ["Part", "Piece", "joined", "on_every_rank", "on_owners"]

Part = Callable[[int, tuple[slice, ...]], Tensor]
"""``part(leaf, index)``: a slice of what this rank has of a leaf, ``[batch rows columns]``. Slices
that cover the leaf are asked for once each.
"""

_Work = Callable[[Tensor], Tensor]
"""A function of a batch of matrices ``[matrices rows columns]`` that treats each alone."""


class Piece(NamedTuple):
    """A slice of this rank's part of a leaf, and what became of it."""

    leaf: int
    place: tuple[slice, ...]
    y: Float[Tensor, "batch rows columns"]


def on_owners(f: _Work, part: Part, like: Tensor, owners: MatrixOwners) -> Iterator[Piece]:
    """``f`` of all matrices: this rank's pieces of the result, as they come.

    Args:
        f: what is done; keeps shape and dtype.
        part: of this rank, all of the dtype and device of ``like``.
        like: any tensor of these.
        owners: of the matrices of these leaves.
    """
    for rounds in owners.groups:
        if rounds.axes:
            yield from _exchange(f, part, like, owners, rounds)
        else:
            yield from _stay(f, part, owners, rounds)


def joined(pieces: Iterable[Piece], leaves: Sequence[Matrices]) -> Iterator[tuple[int, Tensor]]:
    """Each leaf's number and the whole of its pieces, once the last of them is there."""
    results: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for leaf, index, y in pieces:
        matrices = leaves[leaf]
        dim, size = (2, matrices.columns) if matrices.head_dim else (0, matrices.batch)
        if y.numel():
            results[leaf][index[dim].start] = y
        if sum(part.shape[dim] for part in results[leaf].values()) == size:
            of_leaf = results.pop(leaf)
            yield leaf, _cat([part for _, part in sorted(of_leaf.items())], dim)


def on_every_rank(
    f: _Work, x: Float[Tensor, "batch rows columns"], matrices: Matrices
) -> Float[Tensor, "batch rows columns"]:
    """``f`` of the matrices of one leaf, on every rank: this rank's part of the result."""
    # The innermost axis first: parts that lie side by side are joined before larger ones.
    moves: list[tuple[Axis, int]] = []
    for dim, axes in ((1, matrices.row_axes), (2, matrices.column_axes)):
        for axis in reversed(axes):
            x = all_gather_invariant(x, axis, dim)
            moves.append((axis, dim))
    y = matrices.join_heads(f(matrices.split_heads(x)), x.shape[0])
    # Undone in the opposite order, so that each cut finds what its gather had joined.
    for axis, dim in reversed(moves):
        y = pslice(y, axis, dim)
    return y


def _stay(f: _Work, part: Part, owners: MatrixOwners, rounds: GroupRounds) -> Iterator[Piece]:
    """Blocks that no other rank has anything of, and what becomes of them."""
    for owned in rounds.blocks[0]:
        places = [owners.leaves[block.leaf].piece(block, {}) for block in owned]
        blocks = [part(b.leaf, index) for b, index in zip(owned, places, strict=True)]
        results = _work(f, blocks, owners, owned)
        yield from map(Piece, [block.leaf for block in owned], places, results)


def _exchange(
    f: _Work, part: Part, like: Tensor, owners: MatrixOwners, rounds: GroupRounds
) -> Iterator[Piece]:
    """All blocks of a group, and this rank's pieces of what becomes of them."""
    arriving = _send_parts(part, like, owners, rounds, 0)
    for k in range(rounds.count):
        owned = rounds.owned(rounds.rank, k)
        blocks = _assemble(wait(arriving), owners, rounds, owned)
        # Only now: two rounds under way are the memory that a rank has for this.
        if k + 1 < rounds.count:
            arriving = _send_parts(part, like, owners, rounds, k + 1)
        results = _work(f, blocks, owners, owned)
        returned = wait(_send_back(results, like, owners, rounds, k))
        yield from _receive_back(returned, owners, rounds, k)


def _send_parts(
    part: Part, like: Tensor, owners: MatrixOwners, rounds: GroupRounds, k: int
) -> Pending:
    """Starts the exchange that brings the parts of round ``k`` to their owners."""
    coordinate = rounds.coordinate
    pieces, send, recv = [], [], []
    for rank, member in enumerate(rounds.members):
        sent = received = 0
        for block in rounds.owned(rank, k):
            matrices = owners.leaves[block.leaf]
            # asked for also where another rank sends the same part: each slice once, on all ranks
            piece = part(block.leaf, matrices.piece(block, coordinate))
            if matrices.sends(coordinate, member):
                pieces.append(piece.flatten())
                sent += matrices.piece_size(block, coordinate)
        for block in rounds.owned(rounds.rank, k):
            matrices = owners.leaves[block.leaf]
            if matrices.sends(member, coordinate):
                received += matrices.piece_size(block, member)
        send.append(sent)
        recv.append(received)
    return start(ragged_all_to_all, _flat(pieces, like), rounds.axes, send, recv)


def _assemble(
    received: Tensor, owners: MatrixOwners, rounds: GroupRounds, owned: list[MatrixBlock]
) -> list[Tensor]:
    """This rank's blocks ``[batch rows columns]`` out of what their holders sent."""
    # The order of :func:`_send_parts`: by source, and of each source by block.
    arrivals: list[tuple[dict[str, int], MatrixBlock]] = []
    sizes: list[int] = []
    for source in rounds.members:
        for block in owned:
            matrices = owners.leaves[block.leaf]
            if matrices.sends(source, rounds.coordinate):
                arrivals.append((source, block))
                sizes.append(matrices.piece_size(block, source))
    grids: dict[MatrixBlock, dict[int, dict[int, Tensor]]] = {
        block: defaultdict(dict) for block in owned
    }
    for (source, block), piece in zip(arrivals, received.split(sizes), strict=True):
        matrices = owners.leaves[block.leaf]
        row, column = matrices.grid_index(source)
        grids[block][row][column] = piece.view(matrices.piece_shape(block, source))
    return [_tiled(grids[block]) for block in owned]


def _tiled(grid: dict[int, dict[int, Tensor]]) -> Tensor:
    """A block out of its parts, by row and column; a rank whose columns it misses sent nothing."""
    rows = []
    for _, row in sorted(grid.items()):
        parts = [part for _, part in sorted(row.items()) if part.numel()]
        rows.append(_cat(parts, 2))
    return _cat(rows, 1)


def _work(
    f: _Work, blocks: list[Tensor], owners: MatrixOwners, owned: list[MatrixBlock]
) -> list[Tensor]:
    """``f`` of the blocks, those of equal matrices at once: few large products, not many small."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, block in enumerate(owned):
        by_shape[owners.leaves[block.leaf].shape].append(number)
    results = list(blocks)
    for numbers in by_shape.values():
        heads: list[Tensor] = []
        for number in numbers:
            heads.append(owners.leaves[owned[number].leaf].split_heads(blocks[number]))
        y = f(_cat(heads, 0)).split(list(map(len, heads)))
        for number, part in zip(numbers, y, strict=True):
            matrices = owners.leaves[owned[number].leaf]
            results[number] = matrices.join_heads(part, blocks[number].shape[0])
    return results


def _send_back(
    results: list[Tensor], like: Tensor, owners: MatrixOwners, rounds: GroupRounds, k: int
) -> Pending:
    """Starts the exchange that brings results to all who hold the part: replicas get equal bits."""
    coordinate = rounds.coordinate
    owned = rounds.owned(rounds.rank, k)
    pieces, send, recv = [], [], []
    for rank, holder in enumerate(rounds.members):
        sent = received = 0
        # To every holder, replicas too; most have a part of the block, the rest get no elements.
        for block, y in zip(owned, results, strict=True):
            matrices = owners.leaves[block.leaf]
            pieces.append(y[matrices.piece_in_block(block, holder)].flatten())
            sent += matrices.piece_size(block, holder)
        for block in rounds.owned(rank, k):
            received += owners.leaves[block.leaf].piece_size(block, coordinate)
        send.append(sent)
        recv.append(received)
    return start(ragged_all_to_all, _flat(pieces, like), rounds.axes, send, recv)


def _receive_back(
    received: Tensor, owners: MatrixOwners, rounds: GroupRounds, k: int
) -> Iterator[Piece]:
    """This rank's pieces of all blocks of a round."""
    blocks: list[MatrixBlock] = []
    sizes: list[int] = []
    # The order of :func:`_send_back`: by owner, and of each owner by block.
    for rank in range(len(rounds.members)):
        for block in rounds.owned(rank, k):
            blocks.append(block)
            sizes.append(owners.leaves[block.leaf].piece_size(block, rounds.coordinate))
    for block, y in zip(blocks, received.split(sizes), strict=True):
        matrices = owners.leaves[block.leaf]
        index = matrices.piece(block, rounds.coordinate)
        yield Piece(block.leaf, index, y.view(matrices.piece_shape(block, rounds.coordinate)))


def _flat(pieces: list[Tensor], like: Tensor) -> Tensor:
    """The pieces end to end; none: an empty tensor of the dtype and device of ``like``."""
    return _cat(pieces, 0) if pieces else like.new_empty(0)


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    """``torch.cat``, which would copy a single tensor for nothing."""
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]
