"""The tokenizer of Kimi models: a ``tiktoken.model`` file, its pre-split rule and its special
tokens.

The file has one line per token, its bytes in base64 and its rank. Text is cut by :data:`PATTERN`;
inside a piece the pair of neighbours whose union has the lowest rank is merged until none is left.
256 special ids follow the base ranks; ``tokenizer_config.json`` beside the file names some. Only
these two files are read: no code of a model is run.

The merging is done by the ``tiktoken`` package (extra ``data``), whose regular expressions know the
set operations of the rule. Long texts and long runs are cut first, at the lengths of the released
tokenizer.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k31fn import regular_files
from k31fn.data.tokenizer import Tokens

__all__ = ["PATTERN", "RanksTokenizer", "read_ranks"]

NUM_SPECIAL = 256
_MOST = 1 << 30  # bytes of a file; that of K3 has some megabytes
_MAX_CHARS = 400_000  # of one call
_MAX_RUN = 25_000  # characters that are all spaces or all none

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        _BEFORE + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _BEFORE + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Pieces, in this order: Han; a cased word with one character before it and a contraction after it;
up to three digits; punctuation with a space before and line ends after it; line ends; spaces up to
the last before a word; spaces."""

_RUNS = re.compile(rf"\s{{1,{_MAX_RUN}}}|\S{{1,{_MAX_RUN}}}")
# What surrogateescape makes of bytes that are not UTF-8; the group keeps them among the pieces.
_INVALID = re.compile(r"([\udc80-\udcff]+)")


@dataclass(frozen=True, eq=False)
class RanksTokenizer:
    """Tokens of a ranks file, then special ones.

    Attributes:
        ranks: the bytes of each base token, by rank.
        named: special tokens with a name of their own; the others are called
            ``<|reserved_token_{id}|>``.
        end: the name of the token that ends a document.

    Raises:
        ValueError: a name outside the special ids or without an id.
        ImportError: tiktoken is not installed.
    """

    ranks: Sequence[bytes]
    named: Mapping[str, int]
    end: str = "[EOS]"

    def __post_init__(self) -> None:
        first = len(self.ranks)
        last = self.vocab_size - 1
        wrong = {name: i for name, i in self.named.items() if not first <= i <= last}
        if wrong:
            raise ValueError(
                f"special tokens {wrong} are outside the special ids {first} to {last}"
            )
        if self.end not in self.special_tokens:
            raise ValueError(
                f"end token {self.end!r} is not a special token; known: {sorted(self.named)}"
            )
        _ = self._encoding  # now, so that a missing package is an error at the start

    @property
    def vocab_size(self) -> int:
        """Base tokens and special ones."""
        return len(self.ranks) + NUM_SPECIAL

    @property
    def end_token(self) -> int:
        """The id of ``end``."""
        return self.special_tokens[self.end]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """All special tokens by name."""
        return self._special

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of a text; never a special one.

        Bytes that are not UTF-8 become the tokens of single bytes.
        """
        if isinstance(text, bytes):
            string = text.decode("utf-8", errors="surrogateescape")
        else:
            string = _clean(text)
        tokens: list[int] = []
        for index, part in enumerate(_INVALID.split(string)):
            if index % 2:  # what the pattern matched: bytes b as U+DC00 + b
                tokens += [self._byte_tokens[ord(c) - 0xDC00] for c in part]
            else:
                for chunk in _chunks(part):
                    tokens += self._encoding.encode_ordinary(chunk)
        return np.array(tokens, np.uint32)

    def decode_bytes(self, tokens: Tokens) -> bytes:
        """The bytes of the base tokens; special ones and what is no token have none."""
        values = np.asarray(tokens, dtype=np.int64).ravel()
        base = values[(values >= 0) & (values < len(self.ranks))]
        return b"".join(map(self.ranks.__getitem__, base.tolist()))

    def decode(self, tokens: Tokens) -> str:
        """The bytes as UTF-8, with U+FFFD for what is not."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        special = dict(self.named)
        taken = set(special.values())
        for number in range(len(self.ranks), self.vocab_size):
            if number not in taken:
                special[f"<|reserved_token_{number}|>"] = number
        return special

    @functools.cached_property
    def _encoding(self) -> Any:
        try:
            import tiktoken  # pyright: ignore[reportMissingImports]  # optional: the extra `data`
        except ImportError as e:
            raise ImportError("a ranks file needs tiktoken; pip install 'k31fn[data]'") from e
        # Without special tokens: no text can become one.
        ranks = {token: rank for rank, token in enumerate(self.ranks)}
        return tiktoken.Encoding("k31fn", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    @functools.cached_property
    def _byte_tokens(self) -> list[int]:
        """The token of each single byte."""
        tokens = [0] * 256
        for rank, token in enumerate(self.ranks):
            if len(token) == 1:
                tokens[token[0]] = rank
        return tokens


def read_ranks(path: Path) -> list[bytes]:
    """The tokens of a ranks file, in the order of their ranks.

    Raises:
        ValueError: a line that is no token and rank, ranks that are not 0, 1, 2, ..., a token
            twice, or a byte that no token stands for; names the line.
    """
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(regular_files.read(path, most=_MOST).splitlines(), 1):
        if not line.strip():
            continue
        try:
            code, rank = line.split()
            token = base64.b64decode(code, validate=True)
            place = int(rank)
        except (ValueError, binascii.Error) as e:
            raise ValueError(
                f"{path}:{number}: expected a token in base64 and its rank, got {line[:60]!r}"
            ) from e
        if not token:
            raise ValueError(f"{path}:{number}: an empty token")
        if place in by_rank:
            raise ValueError(f"{path}:{number}: rank {place} is given twice")
        by_rank[place] = token
    tokens = set(by_rank.values())
    if sorted(by_rank) != list(range(len(by_rank))) or len(tokens) != len(by_rank):
        raise ValueError(f"{path}: ranks must be 0 to {len(by_rank) - 1}, each of another token")
    # Any text can be told from its bytes only if each of them has a token.
    missing = [b for b in range(256) if bytes([b]) not in tokens]
    if missing:
        raise ValueError(
            f"{path}: no token for byte {missing[0]} and {len(missing) - 1} others; it is not a "
            "ranks file"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _clean(text: str) -> str:
    """``text`` with lone surrogates replaced: they have no bytes."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _chunks(text: str) -> Iterator[str]:
    """The text in parts of at most _MAX_CHARS, cut also where a run of spaces or of none reaches
    _MAX_RUN.
    """
    for begin in range(0, len(text), _MAX_CHARS):
        part = text[begin : begin + _MAX_CHARS]
        start = 0
        runs = list(_RUNS.finditer(part)) if len(part) > _MAX_RUN else []
        for run, following in itertools.pairwise(runs):
            # Two of a kind side by side: one run that was cut at its longest.
            if run[0].isspace() == following[0].isspace():
                yield part[start : run.end()]
                start = run.end()
        yield part[start:]
