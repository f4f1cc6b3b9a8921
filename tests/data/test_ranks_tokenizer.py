from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from k31fn.data import Tokenizer, media
from k31fn.data.ranks_tokenizer import RanksTokenizer, read_ranks
from k31fn.data.tokenizer_files import open_tokenizer

pytest.importorskip("tiktoken", reason="tiktoken (the extra `data`) is not installed")

# The pieces that the rule of the released tokenizer makes, by hand.
SPLITS = [
    ["Hello", " world"],
    ["Hello", ",", " world", "!"],
    ["中文", "English", "混合"],
    ["汉字", "abc"],
    ["北京市", " Pascal"],
    ["123", "456", "789", "0"],
    ["hello", "World", "HTTPServer"],
    ["don't", " WE'LL", " it's"],
    ["x", " ", " y"],
    ["x", "\n\n", " ", " y", "  "],
    ["f", "()", " !!\n\n", "z"],
    ["naïve", " Ωmega", "日本", "ごの", "文"],
    ["(word", " /", "path", "_x"],
    ["٣٤٥", "٦"],
]
MERGES = sorted(
    {piece.encode() for pieces in SPLITS for piece in pieces if len(piece.encode()) > 1}
)


def write(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "tiktoken.model", [*(bytes([b]) for b in range(256)), *MERGES])
    first = 256 + len(MERGES)
    names = {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|end_of_msg|>": 2,
        "<|media_begin|>": 18,
        "<|media_content|>": 19,
    }
    names |= {"<|media_end|>": 20, "<|media_pad|>": 21, "[UNK]": 254, "[PAD]": 255}
    added = {str(first + i): {"content": name, "special": True} for name, i in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "eos_token": "[EOS]"})
    )
    return tmp_path


@pytest.mark.parametrize("pieces", SPLITS, ids=repr)
def test_the_rule_cuts_where_it_should(folder: Path, pieces: list[str]):
    """Each piece is a token of its own, and no union of pieces is one: other cuts give other
    tokens.
    """
    tokenizer = open_tokenizer(folder)
    tokens = tokenizer.encode("".join(pieces))
    assert [tokenizer.decode_bytes([t]).decode() for t in tokens.tolist()] == pieces
    assert tokenizer.decode(tokens) == "".join(pieces)


def test_merges_go_by_lowest_rank(tmp_path: Path):
    """bc has a lower rank than ab: abc is a|bc, and abcd too, for no abc or bcd is there."""
    order = [b"bc", b"ab", b"cd"]
    path = write(tmp_path / "t.model", [*(bytes([b]) for b in range(256)), *order])
    tokenizer = open_tokenizer(path)
    cut = [
        [tokenizer.decode_bytes([t]) for t in tokenizer.encode(text).tolist()]
        for text in ("abc", "abcd", "abxcd")
    ]
    assert cut == [[b"a", b"bc"], [b"a", b"bc", b"d"], [b"ab", b"x", b"cd"]]


def test_special_tokens(folder: Path):
    tokenizer = open_tokenizer(folder)
    first = 256 + len(MERGES)
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(tokenizer, RanksTokenizer)
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.end_token == first + 1
    assert len(tokenizer.special_tokens) == 256
    assert tokenizer.special_tokens["<|media_pad|>"] == first + 21
    assert tokenizer.special_tokens[f"<|reserved_token_{first + 30}|>"] == first + 30
    assert tokenizer.encode("[EOS]<|media_pad|>").max() < first
    assert tokenizer.decode([first + 21, 104, first + 1, 105, -100, 10**9]) == "hi"
    assert open_tokenizer(folder, end="<|end_of_msg|>").end_token == first + 2


def test_without_a_config_k3s_names_stand(tmp_path: Path):
    """With the 163584 base ranks of the release, the media token is 163605."""
    path = write(tmp_path / "tiktoken.model", [bytes([b]) for b in range(256)])
    names = open_tokenizer(path).special_tokens
    places = {
        name: names[name] - 256 + 163584
        for name in ("<|media_pad|>", "[EOS]", "<|end_of_msg|>", "[PAD]")
    }
    assert places == {
        "<|media_pad|>": 163605,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "[PAD]": 163839,
    }
    assert open_tokenizer(tmp_path).end_token == 257
    assert media.media_tokens(open_tokenizer(path)) == (274, 275, 276, 277)


def test_any_bytes_come_back(folder: Path):
    tokenizer = open_tokenizer(folder)
    rng = np.random.default_rng(0)
    for data in (
        bytes(range(256)),
        b"a\xff\xfe\xe4\xb8Hello",
        rng.integers(0, 256, 2000, dtype=np.uint8).tobytes(),
        b"",
    ):
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_long_runs_end(folder: Path):
    """A million characters without a boundary: the released tokenizer cuts them at 25000, and so
    does this.
    """
    tokenizer = open_tokenizer(folder)
    for text in (" " * 1_000_000, "a" * 100_000 + " " + "b" * 30_000, "é" * 450_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"YQ== 0\nnot base64 1\n", r":2: expected a token in base64"),
        (b"YQ== 0\nYg== 0\n", r":2: rank 0 is given twice"),
        (b"YQ== 0\nYg== 2\n", "ranks must be 0 to 1"),
        (b"YQ== 0\nYQ== 1\n", "each of another token"),
        (b"YQ== 0\n", "no token for byte 0"),
        (b"YQ==\n", ":1: expected"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, lines: bytes, message: str):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(lines)
    with pytest.raises(ValueError, match=message):
        read_ranks(path)


def test_paths_that_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="neither 'bytes', nor a file"):
        open_tokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match=r"end token '<\|im_end\|>' is not a special token"):
        open_tokenizer(folder, end="<|im_end|>")
    with pytest.raises(ValueError, match="outside the special ids"):
        RanksTokenizer([bytes([b]) for b in range(256)], {"[EOS]": 5})
