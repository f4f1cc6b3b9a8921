"""Packings against a plain loop over documents, and what is refused."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from k31fn import segments as seg
from k31fn import tree

ROWS, LENGTH = [[3, 2], [1, 1, 4], [], [6]], 6


@pytest.fixture
def packed() -> seg.Segments:
    return seg.from_lengths(ROWS, LENGTH)


def test_from_lengths(packed: seg.Segments) -> None:
    assert packed.ids.tolist() == [[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3], [0] * 6, [1] * 6]
    assert packed.position.tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 0, 0, 1, 2, 3],
        [0] * 6,
        list(range(6)),
    ]


def test_whole() -> None:
    whole = seg.whole(2, 3)
    assert whole.ids.tolist() == [[1, 1, 1]] * 2
    assert whole.position.tolist() == [[0, 1, 2]] * 2


def equal(a: seg.Segments, b: seg.Segments) -> bool:
    return a.ids.equal(b.ids) and a.position.equal(b.position)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_from_ids_equals_from_lengths(packed: seg.Segments, dtype: torch.dtype) -> None:
    rebuilt = seg.from_ids(packed.ids.to(dtype))
    assert equal(rebuilt, tree.map(lambda x: x.to(dtype), packed))
    assert rebuilt.position.dtype == dtype


def test_random_packings_against_a_loop() -> None:
    for _ in range(50):
        lengths = torch.randint(1, 5, (int(torch.randint(0, 6, ())),)).tolist()
        length = sum(lengths) + int(torch.randint(0, 3, ())) or 1
        packed = seg.from_lengths([lengths], length)
        pairs = [(i + 1, p) for i, n in enumerate(lengths) for p in range(n)]
        pairs += [(0, 0)] * (length - len(pairs))
        assert list(zip(packed.ids[0].tolist(), packed.position[0].tolist(), strict=True)) == pairs
        assert equal(seg.from_ids(packed.ids), packed)


def test_from_cu_seqlens_one_row() -> None:
    assert equal(seg.from_cu_seqlens([0, 3, 5], length=6), seg.from_lengths([[3, 2]], 6))
    assert equal(
        seg.from_cu_seqlens(torch.tensor([0, 3, 5], dtype=torch.int32), length=5),
        seg.from_lengths([[3, 2]], 5),
    )


def test_offsets_with_a_batch_d05() -> None:
    """[0, T, 2T] over (2, T) is one document per row; offsets that let a document cross rows are
    refused.
    """
    assert equal(seg.from_cu_seqlens([0, 4, 8], batch=2, length=4), seg.whole(2, 4))
    assert equal(
        seg.from_cu_seqlens([0, 3, 4, 7], batch=2, length=4), seg.from_lengths([[3, 1], [3]], 4)
    )
    with pytest.raises(ValueError, match=r"miss 4, where row 1 starts.*batch=1, length=8"):
        seg.from_cu_seqlens([0, 3, 8], batch=2, length=4)
    with pytest.raises(ValueError, match=r"miss 8, where row 2 starts"):
        seg.from_cu_seqlens([0, 4, 7, 12], batch=3, length=4)
    with pytest.raises(
        ValueError, match=r"offsets\[-1\]=4 is not in the last row of batch=2, length=4"
    ):
        seg.from_cu_seqlens([0, 3, 4], batch=2, length=4)  # offsets of one row only


def test_empty_document_is_refused_by_number_d04() -> None:
    with pytest.raises(
        ValueError,
        match=r"offsets\[1\]=offsets\[2\]=3: document 2 is empty; drop the repeated offset",
    ):
        seg.from_cu_seqlens([0, 3, 3, 6], length=6)
    with pytest.raises(
        ValueError, match=r"rows\[1\]\[1\]=0: document 2 of row 1 is empty; leave it out"
    ):
        seg.from_lengths([[6], [3, 0, 3]], 6)
    with pytest.raises(
        ValueError, match=r"segments.ids\[0, 3\]=3 skips a number: document 2 is empty"
    ):
        seg.from_ids(torch.tensor([[1, 1, 1, 3, 3, 3]]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 1], [1, -1]], r"segments.ids\[1, 1\]=-1 must not be negative; number documents"),
        (
            [[1, 2, 1]],
            r"segments.ids\[0, 2\]=1 is less than 2 before it; number documents in ascending order",
        ),
        ([[1, 0, 2]], r"segments.ids\[0, 2\]=2 follows padding; move the padding to the end"),
        ([[1, 1, 1], [0, 1, 1]], r"segments.ids\[1, 1\]=1 follows padding"),
        (
            [[2, 2]],
            r"segments.ids\[0, 0\]=2 skips a number: document 1 is empty; number without gaps",
        ),
    ],
)
def test_bad_ids_are_refused(ids: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seg.from_ids(torch.tensor(ids))


def test_any_invalid_row_is_refused() -> None:
    """All 256 rows of four ids in -1..2: just those that ``from_lengths`` can make pass."""
    made = {
        tuple(seg.from_lengths([r], 4).ids[0].tolist())
        for r in ([], [1], [2], [3], [4], [1, 1], [1, 2], [1, 3])
    }
    made |= {tuple(seg.from_lengths([r], 4).ids[0].tolist()) for r in ([2, 1], [2, 2], [3, 1])}
    for row in itertools.product((-1, 0, 1, 2), repeat=4):
        if row in made:
            seg.from_ids(torch.tensor([row]))
        else:
            with pytest.raises(ValueError, match=r"segments.ids"):
                seg.from_ids(torch.tensor([row]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: seg.from_ids(torch.ones(1, 2, dtype=torch.int16)),
            "torch.int16; expected .*int64 or int32",
        ),
        (lambda: seg.from_lengths([[4, 3]], 6), r"rows\[0\] has 7 tokens, more than length=6"),
        (lambda: seg.from_lengths([[3], [-1]], 6), r"rows\[1\]\[0\]=-1"),
        (lambda: seg.from_lengths([], 6), "at least one row"),
        (lambda: seg.whole(0, 6), "at least one row"),
        (lambda: seg.whole(2, 0), "length=0"),
        (lambda: seg.from_cu_seqlens([1, 3], length=3), r"offsets=\[1, 3\].*run from 0"),
        (lambda: seg.from_cu_seqlens([0], length=3), "run from 0"),
        (
            lambda: seg.from_cu_seqlens([0, 3, 2], length=3),
            r"offsets\[2\]=2 is less than offsets\[1\]=3",
        ),
        (
            lambda: seg.from_cu_seqlens([0, 4], length=3),
            r"offsets\[-1\]=4 is not in the last row.*1..3",
        ),
        (
            lambda: seg.from_cu_seqlens(list(range(1, 20)), length=3),
            r"offsets=\[1, 2, 3, 4, 5, 6, 7, 8, ...\]",
        ),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def visible_by_loop(ids: Tensor) -> Tensor:
    b, t = ids.shape
    out = torch.zeros(b, t, t, dtype=torch.bool)
    for row, q, k in itertools.product(range(b), range(t), range(t)):
        out[row, q, k] = k <= q and ids[row, q] == ids[row, k] and ids[row, q] != 0
    return out


def test_visible_on_tiles(packed: seg.Segments) -> None:
    expected = visible_by_loop(packed.ids)
    assert seg.visible(packed, packed).equal(expected)
    for q0, q1, k0, k1 in [(0, 6, 0, 6), (2, 5, 0, 6), (4, 6, 0, 4), (3, 4, 1, 6), (2, 2, 0, 6)]:
        tile = seg.visible(seg.window(packed, q0, q1), seg.window(packed, k0, k1))
        assert tile.equal(expected[:, q0:q1, k0:k1])
    assert (
        seg.visible(packed, packed)
        .sum(-1)
        .equal(torch.where(seg.valid(packed), packed.position + 1, 0))
    )


def test_same_document(packed: seg.Segments) -> None:
    same = seg.same_document(packed.ids, packed.ids[:, 2:])
    expected = visible_by_loop(packed.ids)
    assert same.equal((expected | expected.transpose(1, 2))[:, :, 2:])
    assert not same[2].any()  # padding is no document, not even with itself


def test_marks_and_counts(packed: seg.Segments) -> None:
    assert seg.valid(packed).sum(1).tolist() == [sum(r) for r in ROWS]
    assert seg.num_documents(packed).tolist() == [len(r) for r in ROWS]
    starts = [list(itertools.accumulate([0, *r[:-1]])) if r else [] for r in ROWS]
    assert [row.nonzero().flatten().tolist() for row in seg.document_start(packed)] == starts


def test_windows_add_up(packed: seg.Segments) -> None:
    parts = [seg.window(packed, a, a + 2) for a in (0, 2, 4)]
    assert torch.cat([p.position for p in parts], 1).equal(packed.position)
    assert sum(seg.num_documents(p) for p in parts).equal(seg.num_documents(packed))
    assert torch.cat([seg.document_start(p) for p in parts], 1).equal(seg.document_start(packed))


def test_labels_stop_at_document_ends_d07() -> None:
    packed = seg.from_lengths([[3, 2], [4]], 6)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 9, 9]])
    labels = seg.next_token_labels(tokens, packed)
    assert labels.tolist() == [[2, 3, -100, 5, -100, -100], [2, 3, 4, -100, -100, -100]]
    assert (labels != -100).sum() == seg.valid(packed).sum() - seg.num_documents(packed).sum()
    assert seg.next_token_labels(tokens, packed, ignore=-1)[0, 2] == -1
    naive = tokens.roll(-1, 1)  # what a plain shift would train: 3 -> 4 across documents
    assert naive[0, 2] == 4
    assert seg.next_token_labels(tokens[:, :4], seg.whole(2, 4)).tolist() == [
        [2, 3, 4, -100],
        [2, 3, 4, -100],
    ]


def test_labels_do_not_wrap_around() -> None:
    assert seg.next_token_labels(torch.tensor([[7]]), seg.whole(1, 1)).tolist() == [[-100]]
    assert seg.next_token_labels(torch.tensor([[7, 8]]), seg.whole(1, 2)).tolist() == [[8, -100]]


def test_cu_seqlens(packed: seg.Segments) -> None:
    offsets = seg.cu_seqlens(packed)
    assert offsets.tolist() == [0, 3, 5, 6, 7, 8, 12, 18, 24]
    assert offsets.dtype == torch.int32
    assert seg.cu_seqlens(seg.window(packed, 1, 4)).tolist() == [0, 2, 3, 4, 6, 9, 12]
    full = seg.from_lengths([[3, 3], [6], [1, 5]], 6)
    assert equal(seg.from_cu_seqlens(seg.cu_seqlens(full), batch=3, length=6), full)


def test_vmap_over_different_packings(packed: seg.Segments) -> None:
    """Everything the model calls, one row at a time under vmap, equals the batch."""
    tokens = torch.arange(24).view(4, 6)

    def one(s: seg.Segments, t: Tensor) -> tuple[Tensor, ...]:
        s, t = tree.map(lambda x: x[None], s), t[None]
        marks = (seg.valid(s), seg.document_start(s), seg.num_documents(s), seg._position(s.ids))
        return (*marks, seg.visible(seg.window(s, 2, 5), s), seg.next_token_labels(t, s))

    batched = vmap(one)(packed, tokens)
    rows = [one(tree.map(lambda x, r=r: x[r], packed), tokens[r]) for r in range(4)]
    for got, expected in zip(batched, zip(*rows, strict=True), strict=True):
        assert got.equal(torch.stack(expected))


def test_segments_are_a_tree(packed: seg.Segments) -> None:
    assert tree.paths(packed) == ["ids", "position"]
    assert (
        torch.func.grad(lambda x, s: (x * seg.valid(s)).sum())(torch.ones(4, 6), packed).sum() == 17
    )


@pytest.mark.cuda
def test_on_cuda(packed: seg.Segments) -> None:
    moved = seg.from_lengths(ROWS, LENGTH, device="cuda")
    assert moved.ids.is_cuda
    assert moved.position.cpu().equal(packed.position)
    assert seg.visible(moved, moved).cpu().equal(seg.visible(packed, packed))
    assert seg.cu_seqlens(moved).cpu().equal(seg.cu_seqlens(packed))
    assert equal(seg.from_ids(moved.ids), moved)
