"""The digits example: what it makes, how it scores, and (slow) that a small model learns to
read.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import digits
from k31fn import config, data, trainer
from k31fn.data.image_packing import Row
from k31fn.data.images import _patchify
from k31fn.data.media import PLACEHOLDER
from tests.needs import needs

pytestmark = needs("sklearn", "PIL")
ROOT = Path(__file__).parents[2]


def pixels(url: str) -> np.ndarray:
    import PIL.Image

    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def scans(records: list[dict[str, Any]]) -> dict[bytes, set[str]]:
    """The scans in some mosaics, in reading order, each with the names that it is given."""
    found: dict[bytes, set[str]] = {}
    for record in records:
        texts = record["text"].split(PLACEHOLDER)[1:]
        assert len(texts) == len(record["images"])
        for text, url in zip(texts, record["images"], strict=True):
            image = pixels(url)
            h, w = (n // digits.SIDE for n in image.shape)
            assert 1 <= h * w <= digits.MOST
            cells = (
                image.reshape(h, digits.SIDE, w, digits.SIDE)
                .transpose(0, 2, 1, 3)
                .reshape(h * w, -1)
            )
            assert text.endswith("\n")
            for cell, name in zip(cells, text.strip(), strict=True):
                found.setdefault(cell.tobytes(), set()).add(name)
    return found


def test_captions_name_the_scans_and_held_out_scans_are_never_seen():
    """Each scan has one name wherever it stands: 10 names, in reading order; and each is in one
    split.
    """
    train, heldout = (scans(list(digits.documents(split, 300))) for split in ("train", "heldout"))
    assert len(train) > 500
    assert len(heldout) > 250
    assert all(len(names) == 1 for names in (*train.values(), *heldout.values()))
    assert {name for names in train.values() for name in names} == set("0123456789")
    assert not train.keys() & heldout.keys()


def test_grids_of_many_shapes_and_documents_of_two_mosaics():
    records = list(digits.documents("train", 300))
    shapes = {
        tuple(n // digits.SIDE for n in pixels(url).shape) for r in records for url in r["images"]
    }
    assert shapes == set(digits.GRIDS)
    assert len(digits.GRIDS) == 14
    assert 0.15 < sum(len(r["images"]) == 2 for r in records) / 300 < 0.35
    assert records == list(digits.documents("train", 300))


def test_accuracy():
    row = Row([], [], [], [])
    found = [
        digits.Caption(a, b, row)
        for a, b in (("123", "123"), ("45", "4"), ("6", "67"), ("89", "98"))
    ]
    assert digits.accuracy(found) == (5 / 8, 1 / 4)


def test_the_picture_of_a_row():
    image = np.arange(28 * 56, dtype=np.uint32).reshape(28, 56).astype(np.uint8)
    patches = _patchify(np.repeat(image[:, :, None], 3, axis=2), 14)
    assert np.array_equal(
        digits.picture(Row([], [], [(1, 2, 2), (1, 2, 4)], [patches[:4], patches])), image
    )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of few and short documents."""
    monkeypatch.setattr(digits, "SIZES", {"train": 16, "heldout": 6})
    assert digits.main(["prepare", str(tmp_path / "digits")]) == 0
    return tmp_path


def arguments(folder: Path) -> list[str]:
    stores = [str(folder / "digits" / split / "train") for split in ("train", "heldout")]
    return [
        *("--data.train", stores[0], "--data.heldout", stores[1]),
        *("--runs", str(folder / "runs"), "--device", "cpu", "--threads", "1"),
    ]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.slow
def test_prepare_train_score(small: Path, capsys: pytest.CaptureFixture[str]):
    """The three commands; a second call of the first keeps what is there."""
    assert digits.main(["prepare", str(small / "digits")]) == 0
    call = [
        str(ROOT / "configs" / "tiny_vision.py"),
        *arguments(small),
        "--steps",
        "2",
        "--batch-size",
        "2",
    ]
    assert trainer.main([*call, "--heldout-bytes", "50", "--eval-bytes", "50"]) == 0
    assert digits.main(["score", str(small / "runs" / "tiny_vision")]) == 0
    out = capsys.readouterr().out
    assert "of digits right" in out
    assert "k31fn.sample" not in out
    (run,) = (small / "runs" / "tiny_vision").iterdir()
    mosaics = sum(
        len(json.loads(line)["images"])
        for line in (small / "digits" / "heldout.jsonl").read_text().splitlines()
    )
    assert len((run / "captions.txt").read_text().splitlines()) == mosaics
    assert (run / "captions.png").stat().st_size > 10_000
    assert digits.main(["score", str(small / "nothing")]) == 1


def test_prompts_end_where_the_caption_begins(small: Path):
    store, tokenizer = (
        data.open_store(small / "digits" / "heldout" / "train"),
        data.ByteTokenizer(media=True),
    )
    documents = [store.read(i) for i in range(store.num_documents)]
    assert any(len(d.grids) == 2 for d in documents)
    for document in documents:
        found = list(digits._prompts(document, tokenizer))
        for i, (truth, row) in enumerate(found):
            _, h, w = document.grids[i]
            assert len(truth) == h * w // 4
            assert row.pieces[0][-1] == tokenizer.special_tokens["<|media_end|>"]
            assert len(row.grids) == len(row.patches) == i + 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("unchecked")
def test_it_learns_to_read(tmp_path: Path):
    """At least 90% of digits and 75% of captions on scans never seen; with patches shuffled below
    40% of digits.
    """
    assert digits.main(["prepare", str(tmp_path / "digits")]) == 0
    path = ROOT / "configs" / "tiny_vision.py"
    assert config.load_recipe(path).steps <= 1000
    assert trainer.main([str(path), *arguments(tmp_path)]) == 0
    (run,) = (tmp_path / "runs" / "tiny_vision").iterdir()
    right, whole = digits.accuracy(digits.captions(run))
    assert right >= 0.9
    assert whole >= 0.75
    assert digits.accuracy(digits.captions(run, shuffle=True))[0] < 0.4
