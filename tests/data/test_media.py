from __future__ import annotations

import numpy as np
import pytest

from k31fn.data import ByteTokenizer, media
from k31fn.data.images import Image

TOKENIZER = ByteTokenizer(media=True)
BEGIN, CONTENT, END, PAD = 257, 258, 259, 260


def picture(h: int, w: int) -> Image:
    return Image(np.zeros((h * w, 588), np.uint8), (1, h, w), 14 * w - 3, 14 * h)


TWO = [picture(2, 4), picture(4, 4)]  # 2 and 4 slots


def test_media_tokens():
    assert media.media_tokens(TOKENIZER) == (BEGIN, CONTENT, END, PAD)
    assert TOKENIZER.vocab_size == 261
    with pytest.raises(ValueError, match=r"no <\|media_begin\|>.*ByteTokenizer\(media=True\)"):
        media.media_tokens(ByteTokenizer())


def test_placeholders_become_blocks():
    tokens = media.encode(f"a{media.PLACEHOLDER}b{media.PLACEHOLDER}", TWO, TOKENIZER, "x")
    first = [BEGIN, *b"image 53x28", CONTENT, PAD, PAD, END]
    second = [BEGIN, *b"image 53x56", CONTENT, PAD, PAD, PAD, PAD, END]
    assert tokens.tolist() == [*b"a", *first, *b"b", *second]


@pytest.mark.parametrize("pads", [(1, 1), (2, 4)], ids=["one each", "all of them"])
def test_both_layouts_of_pads(pads):
    text = "a" + "<|media_pad|>" * pads[0] + "b<|media_begin|>" + "<|media_pad|>" * pads[1]
    tokens = media.encode(text, TWO, TOKENIZER, "x")
    assert tokens.tolist() == [97, PAD, PAD, 98, BEGIN, PAD, PAD, PAD, PAD]


def test_images_side_by_side():
    assert media.encode("<|media_pad|>" * 6, TWO, TOKENIZER, "x").tolist() == [PAD] * 6
    assert media.encode("<|media_pad|>" * 2, TWO, TOKENIZER, "x").tolist() == [PAD] * 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<|media_pad|>" * 3,
            r"^x has 3 image placeholders; its 2 images need one each, or 2 \+ 4 = 6",
        ),
        ("none", "^x has 0 image placeholders"),
        (media.PLACEHOLDER * 3, "^x has more .* than its 2 images"),
        (
            "<|media_pad|>" * 3 + "a" + "<|media_pad|>" * 3,
            "^x: its placeholders are interrupted after 3",
        ),
        (
            "<|media_pad|>" * 4 + "a" + "<|media_pad|>" * 2,
            "^x: its placeholders are interrupted after 4",
        ),
    ],
)
def test_counts_that_do_not_fit_name_the_document(text, message):
    with pytest.raises(ValueError, match=message):
        media.encode(text, TWO, TOKENIZER, "x")


def test_without_images_the_names_are_text():
    text = f"how to write {media.PLACEHOLDER} or <|media_pad|>"
    assert media.encode(text, [], TOKENIZER, "x").tolist() == list(text.encode())
    assert TOKENIZER.encode("<|media_pad|>").tolist() == list(b"<|media_pad|>")
    assert TOKENIZER.decode([104, PAD, BEGIN, 105]) == "hi"
