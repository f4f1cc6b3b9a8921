"""Images inside text: media tokens, and the layouts of placeholders.

A document with images marks where each one stands, in order, in one of three ways:

- :data:`PLACEHOLDER`, which becomes ``<|media_begin|>image {w}x{h}<|media_content|>``, one
  ``<|media_pad|>`` per slot of the image (2 x 2 patches) and ``<|media_end|>``; w and h are those
  of the file in pixels;
- one ``<|media_pad|>`` per image, which is repeated once per slot;
- all of its ``<|media_pad|>``, which are counted.

The names of media tokens are tokens in a document with images only; elsewhere they are text like
any other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from k31fn.data.images import Image
from k31fn.data.tokenizer import MEDIA_NAMES, Tokenizer

__all__ = ["PLACEHOLDER", "encode", "media_tokens", "spans"]

PLACEHOLDER = "<|kimi_image_placeholder|>"
_STRUCTURE = re.compile("(" + "|".join(map(re.escape, (PLACEHOLDER, *MEDIA_NAMES))) + ")")


class _MediaTokens(NamedTuple):
    """The tokens around an image, and the one that stands for its features."""

    begin: int
    content: int
    end: int
    pad: int


def media_tokens(tokenizer: Tokenizer) -> _MediaTokens:
    """The media tokens of a tokenizer.

    Raises:
        ValueError: it has not all of them.
    """
    known = tokenizer.special_tokens
    missing = [name for name in MEDIA_NAMES if name not in known]
    if missing:
        raise ValueError(
            f"the tokenizer has no {', '.join(missing)}, which documents with images need; use "
            "one that has, such as ByteTokenizer(media=True)"
        )
    begin, content, end, pad = MEDIA_NAMES
    return _MediaTokens(known[begin], known[content], known[end], known[pad])


def encode(text: str, images: Sequence[Image], tokenizer: Tokenizer, name: str) -> np.ndarray:
    """The tokens of a document with images, each placeholder expanded; without the end token.

    Raises:
        ValueError: the placeholders do not fit the images; names the document.
    """
    if not images:
        return tokenizer.encode(text).astype(np.int64)
    media = media_tokens(tokenizer)
    by_name = dict(zip(MEDIA_NAMES, media, strict=True))
    parts: list[np.ndarray] = []
    left = iter(images)
    # The pattern has a group, so what it splits at is among the pieces.
    for piece in _STRUCTURE.split(text):
        if piece == PLACEHOLDER:
            image = next(left, None)
            if image is None:
                raise ValueError(f"{name} has more {PLACEHOLDER} than its {len(images)} images")
            label = tokenizer.encode(f"image {image.width}x{image.height}")
            # One placeholder of features, which `expand` repeats.
            tail = np.array([media.content, media.pad, media.end])
            parts += [np.array([media.begin]), label, tail]
        elif piece in by_name:
            parts.append(np.array([by_name[piece]]))
        elif piece:
            parts.append(tokenizer.encode(piece))
    # Behind an empty part, since an empty text has none and numpy refuses to join nothing.
    tokens = np.concatenate([np.zeros(0, np.int64), *parts], dtype=np.int64)
    return _expand(tokens, [image.num_slots for image in images], media.pad, name)


def _expand(tokens: np.ndarray, slots: Sequence[int], pad: int, name: str) -> np.ndarray:
    """Tokens in which image i has ``slots[i]`` placeholders, from those with one per image or with
    all of them.

    Raises:
        ValueError: neither: the counts do not fit, or a run of placeholders ends inside an image;
            names the document.
    """
    is_pad = tokens == pad
    count = int(is_pad.sum())
    total = sum(slots)
    # Images of one slot each come here, too: one placeholder is all that they have.
    if count == len(slots):
        repeats = np.ones(len(tokens), np.int64)
        repeats[is_pad] = slots
        return np.repeat(tokens, repeats)
    if count != total:
        raise ValueError(
            f"{name} has {count} image placeholders; its {len(slots)} images need one each, or "
            f"{' + '.join(map(str, slots)) or 0} = {total} in all, one per 2 x 2 patches"
        )
    # All are there. A run of them may be of several images, but must end where one does.
    edges = np.flatnonzero(np.diff(is_pad, prepend=False, append=False))
    runs = edges[1::2] - edges[::2]
    wrong = np.setdiff1d(np.cumsum(runs), np.cumsum(slots))
    if len(wrong):
        raise ValueError(
            f"{name}: its placeholders are interrupted after {wrong[0]} of them, inside an image; "
            f"images need {list(slots)} in a row each"
        )
    return tokens


def spans(tokens: np.ndarray, slots: Sequence[int], media: _MediaTokens) -> np.ndarray:
    """``[images, 2]``: from where to where the tokens of each image go, with those around its
    placeholders if there.

    A document may be cut anywhere but inside a span.
    """
    pads = np.flatnonzero(tokens == media.pad)
    ends = np.cumsum([0, *slots])  # of each image, in placeholders
    places = np.zeros((len(slots), 2), np.int64)
    before = 0
    for i, (first, last) in enumerate(itertools.pairwise(ends)):
        start = int(pads[first])
        stop = int(pads[last - 1]) + 1
        # The last begin since the image before: its label stands between it and the placeholders.
        opened = np.flatnonzero(tokens[before:start] == media.begin)
        start = before + int(opened[-1]) if len(opened) else start
        stop += int(stop < len(tokens) and tokens[stop] == media.end)
        places[i] = (start, stop)
        before = stop
    return places
