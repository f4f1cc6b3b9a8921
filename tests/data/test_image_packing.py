from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k31fn import params, random, segments, tree
from k31fn.data import ByteTokenizer, media
from k31fn.data.image_packing import PackedDataset, Shape, _DocumentPiece, collate
from k31fn.data.images import Image
from k31fn.data.mixture import BLOCK, Mixture
from k31fn.data.prepare import Config, prepare
from k31fn.data.store import Store, StoredDocument, open_store
from k31fn.layers import projector, vision, vision_block

TOKENIZER = ByteTokenizer(media=True)
MEDIA = media.media_tokens(TOKENIZER)
PAD = MEDIA.pad


def document(number: int, length: int, sizes: list[tuple[int, int]]) -> StoredDocument:
    """``length`` letters with images of these heights and widths after every third; each patch
    holds its numbers.
    """
    pictures = [
        Image(np.full((h * w, 12), 10 * number + i, np.uint8), (1, h, w), 14 * w, 14 * h)
        for i, (h, w) in enumerate(sizes)
    ]
    text = "".join(
        chr(97 + (number + i) % 26) + media.PLACEHOLDER * (i < len(sizes)) for i in range(length)
    )
    tokens = media.encode(text, pictures, TOKENIZER, str(number))
    spans = media.spans(tokens, [p.num_slots for p in pictures], MEDIA)
    tokens = np.append(tokens, TOKENIZER.end_token)
    return StoredDocument(tokens, [p.grid for p in pictures], spans, [p.patches for p in pictures])


def stored(documents: list[StoredDocument]) -> Store:
    """A store in memory."""
    grids = [g for d in documents for g in d.grids]
    shard = {
        "tokens": np.concatenate([d.tokens for d in documents]).astype(np.uint16),
        "offsets": np.cumsum([0, *(len(d.tokens) for d in documents)]),
        "images": np.cumsum([0, *(len(d.grids) for d in documents)]),
        "grids": np.array(grids, np.int32).reshape(-1, 3),
        "spans": np.concatenate([np.zeros((0, 2), np.int64), *(d.spans for d in documents)]),
        "patch_offsets": np.cumsum([0, *(len(p) for d in documents for p in d.patches)]),
        "patches": np.concatenate(
            [np.zeros((0, 12), np.uint8), *(p for d in documents for p in d.patches)]
        ),
    }
    index = {"media_token": PAD, "end_token": 256, "patch_width": 12}
    return Store((shard,), index, np.array([0, len(documents)]))


SIZES = [
    (3, []),
    (50, [(2, 2), (4, 4)]),
    (1, [(2, 6)]),
    (10, []),
    (200, []),
    (9, [(4, 6), (4, 6), (2, 2)]),
    (2, []),
]
DOCUMENTS = [document(i, length, images) for i, (length, images) in enumerate(SIZES)]
STORE = stored(DOCUMENTS)
SHAPE = Shape(64, 48)


def epoch(dataset: PackedDataset, number: int = 0) -> list[list[_DocumentPiece]]:
    return [dataset._rows[i] for i in range(dataset.num_rows)]


@pytest.mark.parametrize(
    "shape", [SHAPE, Shape(34, 24), Shape(1000, 1000), Shape(40, 100)], ids=str
)
def test_every_token_and_image_is_in_one_row_of_an_epoch(shape: Shape):
    dataset = PackedDataset(STORE, shape)
    found: dict[int, list[_DocumentPiece]] = {}
    for row in epoch(dataset):
        assert sum(p.stop - p.start for p in row) <= shape.length
        for piece in row:
            found.setdefault(piece.document, []).append(piece)
    for number, whole in enumerate(DOCUMENTS):
        parts = sorted(found[number], key=lambda p: p.start)
        assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
        assert parts[-1].stop == len(whole.tokens)
        for start, stop in whole.spans:
            assert sum(p.start <= start and stop <= p.stop for p in parts) == 1
    rows = [dataset.row(i) for i in range(dataset.num_rows)]
    assert all(sum(map(len, row.patches)) <= shape.patches for row in rows)
    images = Counter(int(p[0, 0]) for row in rows for p in row.patches)
    assert images == Counter(
        10 * i + j for i, d in enumerate(DOCUMENTS) for j in range(len(d.grids))
    )


def test_what_fits_is_not_cut():
    dataset = PackedDataset(STORE, Shape(120, 100))
    whole = {i for i, d in enumerate(DOCUMENTS) if len(d.tokens) <= 120}
    pieces = Counter(p.document for row in epoch(dataset) for p in row)
    assert {i for i, n in pieces.items() if n == 1} == whole


def test_batches_are_rows():
    dataset = Mixture([PackedDataset(STORE, SHAPE, seed=3)], [1.0], batch_size=4)
    batch = dataset.batch_at(2)
    rows = [dataset.sources[0].row(dataset.find(8 + i)[1]) for i in range(4)]
    for i, row in enumerate(rows):
        n = sum(map(len, row.pieces))
        assert batch.tokens[i, :n].tolist() == np.concatenate(row.pieces).tolist()
        assert not batch.tokens[i, n:].any()
        ids = [k + 1 for k, piece in enumerate(row.pieces) for _ in piece]
        assert batch.segments.ids[i].tolist() == ids + [0] * (SHAPE.length - n)
        patches = np.concatenate([np.zeros((0, 12), np.uint8), *row.patches])
        expected = torch.zeros(SHAPE.patches, 12)
        expected[: len(patches)] = torch.from_numpy(patches.astype(np.float32)) / 255 * 2 - 1
        torch.testing.assert_close(batch.images.pixels[i], expected, rtol=0, atol=2e-7)
        stops = [0, *np.cumsum([len(p) for p in row.patches]).tolist()]
        seen = sorted(
            set(
                zip(
                    batch.images.patches.start[i].tolist(),
                    batch.images.patches.stop[i].tolist(),
                    strict=True,
                )
            )
        )
        assert [s for s in seen if s[1]] == list(itertools.pairwise(stops))
    slots = batch.images.slots
    assert torch.equal(slots >= 0, batch.tokens == PAD)
    for line in slots:
        assert line[line >= 0].tolist() == list(range(int((line >= 0).sum())))


def test_labels():
    """The next token of the same piece, but never a placeholder; nothing at the end of a piece and
    in padding.
    """
    batch = Mixture(
        [PackedDataset(STORE, SHAPE)], [1.0], batch_size=PackedDataset(STORE, SHAPE).num_rows
    ).batch_at(0)
    expected = torch.full_like(batch.tokens, -100)
    for b in range(len(batch.tokens)):
        for t in range(SHAPE.length - 1):
            same = batch.segments.ids[b, t] == batch.segments.ids[b, t + 1] != 0
            if same and batch.tokens[b, t + 1] != PAD:
                expected[b, t] = batch.tokens[b, t + 1]
    assert torch.equal(batch.labels, expected)
    before, at = (
        batch.tokens[:, :-1][batch.tokens[:, 1:] == PAD],
        batch.labels[:, :-1][batch.tokens[:, 1:] == PAD],
    )
    assert len(before) > 10
    assert (at == -100).all()
    assert (
        batch.labels[batch.tokens == MEDIA.begin] == ord("i")
    ).all()  # what follows a begin is predicted


def test_ranks_and_micro_batches_share_a_step():
    dataset = Mixture([PackedDataset(STORE, SHAPE)], [1.0], batch_size=8)
    whole = dataset.batch_at(5)
    parts = [
        dataset.batch_at(5, rank=r, num_ranks=2, micro=m, num_micro=2)
        for r in range(2)
        for m in range(2)
    ]
    tree.map(
        lambda a, *b: torch.testing.assert_close(torch.cat(b), a, rtol=0, atol=0), whole, *parts
    )
    again = Mixture([PackedDataset(STORE, SHAPE)], [1.0], batch_size=8).batch_at(5)
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), whole, again)


def test_epochs_have_the_same_rows_in_another_order():
    dataset = PackedDataset(STORE, Shape(20, 24))
    n = dataset.num_rows
    orders = [
        [tuple(map(bytes, dataset.row(e * n + i).pieces)) for i in range(n)] for e in range(3)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    other = [
        tuple(map(bytes, PackedDataset(STORE, Shape(20, 24), seed=1).row(i).pieces))
        for i in range(n)
    ]
    assert other != orders[0]


def test_text_alone_has_no_images():
    texts = stored([document(i, 5 + i, []) for i in range(4)])
    batch = Mixture([PackedDataset(texts, Shape(16))], [1.0], batch_size=2).batch_at(0)
    assert batch.images == ()
    with_room = Mixture([PackedDataset(texts, Shape(16, 8))], [1.0], batch_size=2).batch_at(0)
    assert not with_room.images.pixels.any()
    assert (with_room.images.slots == -1).all()
    assert not with_room.images.patches.stop.any()


def test_a_row_that_cannot_hold_an_image():
    with pytest.raises(
        ValueError, match=r"document 5 has an image of \d+ tokens and 24 patches.*data\.patches=20"
    ):
        PackedDataset(STORE, Shape(64, 20))
    with pytest.raises(
        ValueError,
        match=r"document \d has an image of \d+ tokens .* data\.length=12, data\.patches=100",
    ):
        PackedDataset(STORE, Shape(12, 100))
    for shape, message in (
        (Shape(1, 4), "length=1"),
        (Shape(8, 6), "patches=6 must be a multiple of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedDataset(STORE, shape)


def test_a_store_that_disagrees_with_itself():
    row = PackedDataset(STORE, SHAPE).row(0)
    with pytest.raises(ValueError, match="placeholders for images of"):
        collate(
            [row._replace(pieces=[np.array([PAD] * 40)], learnt=[np.ones(40, np.bool_)])],
            SHAPE,
            STORE,
        )


# ----------------------------------------------------------------------------------------- mixtures
def three(weights: list[float], **changes: Any) -> Mixture:
    stores = [stored([document(i, 6 + i, []) for i in range(5)]) for _ in range(3)]
    return Mixture(
        [PackedDataset(s, Shape(16)) for s in stores],
        weights,
        **({"batch_size": 4, "seed": 0} | changes),
    )


@pytest.mark.parametrize(
    "weights", [[1.0, 1.0, 1.0], [0.7, 0.2, 0.1], [100.0, 1.0, 0.5], [0.001, 5.0, 0.3]], ids=str
)
def test_shares(weights: list[float]):
    mixture, count = three(weights), 7 * BLOCK
    found = [mixture.find(i) for i in range(count)]
    shares = np.array(weights) / sum(weights)
    for block in range(7):
        counts = np.bincount(
            [s for s, _ in found[block * BLOCK : (block + 1) * BLOCK]], minlength=3
        )
        assert (np.abs(counts - shares * BLOCK) < 2).all()
    counts = np.bincount([s for s, _ in found], minlength=3)
    assert (np.abs(counts - shares * count) <= 1.001).all()  # both of its bounds are rounded down


def test_each_source_gives_its_rows_once_in_order_of_blocks():
    mixture = three([0.5, 0.3, 0.2])
    found = [mixture.find(i) for i in range(5 * BLOCK)]
    for source in range(3):
        numbers = [n for s, n in found if s == source]
        assert sorted(numbers) == list(range(len(numbers)))


def test_far_into_a_run():
    mixture = three([0.5, 0.3, 0.2])
    source, number = mixture.find(10**12)
    assert number == pytest.approx(10**12 * [0.5, 0.3, 0.2][source], rel=1e-6)
    assert mixture.batch_at(10**9).tokens.shape == (4, 16)


def test_sources_are_mixed_inside_a_block():
    order = [three([1.0, 1.0, 1.0]).find(i)[0] for i in range(60)]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 25  # 40 expected of a random order
    assert [three([1.0, 1.0, 1.0], seed=1).find(i)[0] for i in range(60)] != order


def test_mixtures_that_are_refused():
    one = PackedDataset(STORE, SHAPE)
    for sources, weights in (([], []), ([one], [0.0]), ([one], [1.0, 2.0])):
        with pytest.raises(ValueError, match="a positive weight for each"):
            Mixture(sources, weights, 4)
    with pytest.raises(ValueError, match="sources differ"):
        Mixture([one, PackedDataset(STORE, Shape(64, 52))], [1.0, 1.0], 4)
    with pytest.raises(ValueError, match="must be a multiple of num_ranks=3"):
        Mixture([one], [1.0], 4).batch_at(0, num_ranks=3)
    with pytest.raises(ValueError, match="step=-1"):
        Mixture([one], [1.0], 4).batch_at(-1)


def test_from_prepared_files(tmp_path: Path):
    """The whole way: files, store, batch, and the tower's features in their places."""
    from tests.data.pictures import png  # skips without Pillow

    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (tmp_path / f"{name}.png").write_bytes(png(40, 30, colour))
    rows = [{"text": f"{media.PLACEHOLDER}{c}", "images": f"{c}.png"} for c in ("red", "blue")] + [
        {"text": "no image"}
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    prepare(
        Config(str(tmp_path / "a.jsonl"), "bytes+media", images="images", heldout_fraction=0.0),
        tmp_path / "out",
    )
    store = open_store(tmp_path / "out" / "train")
    batch = Mixture([PackedDataset(store, Shape(128, 64))], [1.0], batch_size=1).batch_at(0)
    assert segments.num_documents(batch.segments).tolist() == [3]
    cfg = vision.Config(vision_block.Config(8, 2, 4, 8), 1)
    weights = params.init(vision.specs(cfg), random.key(0))
    y = vision.apply(weights, batch.images.pixels.bfloat16(), cfg, patches=batch.images.patches)
    placed = projector.place(
        torch.zeros(1, 128, cfg.output_size, dtype=torch.bfloat16), y, batch.images.slots
    )
    assert torch.equal(placed.any(-1), batch.tokens == PAD)
    assert int((batch.tokens == PAD).sum()) == 2 * 4
