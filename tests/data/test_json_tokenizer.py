from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from k31fn.data import ByteTokenizer, Config, Tokenizer, chat, load
from k31fn.data.tokenizer import CHAT_NAMES
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


# ------------------------------------------------------------------------------- what files may say
def edited(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_lengths_in_a_file_change_nothing(path: Path, tmp_path: Path):
    """Of 56 bytes in text that no merge shortens, 56 tokens, though the file says 16 or 99."""
    text = "".join(chr(33 + i) for i in range(56))
    before = open_tokenizer(path, end="<|end|>").encode(text)
    assert len(before) == 56
    made = tokenizers.Tokenizer.from_file(str(path))
    made.enable_truncation(16)
    made.save(str(path))
    assert open_tokenizer(path, end="<|end|>").encode(text).tolist() == before.tolist()
    made.enable_padding(length=99)
    made.save(str(path))
    assert open_tokenizer(path, end="<|end|>").encode(text).tolist() == before.tolist()
    # Over a folder: every byte of every document is there.
    (tmp_path / "d").mkdir()
    for i in range(40):
        (tmp_path / "d" / f"{i}.txt").write_text(text + chr(200 + i))
    splits = load(
        Config(path=str(tmp_path / "d"), heldout_fraction=0.3), open_tokenizer(path, end="<|end|>")
    )
    found = sum(len(part.tokens) for part in (splits.train, splits.heldout))
    assert found == 40 * (56 + 2 + 1)  # the last character has two bytes, and an end token follows


@pytest.mark.parametrize("text", ["def f(x):", " x", "x", "\n", TEXT, "É e\u0301 ﬁ", "A  \t b "])
def test_what_goes_in_comes_out(path: Path, text: str):
    """Whatever the file says of spaces in front, normal forms and tokens that swallow spaces."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    made = tokenizers.Tokenizer.from_file(str(path))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.add_tokens([AddedToken("x", lstrip=True, rstrip=True), AddedToken("wör")])
    made.save(str(path))
    assert text == "x" or made.decode(made.encode(text).ids) != text  # as the package reads it
    tokenizer = open_tokenizer(path, end="<|end|>")
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode_bytes(tokens) == text.encode()


def test_a_messages_structure_has_no_spaces_of_a_file(path: Path):
    from tokenizers import pre_tokenizers

    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(list(CHAT_NAMES))
    made.save(str(path))
    messages = [
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": ""},
    ]
    messages[1]["tool_calls"] = [{"name": "f", "arguments": {"a": 1, "b": "c"}}]
    before = chat.encode(messages, [], open_tokenizer(path, end="<|end|>"), "x")
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.save(str(path))
    tokenizer = open_tokenizer(path, end="<|end|>")
    assert chat.encode(messages, [], tokenizer, "x").tokens.tolist() == before.tokens.tolist()
    assert 'message role="user" name="me"hi' in tokenizer.decode(before.tokens)


def test_merges_left_out_at_random_are_not(path: Path):
    data = json.loads(path.read_text())
    expected = open_tokenizer(path, end="<|end|>").encode(TEXT).tolist()
    edited(path, model=data["model"] | {"dropout": 0.9})
    tokenizer = open_tokenizer(path, end="<|end|>")
    assert all(tokenizer.encode(TEXT).tolist() == expected for _ in range(5))


def without_bytes(data: dict[str, Any]) -> dict[str, Any]:
    """A vocabulary that lacks two bytes: their text would be left out."""
    vocab = {name: i for name, i in data["model"]["vocab"].items() if name not in ("A", "Ġ")}
    merges = [pair for pair in data["model"]["merges"] if not {"A", "Ġ"} & set("".join(pair))]
    return {"model": data["model"] | {"vocab": vocab, "merges": merges}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: {"decoder": "ByteLevel"}, "a part must be an object with a type, not 'Byte"),
        (lambda data: {"decoder": ["ByteLevel"]}, "a part must be an object with a type"),
        (lambda data: {"decoder": {"type": "Sequence", "decoders": 3}}, "decoders must be a list"),
        (lambda data: {"decoder": {"type": 3}}, "a part must be an object with a type"),
        (lambda data: {"pre_tokenizer": "x"}, "a part must be an object with a type, not 'x'"),
        (lambda data: {"pre_tokenizer": {"type": "WhitespaceSplit"}}, "WhitespaceSplit drops"),
        (
            lambda data: {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {
                            "type": "Split",
                            "pattern": {"String": " "},
                            "behavior": "Removed",
                            "invert": False,
                        },
                        data["pre_tokenizer"],
                    ],
                }
            },
            "pre_tokenizer Split drops",
        ),
        (lambda data: {"pre_tokenizer": None}, "comes back as"),
        (without_bytes, "no token for byte 32 and 1 others"),
        (lambda data: {"model": []}, "is not a tokenizer file"),
        (lambda data: {"added_tokens": {"a": 1}}, "is not a tokenizer file"),
        (lambda data: {"version": "9"}, "is not a tokenizer file"),
    ],
)
def test_files_that_are_none(path: Path, change: Any, message: str):
    edited(path, **change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=rf"tokenizer\.json.*{re.escape(message)}"):
        open_tokenizer(path, end="<|end|>")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"tokenizer\.json must hold a JSON object, it holds a list"),
        (
            '{"decoder": ' + '{"type": "Sequence", "decoders": [' * 900 + "]}" * 900 + "}",
            "nested more",
        ),
        ("", r"tokenizer\.json is not JSON"),
        ("{}", r"tokenizer\.json: decoder missing"),
    ],
)
def test_text_that_is_no_file(path: Path, text: str, message: str):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_tokenizer(path, end="<|end|>")


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ([], "must hold a JSON object, it holds a list"),
        ({"eos_token": 7}, "eos_token must be a token's text, or an object with it as content"),
        ({"eos_token": {"content": None}}, "eos_token must be a token's text"),
        (
            {"added_tokens_decoder": [1]},
            "added_tokens_decoder must be an object of tokens by their",
        ),
        ({"added_tokens_decoder": {"x": "a"}}, "added_tokens_decoder: 'x' is no token's number"),
        ({"added_tokens_decoder": {"-1": "a"}}, "added_tokens_decoder: '-1' is no token's number"),
        ({"added_tokens_decoder": {"700": 3}}, "added_tokens_decoder[700] must be a token's text"),
    ],
)
def test_what_stands_beside_a_tokenizer(tmp_path: Path, beside: Any, message: str):
    lines = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json.*{re.escape(message)}"):
        open_tokenizer(tmp_path)
