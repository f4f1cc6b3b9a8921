import json

import numpy as np
import pytest

from k31fn.data import ByteTokenizer, Config, Corpus, load
from k31fn.data.splits import Splits

TOKENIZER = ByteTokenizer()


def documents(corpus: Corpus) -> list[str]:
    pairs = zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)
    parts = [corpus.tokens[a:b] for a, b in pairs]
    assert all(p[-1] == 256 and (p[:-1] < 256).all() for p in parts)
    return [TOKENIZER.decode(p) for p in parts]


def folder(root, texts: dict[str, str]) -> Config:
    root.mkdir(exist_ok=True)
    for name, text in texts.items():
        (root / name).write_text(text)
    return Config(path=str(root), heldout_fraction=0.3)


def test_every_document_is_in_one_part(tmp_path):
    texts = {f"{i}.txt": f"document {i}" * (1 + i % 7) for i in range(100)}
    splits = load(folder(tmp_path / "a", texts), TOKENIZER)
    train, heldout = documents(splits.train), documents(splits.heldout)
    assert sorted(train + heldout) == sorted(texts.values())
    assert 15 <= len(heldout) <= 45
    assert splits.train.tokens.dtype == np.uint16


def test_split_depends_on_the_name_alone(tmp_path):
    texts = {f"{i}.txt": f"document {i}" for i in range(60)}
    held = set(documents(load(folder(tmp_path / "a", texts), TOKENIZER).heldout))
    fewer = {name: text for name, text in texts.items() if int(name[:-4]) % 2}
    assert set(documents(load(folder(tmp_path / "b", fewer), TOKENIZER).heldout)) == held & set(
        fewer.values()
    )


def test_equal_documents_do_not_leak(tmp_path):
    texts = {f"{i}.txt": f"document {i % 20}" for i in range(60)}
    splits = load(folder(tmp_path / "a", texts), TOKENIZER)
    train, heldout = documents(splits.train), documents(splits.heldout)
    assert sorted(train + heldout) == sorted(set(texts.values()))
    assert splits.duplicates == 40


def test_one_text_file_is_split(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i}\n" for i in range(60000)))
    splits = load(Config(path=str(tmp_path / "book.txt")), TOKENIZER)
    assert splits.heldout.num_documents >= 1
    assert splits.train.num_documents > splits.heldout.num_documents


def test_empty(tmp_path):
    with pytest.raises(
        ValueError, match=r"data.path=.* is empty: no text in files with data.suffixes=\['.txt'"
    ):
        load(folder(tmp_path / "a", {"x.txt": "", "y.other": "text"}), TOKENIZER)


def test_empty_part_says_which_fraction_would_do(tmp_path):
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(5))
    )

    def splits(fraction: float) -> Splits:
        return load(Config(path=str(tmp_path / "c.jsonl"), heldout_fraction=fraction), TOKENIZER)

    with pytest.raises(
        ValueError, match="none of the 5 documents is held out; raise it above"
    ) as low:
        splits(1e-6)
    with pytest.raises(
        ValueError, match="none of the 5 documents is left to train on; lower it to"
    ) as high:
        splits(1 - 1e-6)
    advice = [float(str(e.value).partition("raise it above ")[2].split(",")[0]) for e in (low,)]
    assert splits(advice[0] + 1e-6).heldout.num_documents == 1
    advice = float(str(high.value).partition("lower it to ")[2].split(",")[0])
    assert splits(advice - 1e-6).train.num_documents == 1


def test_bad_config():
    with pytest.raises(ValueError, match=r"data\.heldout_fraction=1.5 must be between 0 and 1"):
        Config(heldout_fraction=1.5)
    with pytest.raises(ValueError, match="must be file suffixes with their dot"):
        Config(suffixes=("txt",))
    with pytest.raises(ValueError, match="must be file suffixes with their dot"):
        Config(suffixes=())
