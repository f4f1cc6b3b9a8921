"""Tokenizers in the JSON format of Hugging Face ``tokenizers``, byte-level ones: each token stands
for some bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k31fn.data.tokenizer import Tokens

__all__ = ["JsonTokenizer"]


@dataclass(frozen=True, eq=False)
class JsonTokenizer:
    """A ``tokenizer.json``.

    Attributes:
        path: of the file.
        end: the name of the token that ends a document.

    Raises:
        ValueError: the file is no tokenizer, is not byte-level, or has no such end token.
        ImportError: tokenizers is not installed.
    """

    path: Path
    end: str

    def __post_init__(self) -> None:
        kinds = _kinds(json.loads(self.path.read_text(encoding="utf-8")).get("decoder") or {})
        if "ByteLevel" not in kinds:
            raise ValueError(
                f"{self.path}: decoder {kinds or 'missing'}; k31fn reads byte-level tokenizers, "
                "whose decoder is ByteLevel: the others cannot say which bytes a token stands for"
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
        if token in self._tokenizer.get_added_tokens_decoder():  # ordinary text, kept whole
            return name.encode()
        return bytes(_BYTES[c] for c in name)

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        special: dict[str, int] = {}
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special:
                special[token.content] = number
        return special

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            import tokenizers  # pyright: ignore[reportMissingImports]  # optional: the extra `data`
        except ImportError as e:
            raise ImportError("a tokenizer.json needs tokenizers; pip install 'k31fn[data]'") from e
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as e:  # it raises Exception itself
            raise ValueError(f"{self.path} is not a tokenizer file: {e}") from e
        # Their names in a text are text: what a user writes can never become one.
        tokenizer.encode_special_tokens = True
        return tokenizer


def _kinds(decoder: dict[str, Any]) -> list[str]:
    """The types of a decoder and of those inside of it."""
    if not decoder:
        return []
    kinds = [decoder["type"]]
    for inner in decoder.get("decoders", ()):
        kinds += _kinds(inner)
    return kinds


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
