"""The tokenizer that a path means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k31fn import regular_files, strict_json
from k31fn.data.json_tokenizer import JsonTokenizer
from k31fn.data.ranks_tokenizer import RanksTokenizer, read_ranks
from k31fn.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["open_tokenizer"]

_CONFIG = "tokenizer_config.json"

# Places after the base ranks, as released with K3: for a ranks file that comes alone.
_K3 = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}


def open_tokenizer(path: str | Path, *, end: str = "") -> Tokenizer:
    """The tokenizer at ``path``. Nothing is downloaded and no code of a model is run.

    Args:
        path: ``bytes``; ``bytes+media``, with tokens for images; ``bytes+chat``, with those of
            conversations; ``bytes+media+chat``; a ranks file such as ``tiktoken.model``; a
            ``.json`` file of ``tokenizers``; or a folder with one of the two.
        end: the name of the token that ends a document. "": the ``eos_token`` of
            ``tokenizer_config.json`` beside the file, or ``[EOS]``.

    Raises:
        ValueError: there is no such file, or it is not what it should be.
        ImportError: the package that reads it is not installed.
    """
    kinds = str(path).split("+")
    if kinds[0] == "bytes" and kinds[1:] in ([], ["media"], ["chat"], ["media", "chat"]):
        if end:
            raise ValueError(
                f"end={end!r}: the end token of tokenizer {str(path)!r} has no name; leave it out"
            )
        return ByteTokenizer(media="media" in kinds, chat="chat" in kinds)
    file = _file(regular_files.path(path, "tokenizer"))
    config = file.parent / _CONFIG
    beside = strict_json.load_object(config) if config.is_file() else {}
    named_end = beside.get("eos_token")
    end = end or (_name(named_end, "eos_token", config) if named_end else "[EOS]")
    if file.suffix == ".json":
        return JsonTokenizer(file, end)
    ranks = read_ranks(file)
    named: dict[str, int] = {}
    for number, token in _added_tokens(beside, config):
        if number >= len(ranks):  # below are ordinary tokens that a file names, too
            named[_name(token, f"added_tokens_decoder[{number}]", config)] = number
    if not named:
        named = {name: len(ranks) + place for name, place in _K3.items()}
    return RanksTokenizer(ranks, named, end)


def _added_tokens(beside: dict[str, Any], config: Path) -> Iterator[tuple[int, Any]]:
    """Number and token of each entry of ``added_tokens_decoder``."""
    entries = beside.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ValueError(
            f"{config}: added_tokens_decoder must be an object of tokens by their number, not a "
            f"{type(entries).__name__}"
        )
    for number, token in entries.items():
        if not number.isascii() or not number.isdecimal() or len(number) > 9:
            raise ValueError(
                f"{config}: added_tokens_decoder: {number[:60]!r} is no token's number"
            )
        yield int(number), token


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    # The ranks file first: it is what Kimi's checkpoints come with.
    for name in ("tiktoken.model", "tokenizer.json"):
        if (path / name).is_file():
            return path / name
    raise ValueError(
        f"tokenizer {str(path)!r}: neither 'bytes', nor a file, nor a folder with tiktoken.model "
        "or tokenizer.json"
    )


def _name(token: Any, field: str, config: Path) -> str:
    """The text of a token that a file gives as a string or as an object with its content."""
    name = token.get("content") if isinstance(token, dict) else token
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{config}: {field} must be a token's text, or an object with it as content, not "
            f"{str(token)[:60]!r}"
        )
    return name
