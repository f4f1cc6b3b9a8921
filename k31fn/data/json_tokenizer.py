"""Tokenizers in the JSON format of Hugging Face ``tokenizers``, byte-level ones: each token stands
for some bytes.

``decode_bytes(encode(x))`` is ``x``, whatever such a file says beside its tokens and merges.
Truncation and padding to a length, a normaliser, a space in front, spaces that a token swallows and
merges left out at random are set aside: they are for other uses of the file, and would lose or
change text in silence. What cannot be set aside is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k31fn import strict_json
from k31fn.data.tokenizer import Tokens

__all__ = ["JsonTokenizer"]

_MOST = 1 << 30  # bytes of a file; a million tokens have some 50 MB
# Parts that cut text and keep all of it; of the others some drop the spaces that they cut at.
_CUTTERS = ("ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts")
# Looked at on opening: spaces at all places, capitals, accents, line ends, control characters.
_PROBE = "  Aé x\t\n\r\n 12!?_É\x00\x7f e\u0301 \u00a0\u2028你好 😀 "


@dataclass(frozen=True, eq=False)
class JsonTokenizer:
    """A ``tokenizer.json``.

    Attributes:
        path: of the file.
        end: the name of the token that ends a document.

    Raises:
        ValueError: the file is no tokenizer, is not byte-level, does not give each text back, or
            has no such end token.
        ImportError: tokenizers is not installed.
    """

    path: Path
    end: str

    def __post_init__(self) -> None:
        known = self._tokenizer.get_vocab(with_added_tokens=False)
        missing = sorted(b for c, b in _BYTES.items() if c not in known and b not in _NEVER)
        if missing:
            raise ValueError(
                f"{self.path}: no token for byte {missing[0]} and {len(missing) - 1} others, whose "
                "text would be lost"
            )
        again = self.decode(self.encode(_PROBE))
        if again != _PROBE:
            raise ValueError(
                f"{self.path}: {_PROBE!r} comes back as {again!r}; k31fn reads tokenizers that "
                "give each text back"
            )
        if self.end not in self.special_tokens:
            raise ValueError(
                f"end token {self.end!r} is not in {self.path}; known: "
                f"{sorted(self.special_tokens)}"
            )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        # Not the number of tokens: ids may have gaps, and each needs a row of the embedding.
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_token(self) -> int:
        """The id of ``end``."""
        return self.special_tokens[self.end]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The added tokens that the file calls special."""
        return self._special

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of a text, none of them special; what is not UTF-8 becomes U+FFFD."""
        string = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        # A lone surrogate, which a str may hold, has no bytes.
        clean = string.encode("utf-8", errors="replace").decode("utf-8")
        return np.array(self._tokenizer.encode(clean, add_special_tokens=False).ids, np.uint32)

    def decode_bytes(self, tokens: Tokens) -> bytes:
        """The bytes of the tokens; special ones and what is no token have none."""
        special = set(self.special_tokens.values())
        values = np.asarray(tokens, dtype=np.int64).ravel().tolist()
        return b"".join(self._bytes(t) for t in values if t >= 0 and t not in special)

    def decode(self, tokens: Tokens) -> str:
        """The bytes as UTF-8, with U+FFFD for what is not."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        # An added token is ordinary text, kept whole; so is one that no byte-level text becomes.
        if token in self._added or not _BYTES.keys() >= set(name):
            return name.encode()
        return bytes(_BYTES[c] for c in name)

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        return self._tokenizer.get_added_tokens_decoder()

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        special: dict[str, int] = {}
        for number, token in self._added.items():
            if token.special:
                special[token.content] = number
        return special

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            import tokenizers  # pyright: ignore[reportMissingImports]  # optional: the extra `data`
        except ImportError as e:
            raise ImportError("a tokenizer.json needs tokenizers; pip install 'k31fn[data]'") from e
        text = json.dumps(_exact(strict_json.load_object(self.path, most=_MOST), self.path))
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # it raises Exception itself, and its panics are none
            raise ValueError(f"{self.path} is not a tokenizer file: {e}") from e
        # Their names in a text are text: what a user writes can never become one.
        tokenizer.encode_special_tokens = True
        return tokenizer


def _exact(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a file holds, with what would lose or change text set aside.

    Raises:
        ValueError: it is not byte-level, or cuts text where it loses some.
    """
    decoders = list(_parts(data.get("decoder"), "decoders", path))
    kinds = [decoder["type"] for decoder in decoders]
    if "ByteLevel" not in kinds:
        raise ValueError(
            f"{path}: decoder {kinds or 'missing'}; k31fn reads byte-level tokenizers, "
            "whose decoder is ByteLevel: the others cannot say which bytes a token stands for"
        )
    for cutter in _parts(data.get("pre_tokenizer"), "pretokenizers", path):
        if cutter["type"] not in _CUTTERS or cutter.get("behavior") == "Removed":
            raise ValueError(
                f"{path}: pre_tokenizer {cutter['type']} drops or replaces what it cuts at; k31fn "
                "reads tokenizers that give each text back"
            )
        if cutter["type"] == "ByteLevel":
            cutter["add_prefix_space"] = False
    for name in ("truncation", "padding", "normalizer"):
        data[name] = None
    bpe = data.get("model")
    if isinstance(bpe, dict) and "dropout" in bpe:
        bpe["dropout"] = None
    added = data.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            token |= {"lstrip": False, "rstrip": False}
    return data


def _parts(whole: Any, name: str, path: Path) -> Iterator[dict[str, Any]]:
    """The parts of a decoder or a pre-tokenizer, which may be a sequence of them."""
    if whole is None:
        return
    if not isinstance(whole, dict) or not isinstance(whole.get("type"), str):
        raise ValueError(
            f"{path} is not a tokenizer file: a part must be an object with a type, not "
            f"{str(whole)[:60]!r}"
        )
    inner = whole.get(name, [])
    if whole["type"] != "Sequence":
        yield whole
    elif not isinstance(inner, list):
        raise ValueError(f"{path} is not a tokenizer file: {name} must be a list")
    else:
        for part in inner:
            yield from _parts(part, name, path)


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the others follow from
    U+0100.
    """
    # Without the space, and without the soft hyphen at 0xAD.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet: dict[str, int] = {}
    following = 0x100
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(following)] = byte
            following += 1
    return alphabet


_BYTES = _alphabet()
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 has not
