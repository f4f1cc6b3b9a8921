from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch

from k31fn.data import images
from tests.data.pictures import coordinates, file, pil, png

CFG = images.Config()
SMALL = images.Config(max_patches=256, max_side=16)


@pytest.mark.parametrize(
    ("size", "cfg", "expected"),
    [
        ((28, 28), CFG, (28, 28, (1, 2, 2))),
        ((29, 28), CFG, (29, 28, (1, 2, 4))),  # never enlarged, padded to 56 x 28
        ((1, 1), CFG, (1, 1, (1, 2, 2))),
        ((100, 60), CFG, (100, 60, (1, 6, 8))),
        ((448, 448), SMALL, (224, 224, (1, 16, 16))),  # 32 x 32 patches, scale sqrt(256 / 1024)
        (
            (2240, 28),
            SMALL,
            (224, 2, (1, 2, 16)),
        ),  # by the side: 160 patches, scale 1 / 10, height 2.8
        ((300, 200), SMALL, (224, 149, (1, 12, 16))),  # by the side: scale 16 x 14 / 300
        ((10, 71_680), CFG, (1, 7168, (1, 512, 2))),
    ],
    ids=str,
)
def test_size_rule(size, cfg, expected):
    fitted = images._fit(*size, cfg)
    assert fitted == expected


def test_limits_hold_for_every_size():
    """Within what padding adds: a row and a column of cells. Never enlarged, and the shape is
    kept.
    """
    generator = np.random.default_rng(0)
    for width, height in generator.integers(1, 5000, (500, 2)):
        w, h, (t, rows, columns) = images._fit(int(width), int(height), SMALL)
        assert t == 1
        assert w <= width
        assert h <= height
        assert rows <= 16
        assert columns <= 16
        assert (rows - 2) * (columns - 2) <= 256
        assert rows % 2 == columns % 2 == 0
        assert 0 <= columns * 14 - w < 28
        assert 0 <= rows * 14 - h < 28
        if (w, h) != (width, height) and min(w, h) > 1:
            assert abs(w / width - h / height) <= 1 / min(width, height)


def test_patches_are_where_they_say():
    """Red is the column and green the row of each pixel, so a patch shows its place."""
    picture = images.decode(file(pil.fromarray(coordinates(56, 40)), "PNG"), "a", CFG)
    assert picture.grid == (1, 4, 4)
    assert (picture.width, picture.height, picture.num_slots) == (56, 40, 4)
    assert picture.patches.shape == (16, 588)
    patches = picture.patches.reshape(16, 3, 14, 14)
    places = [(int(p[1, 0, 0]) // 14, int(p[0, 0, 0]) // 14) for p in patches[:8]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    one = patches[6]  # row 1, column 2
    assert one[0].tolist() == [list(range(28, 42))] * 14
    assert one[1].tolist() == [[row] * 14 for row in range(14, 28)]
    assert (one[2] == 7).all()
    last = patches[15]  # rows 42 to 55, of which the image has none
    assert not last.any()
    assert patches[8, 0, :12].any()  # rows 28 to 39 are there, 40 and 41 are padding
    assert not patches[8, :, 12:].any()


def test_pixels_are_normalised():
    values = images.normalise(np.array([[0, 255, 51]], np.uint8))
    torch.testing.assert_close(values, torch.tensor([[-1.0, 1.0, -0.6]]))


def test_a_large_image_is_shrunk():
    picture = images.decode(png(700, 350, (10, 20, 30)), "a", SMALL)
    assert picture.grid == (1, 8, 16)
    assert (picture.width, picture.height) == (700, 350)
    colours = picture.patches.reshape(-1, 3, 196)
    assert [set(colours[:, c].ravel().tolist()) for c in range(3)] == [
        {10},
        {20},
        {30},
    ]  # 224 x 112, no padding


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_formats_and_modes(kind):
    picture = images.decode(file(pil.new("RGB", (28, 28), (250, 0, 0)), kind), "a", CFG)
    red, green, blue = picture.patches.reshape(-1, 3, 196).astype(int).mean((0, 2))
    assert red > 240
    assert max(green, blue) < 10


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_other_colours_become_rgb(mode):
    data = file(
        pil.new("RGB", (28, 28), (255, 255, 255)).convert(mode), "TIFF" if mode == "CMYK" else "PNG"
    )
    assert (images.decode(data, "a", CFG).patches == 255).all()


def bomb() -> bytes:
    """A PNG whose header promises 60000 x 60000 pixels in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


def test_transparent_pixels_show_the_board():
    """8 pixel squares, white at the top left; drawn after shrinking; half of it shows through alpha
    128.
    """
    clear = images.decode(
        file(pil.new("RGBA", (56, 28), (9, 9, 9, 0)), "PNG"), "a", CFG
    ).patches.reshape(8, 3, 14, 14)
    assert clear[0, :, 0, :].tolist() == [[255] * 8 + [180] * 6] * 3
    assert clear[0, 0, 8:, 0].tolist() == [180] * 6
    assert clear[0, 0, 8:, 8].tolist() == [255] * 6
    half = images.decode(
        file(pil.new("RGBA", (28, 28), (0, 0, 0, 128)), "PNG"), "a", CFG
    ).patches.reshape(4, 3, 14, 14)
    assert abs(int(half[0, 0, 0, 0]) - 127) <= 1
    assert abs(int(half[0, 0, 0, 8]) - 90) <= 1
    large = images.decode(
        file(pil.new("RGBA", (560, 560), (0, 0, 0, 0)), "PNG"), "a", SMALL
    ).patches.reshape(-1, 3, 14, 14)
    assert large[0, 0, 0].tolist() == [255] * 8 + [180] * 6


def test_a_palette_with_transparency():
    image = pil.new("P", (28, 28), 0)
    image.putpalette([200, 0, 0] * 256)
    clear = images.decode(file(image, "PNG", transparency=0), "a", CFG)
    assert set(clear.patches.ravel().tolist()) == {255, 180}
    assert images.decode(file(image, "PNG"), "a", CFG).patches.reshape(4, 3, 196)[:, 0].min() == 200


BAD = {
    "empty": (b"", "the file is empty"),
    "corrupt": (b"not an image", "cannot be decoded"),
    "huge": (bomb(), "."),
    "animated": (
        file(
            pil.new("RGB", (28, 28)),
            "GIF",
            save_all=True,
            append_images=[pil.new("RGB", (28, 28), (9, 9, 9))],
        ),
        "several frames",
    ),
    "unsupported": (file(pil.fromarray(np.full((28, 28), 70_000, np.int32)), "TIFF"), "8 bits"),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_images_name_the_sample_and_the_reason(reason):
    data, text = BAD[reason]
    with pytest.raises(images.ImageError, match=rf"image a.jsonl:3: .*{text}") as caught:
        images.decode(data, "a.jsonl:3", CFG)
    assert caught.value.reason == reason


@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_truncated_files_are_corrupt(kind, part):
    noise = np.random.default_rng(0).integers(0, 255, (100, 100, 3), dtype=np.uint8)
    whole = file(pil.fromarray(noise), kind)
    with pytest.raises(images.ImageError, match="image a: cannot be decoded") as caught:
        images.decode(whole[: int(len(whole) * part)], "a", CFG)
    assert caught.value.reason == "corrupt"


def test_the_limit_of_pixels_is_the_configs():
    assert images.decode(png(30, 30), "a", images.Config(max_pixels=900)).grid == (1, 4, 4)
    with pytest.raises(
        images.ImageError, match=r"30 x 30 pixels are more than images\.max_pixels=899"
    ) as caught:
        images.decode(png(30, 30), "a", images.Config(max_pixels=899))
    assert caught.value.reason == "huge"


def test_formats_that_start_programs_are_not_opened():
    with pytest.raises(images.ImageError, match="cannot be decoded"):
        images.decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n", "a", CFG)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_side": 5}, "max_side=5 must be even"), ({"patch_size": 0}, "patch_size=0")],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        images.Config(**change)
