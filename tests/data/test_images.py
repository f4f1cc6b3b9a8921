from __future__ import annotations

import io
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
    [
        ({"max_side": 5}, "max_side=5 must be even"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"max_patches": 3}, "max_patches=3 must be at least 4"),
    ],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        images.Config(**change)


# ----------------------------------------------------------------------------- as cameras make them
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_an_image_lies_as_its_exif_says(orientation: int, kind: str):
    """Against Pillow's own turning, which viewers do too; lossless kinds, so every pixel."""
    import PIL.ImageOps

    exif = pil.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file(pil.fromarray(coordinates(56, 28)), kind, exif=exif, **options)
    found = images.decode(data, "a", CFG)
    upright = PIL.ImageOps.exif_transpose(pil.open(io.BytesIO(data)))
    expected = images.decode(
        file(pil.fromarray(np.asarray(upright.convert("RGB"))), "PNG"), "a", CFG
    )
    assert (found.width, found.height) == ((56, 28) if orientation < 5 else (28, 56))
    assert found.grid == expected.grid
    assert np.array_equal(found.patches, expected.patches)


def test_a_photo_that_was_held_sideways():
    """EXIF 6 is turned clockwise by viewers: what the file has at the left lies at the top."""
    pixels = np.zeros((28, 56, 3), np.uint8)
    pixels[:, :28] = (250, 0, 0)
    pixels[:, 28:] = (0, 250, 0)
    exif = pil.Exif()
    exif[0x0112] = 6
    picture = images.decode(file(pil.fromarray(pixels), "JPEG", quality=95, exif=exif), "a", CFG)
    assert (picture.width, picture.height, picture.grid) == (28, 56, (1, 4, 2))
    means = picture.patches.reshape(2, 4, 3, 196).astype(int).mean((1, 3))  # of cells, top first
    assert means[0, 0] > 240 > 10 > means[0, 1]
    assert means[1, 1] > 240 > 10 > means[1, 0]


def test_a_broken_exif_does_not_cost_the_picture():
    data = file(pil.new("RGB", (28, 28), (250, 0, 0)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff")
    assert images.decode(data, "a", CFG).grid == (1, 2, 2)


def test_of_a_jpeg_with_several_pictures_the_first():
    out = io.BytesIO()
    second = pil.new("RGB", (14, 14), (0, 0, 250))
    pil.new("RGB", (28, 28), (250, 0, 0)).save(out, "MPO", save_all=True, append_images=[second])
    assert pil.open(io.BytesIO(out.getvalue())).format == "MPO"
    picture = images.decode(out.getvalue(), "a", CFG)
    assert (picture.width, picture.height) == (28, 28)
    assert picture.patches.reshape(-1, 3, 196)[:, 0].min() > 240


def test_the_limit_on_patches_holds_for_every_shape():
    """Also of thin images, where padding is most of it; what fits is not shrunk further."""
    cfg = images.Config(max_patches=64)
    picture = images.decode(png(10_000, 20), "a", cfg)
    assert picture.grid[1] * picture.grid[2] == len(picture.patches) <= 64
    generator = np.random.default_rng(0)
    sides = np.exp(generator.uniform(0, 11, (2000, 2))).astype(int)
    for most in (4, 6, 64, 1000):
        cfg = images.Config(max_patches=most)
        for width, height in sides.tolist():
            fitted = images._fit(width, height, cfg)
            _, rows, columns = fitted.grid
            assert 4 <= rows * columns <= most
            assert rows * 14 >= fitted.height > (rows - 2) * 14
            assert columns * 14 >= fitted.width > (columns - 2) * 14
    # By hand: 3 x 3 cells are 36 patches; of 35 allowed, 2 x 2 cells are what a square may have.
    assert images._fit(84, 84, images.Config(max_patches=36)) == (84, 84, (1, 6, 6))
    assert images._fit(84, 84, images.Config(max_patches=35)).grid == (1, 4, 4)
    assert images._fit(57, 28, images.Config(max_patches=8)).grid == (1, 2, 4)


def test_a_line_of_pixels_is_refused_by_its_header():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    for width, height in ((1, 60_000_000), (60_000_000, 1), (65_536, 2)):
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"x"))
        with pytest.raises(images.ImageError, match="a side of more than 65,535; cut it") as caught:
            images.decode(data + chunk(b"IEND", b""), "a", CFG)
        assert caught.value.reason == "huge"


def test_errors_say_no_place_in_memory():
    for data in (b"not an image", file(pil.new("RGB", (99, 99)), "PNG")[:60], b"GIF89a", b"BM" * 9):
        with pytest.raises(images.ImageError, match="cannot be decoded") as caught:
            images.decode(data, "a.jsonl:3", CFG)
        assert "0x" not in str(caught.value)
    with pytest.raises(images.ImageError, match=r"it is none of BMP, GIF, JPEG, PNG, TIFF, WEBP$"):
        images.decode(b"not an image", "a", CFG)
