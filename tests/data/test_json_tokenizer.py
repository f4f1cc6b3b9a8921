from __future__ import annotations

import json
from pathlib import Path

import pytest

from k31fn.data import ByteTokenizer, Tokenizer
from k31fn.data.tokenizer_files import open_tokenizer

tokenizers = pytest.importorskip(
    "tokenizers", reason="tokenizers (the extra `data`) is not installed"
)

TEXT = "Hello, naïve wörld! 你好 <|end|>\n\n  x"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|media_pad|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT, "hello hello wörld"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_round_trip(path: Path):
    tokenizer = open_tokenizer(path, end="<|end|>")
    assert isinstance(tokenizer, Tokenizer)
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) < len(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.decode_bytes(tokens) == TEXT.encode()
    assert b"".join(tokenizer.decode_bytes([t]) for t in tokens.tolist()) == TEXT.encode()
    every = bytes(range(128)) + "é你".encode()
    assert tokenizer.decode_bytes(tokenizer.encode(every)) == every


def test_special_tokens_are_never_read_from_text(path: Path):
    tokenizer = open_tokenizer(path, end="<|end|>")
    assert tokenizer.special_tokens == {"<|end|>": 0, "<|media_pad|>": 1}
    assert tokenizer.end_token == 0
    assert tokenizer.encode("<|end|>").min() > 1
    assert tokenizer.decode([0, *tokenizer.encode("hi").tolist(), 1, 10**6, -100]) == "hi"
    assert tokenizer.vocab_size == 290  # the trainer ran out of merges


def test_the_end_token_beside_the_file(path: Path):
    (path.parent / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|media_pad|>"}})
    )
    assert open_tokenizer(path.parent).end_token == 1


def test_files_that_are_refused(path: Path):
    with pytest.raises(ValueError, match=r"end token '\[EOS\]' is not in"):
        open_tokenizer(path)
    data = json.loads(path.read_text())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\]; k31fn reads byte-level"):
        open_tokenizer(path, end="<|end|>")


def test_bytes_need_no_file():
    assert open_tokenizer("bytes") == ByteTokenizer()
    assert open_tokenizer("bytes+media") == ByteTokenizer(media=True)
