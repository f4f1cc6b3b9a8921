"""Stores as the data of a run: what is opened, mixed, scored and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from k31fn import data
from k31fn.data import ByteTokenizer, Prepared, heldout_rows, open_heldout, open_prepared
from k31fn.data.prepare import Config, prepare

TOKENIZER = ByteTokenizer(media=True)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two sources of text, of 60 and 20 documents, and one to score."""
    root, found = tmp_path_factory.mktemp("prepared"), {}
    for name, count in (("a", 60), ("b", 20), ("c", 9)):
        folder = root / name
        folder.mkdir()
        for i in range(count):
            (folder / f"{i}.txt").write_text(f"{name}{i} " * (3 + i % 5))
        prepare(Config(str(folder), "bytes+media", heldout_fraction=0.0), root / f"{name}-out")
        found[name] = str(root / f"{name}-out" / "train")
    return found


def prepared(stores: dict[str, str], **changes: object) -> Prepared:
    base = Prepared((stores["a"], stores["b"]), (stores["c"],), tokenizer="bytes+media")
    return dataclasses.replace(base, **changes)  # pyright: ignore[reportArgumentType]


def letters(example: data.Example) -> np.ndarray:
    return example.tokens[:, 0].numpy()


def test_without_weights_each_store_gives_what_it_has(stores: dict[str, str]):
    train = open_prepared(prepared(stores), TOKENIZER, length=64, batch_size=16)
    a, b = (s.num_rows for s in train.sources)
    assert train.weights == [a, b]
    assert train.num_rows == a + b
    assert train.num_tokens == sum(int(s.store.lengths.sum()) for s in train.sources)
    found = np.concatenate([letters(train.batch_at(step)) for step in range(64)])
    assert (found == ord("b")).mean() == pytest.approx(b / (a + b), abs=0.02)


def test_weights_and_seed(stores: dict[str, str]):
    cfg = prepared(stores, weights=(1.0, 3.0))
    one, two = (
        open_prepared(cfg, TOKENIZER, length=64, batch_size=16, seed=seed) for seed in (0, 1)
    )
    found = np.concatenate([letters(one.batch_at(step)) for step in range(16)])
    assert (found == ord("b")).mean() == 0.75
    assert not torch.equal(one.batch_at(0).tokens, two.batch_at(0).tokens)


def test_what_is_scored(stores: dict[str, str]):
    """Every document once, and of it the tokens that are bytes."""
    cfg = prepared(stores, heldout=(stores["c"], stores["b"]))
    scored = heldout_rows(open_heldout(cfg, TOKENIZER, length=64), TOKENIZER)
    labels = scored.rows.labels
    assert scored.num_bytes == int((labels >= 0).sum())
    assert int(labels.max()) < 256
    documents = [
        f"{name}{i} " * (3 + i % 5) for name, count in (("b", 20), ("c", 9)) for i in range(count)
    ]
    assert scored.num_bytes == sum(len(d) - 1 for d in documents)
    assert scored.pieces == ()


def test_fewer_bytes_take_the_first_rows(stores: dict[str, str]):
    rows = open_heldout(prepared(stores), TOKENIZER, length=64)
    everything, some = heldout_rows(rows, TOKENIZER), heldout_rows(rows, TOKENIZER, num_bytes=20)
    n = len(some.rows.tokens)
    assert 0 < n < len(everything.rows.tokens)
    assert torch.equal(some.rows.tokens, everything.rows.tokens[:n])
    assert 20 <= some.num_bytes < everything.num_bytes
    with pytest.raises(ValueError, match="num_bytes=0 must be at least 1"):
        heldout_rows(rows, TOKENIZER, num_bytes=0)


def test_fingerprints(stores: dict[str, str], tmp_path: Path):
    """Equal for the same stores wherever they lie; another for other stores or settings."""
    same, other = (
        open_prepared(cfg, TOKENIZER, length=64, batch_size=4).fingerprint
        for cfg in (
            prepared(stores, weights=(1.0, 2.0)),
            prepared(stores, train=(stores["b"], stores["a"])),
        )
    )
    assert (
        same
        == open_prepared(prepared(stores), TOKENIZER, length=32, batch_size=8, seed=3).fingerprint
    )
    assert same != other


def test_another_tokenizer_is_refused(stores: dict[str, str]):
    with pytest.raises(
        ValueError, match=r"\(261, 256, 260\), those of data.tokenizer are \(257, 256, -1\)"
    ):
        open_prepared(prepared(stores), ByteTokenizer(), length=64, batch_size=4)


def test_bad_values(stores: dict[str, str]):
    for change, message in (
        ({"train": ()}, r"data\.train=\(\) names no store"),
        ({"weights": (1.0,)}, "1 shares for 2 stores"),
        ({"patches": 6}, "patches=6 must be a multiple of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(stores, **change)
