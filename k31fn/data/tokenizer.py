"""Text to tokens and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

__all__ = ["CHAT_NAMES", "MEDIA_NAMES", "ByteTokenizer", "Tokenizer", "fingerprint"]

Tokens = Sequence[int] | np.ndarray | Tensor


@runtime_checkable
class Tokenizer(Protocol):
    """What k31fn asks of a tokenizer. Tokens are 0 <= token < vocab_size."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the end token among them."""
        ...

    @property
    def end_token(self) -> int:
        """The token after the last one of a document; :meth:`encode` never gives it."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens with a name and a meaning of their own, such as ``<|media_pad|>``; :meth:`encode`
        gives none.
        """
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of a text as a 1-D array of unsigned integers; names of special tokens are
        text like any other.
        """
        ...

    def decode_bytes(self, tokens: Tokens) -> bytes:
        """The bytes of the tokens, any run of them; the end token and what is no token have
        none.
        """
        ...

    def decode(self, tokens: Tokens) -> str:
        """The text of the tokens, any run of them; never fails: bytes that are not UTF-8 become
        U+FFFD.
        """
        ...


MEDIA_NAMES = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
"""Special tokens around an image, the last one in place of each of its features."""

CHAT_NAMES = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
"""Special tokens that give a conversation its structure (:mod:`k31fn.data.chat`)."""


_SAMPLE = """def sample(values: list[int], scale=0.5) -> dict:
    \"\"\"Returns what isn't there, e.g. 1,234.56 or 2026-01-31.\"\"\"
\treturn {str(v): scale * v**2 for v in values if v != 0x1F}\n\n
The quick brown fox jumped over 13 lazy dogs; they'd have none of it (see https://a.org/?b=c).
Zwölf große Boxkämpfer, où êtes-vous, ¿qué?, привет мир, שלום,
مرحبا, नमस्ते, 你好世界, こんにちは, 안녕하세요 😀
"""


def fingerprint(tokenizer: Tokenizer) -> str:
    """Tells tokenizers apart by what they do: a hash of the tokens of a text in many scripts, of
    the special tokens and of the size. A copy of a file, or one written anew, has the same.
    """
    special = sorted(tokenizer.special_tokens.items())
    tokens = tokenizer.encode(_SAMPLE).tolist()
    what = repr((tokenizer.vocab_size, tokenizer.end_token, special, tokens))
    return hashlib.sha256(what.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes, 0 to 255, the end token 256, and from 257 on four for images if ``media`` and
    four if ``chat``.
    """

    media: bool = False
    chat: bool = False

    @property
    def vocab_size(self) -> int:
        """257, and four more with media tokens and with those of conversations."""
        return 257 + len(self.special_tokens)

    @property
    def end_token(self) -> int:
        """256."""
        return 256

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The media tokens, then those of conversations."""
        names = (MEDIA_NAMES if self.media else ()) + (CHAT_NAMES if self.chat else ())
        return {name: 257 + i for i, name in enumerate(names)}

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes; of a str its UTF-8, where a lone surrogate becomes ``?``."""
        # uint8 and a view of the text: a corpus of bytes takes no more memory than its text.
        data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8)

    def decode_bytes(self, tokens: Tokens) -> bytes:
        """The tokens that are bytes."""
        values = np.asarray(tokens, dtype=np.int64).ravel()
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes()

    def decode(self, tokens: Tokens) -> str:
        """The bytes as UTF-8, with U+FFFD for what is not."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")
