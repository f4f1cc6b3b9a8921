"""Image files to patches: decoding, NaViT's size rule, padding, and the order that the vision tower
wants.

Size rule (facts of the released preprocessing, NaViT arXiv 2307.06304): an image is never enlarged.
With w and h in pixels, p the patch side, and limits on patches in all and per side::

    scale = min(1, sqrt(max_patches / ((w // p) (h // p))), max_side p / w, max_side p / h)
    new   = floor(scale w), floor(scale h), then padded with black on the right
            and below to a multiple of 2 p

If padding takes it over the limit on patches, it is shrunk by another row or column of cells: the
limit holds. An image is turned first as its EXIF says, so that it lies as in every viewer; of a
JPEG that holds several pictures (phones add a small one, or one of the depth) the first is taken.

Pixels are RGB, stored as bytes and read as ``(x / 255 - 0.5) / 0.5``. What is transparent shows a
board of white and grey squares, drawn after shrinking: without it, black text on nothing would be
black on black. Files come from anywhere, so only raster formats are opened, and the size in the
header is checked before anything is decompressed.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange

from k31fn.layers.patches import MERGE, Grid, cell_order, num_slots
from k31fn.typing import Float, Tensor

__all__ = [
    "Config",
    "Image",
    "ImageError",
    "Reason",
    "decode",
    "normalise",
]

# The board behind transparent pixels, as released; white at the top left.
_SQUARE = 8
_WHITE = 255
_GREY = 180
# No format whose reader starts a program or follows links.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
# Pixels of a side, the most that a JPEG can have. Shrinking takes memory by the side, whatever the
# area: a line of 60 million pixels needs gigabytes.
_MOST_SIDE = 65_535
_ORIENTATION = 0x0112  # the EXIF field

Reason = Literal["missing", "empty", "corrupt", "huge", "animated", "unsupported"]


class ImageError(ValueError):
    """An image that is not taken. Its text names the sample.

    Attributes:
        reason: what kind of fault, for counting.
    """

    def __init__(self, name: str, reason: Reason, why: str):
        # All three, so that it can come back from another process.
        super().__init__(name, reason, why)
        self.reason: Reason = reason

    def __str__(self) -> str:
        return f"image {self.args[0]}: {self.args[2]}"


@dataclass(frozen=True)
class Config:
    """How images become patches.

    Attributes:
        patch_size: side of a patch in pixels.
        max_patches: of one image, at least 4: a cell of 2 x 2.
        max_side: patches along one side.
        max_pixels: of the file; a larger one is refused before it is decompressed.
        on_bad: ``refuse`` raises at the first bad image; ``skip`` leaves its document out and
            counts it.
    """

    patch_size: int = 14
    max_patches: int = 65536
    max_side: int = 512
    max_pixels: int = 64_000_000
    on_bad: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        for name in ("patch_size", "max_patches", "max_side", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"images.{name}={getattr(self, name)} must be at least 1")
        if self.max_patches < MERGE**2:
            raise ValueError(
                f"images.max_patches={self.max_patches} must be at least {MERGE**2}: the smallest "
                "image is a cell of 2 x 2 patches"
            )
        if self.max_side % MERGE:
            raise ValueError(
                f"images.max_side={self.max_side} must be even: images are padded to cells of 2 "
                "patches"
            )
        if self.on_bad not in ("refuse", "skip"):
            raise ValueError(f"images.on_bad={self.on_bad!r} must be 'refuse' or 'skip'")


class _Size(NamedTuple):
    """What :func:`_fit` decides: the pixels after shrinking, and the grid after padding."""

    width: int
    height: int
    grid: Grid


class Image(NamedTuple):
    """An image as the tower takes it.

    Attributes:
        patches: uint8 ``[N, 3 p p]``, channels then rows then columns, patches in cell order.
        grid: frames, height and width in patches.
        width: of the file, in pixels.
        height: of the file.
    """

    patches: np.ndarray
    grid: Grid
    width: int
    height: int

    @property
    def num_slots(self) -> int:
        """Placeholders that stand for it in the text."""
        return num_slots(self.grid)


def _fit(width: int, height: int, cfg: Config) -> _Size:
    """The size that an image of this size is brought to."""
    p = cfg.patch_size
    area = max(1, width // p) * max(1, height // p)
    most = cfg.max_side * p  # pixels of a side
    scale = min(1.0, math.sqrt(cfg.max_patches / area), most / width, most / height)
    unit = MERGE * p
    while True:
        # Rounding may give a pixel too many, and a thin image none.
        new_width = min(max(1, int(width * scale)), most)
        new_height = min(max(1, int(height * scale)), most)
        rows, columns = -(-new_height // unit), -(-new_width // unit)
        if rows * columns * MERGE**2 <= cfg.max_patches:
            return _Size(new_width, new_height, (1, rows * MERGE, columns * MERGE))
        # What takes one row or one column of cells away, whichever shrinks it less.
        scale = max((rows - 1) * unit / height, (columns - 1) * unit / width)


def decode(data: bytes, name: str, cfg: Config) -> Image:
    """Reads one still image from the bytes of a file.

    Args:
        data: of a BMP, GIF, JPEG, PNG, TIFF or WebP file.
        name: of the sample, for errors.
        cfg: limits.

    Raises:
        ImageError: the file is empty, corrupt, larger than ``cfg.max_pixels`` or too long,
            animated, or of another kind.
        ImportError: Pillow is not installed.
    """
    if not data:
        raise ImageError(name, "empty", "the file is empty")
    with _opened(data, name) as image:
        # All of this from the header: a small file may say that it has billions of pixels.
        width, height = image.size
        if width * height > cfg.max_pixels:
            raise ImageError(
                name,
                "huge",
                f"{width} x {height} pixels are more than images.max_pixels={cfg.max_pixels}; "
                "shrink it",
            )
        if max(width, height) > _MOST_SIDE:
            raise ImageError(
                name,
                "huge",
                f"{width} x {height} pixels: a side of more than {_MOST_SIDE:,}; cut it",
            )
        # An MPO is a JPEG with more pictures behind the one that viewers show.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise ImageError(
                name,
                "animated",
                f"the {image.format} has several frames; give one of them as an image",
            )
        # 16 and 32 bits per channel, of which nobody says what is white.
        if image.mode.startswith(("I", "F")):
            raise ImageError(
                name,
                "unsupported",
                f"pixels of mode {image.mode!r}; convert it to 8 bits per channel",
            )
        image.load()
        image = _turned(image)
        width, height = image.size
        size = _fit(width, height, cfg)
        return Image(_patchify(_pixels(image, size), cfg.patch_size), size.grid, width, height)


def _turned(image: Any) -> Any:
    """A loaded image as its EXIF says that it was held."""
    import PIL.Image

    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken block of EXIF says nothing; the picture is whole
        return image
    turn = PIL.Image.Transpose
    by_orientation = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }
    return image.transpose(by_orientation[orientation]) if orientation in by_orientation else image


def _patchify(pixels: np.ndarray, patch_size: int) -> np.ndarray:
    """``[H, W, C]`` pixels to ``[N, C p p]`` patches in cell order, padded with zeros on the right
    and below.
    """
    unit = MERGE * patch_size
    height, width, _ = pixels.shape
    pixels = np.pad(pixels, ((0, -height % unit), (0, -width % unit), (0, 0)))
    patches = rearrange(pixels, "(h p) (w q) c -> (h w) (c p q)", p=patch_size, q=patch_size)
    h = pixels.shape[0] // patch_size
    w = pixels.shape[1] // patch_size
    # The tower merges 2 x 2 patches, a cell, so those of a cell stand side by side.
    return patches[cell_order((1, h, w))]


def normalise(patches: np.ndarray) -> Float[Tensor, "*rows X"]:
    """Bytes to float32 in [-1, 1]: mean and deviation 0.5 in each channel."""
    return torch.from_numpy(patches.astype(np.float32)) / 127.5 - 1


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Any]:
    """The image behind the bytes; whatever the decoder raises becomes an ImageError that names the
    sample.
    """
    try:
        import PIL.Image  # optional: the extra `vision`
    except ImportError as e:
        raise ImportError("images need Pillow; pip install 'k31fn[vision]'") from e
    try:
        with warnings.catch_warnings():
            # Of the file's oddities, and of bombs, which max_pixels catches.
            warnings.simplefilter("ignore")
            with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                yield image
    except ImageError:
        raise
    except PIL.Image.DecompressionBombError as e:
        raise ImageError(name, "huge", f"{e}") from e
    except PIL.UnidentifiedImageError as e:
        raise ImageError(
            name, "corrupt", f"cannot be decoded: it is none of {', '.join(_FORMATS)}"
        ) from e
    except Exception as e:  # decoders of untrusted bytes: OSError, SyntaxError, struct.error, ...
        # Objects of Python say where they are in memory, which is another place in each run.
        why = re.sub(r"<[^<>]* at 0x[0-9a-fA-F]+>", "the file", str(e))
        raise ImageError(name, "corrupt", f"cannot be decoded ({type(e).__name__}: {why})") from e


def _pixels(image: Any, size: _Size) -> np.ndarray:
    """``[H W 3]`` bytes of a loaded image, shrunk, on the board where it is transparent."""
    import PIL.Image

    transparent = image.has_transparency_data
    image = image.convert("RGBA" if transparent else "RGB")
    if image.size != (size.width, size.height):
        # BICUBIC, as released: another filter gives other features.
        image = image.resize((size.width, size.height), PIL.Image.Resampling.BICUBIC)
    if transparent:
        board = PIL.Image.fromarray(_board(size)).convert("RGBA")
        image = PIL.Image.alpha_composite(board, image).convert("RGB")
    return np.asarray(image)


def _board(size: _Size) -> np.ndarray:
    """Squares of white and grey, ``[H W]``."""
    rows, columns = np.indices((size.height, size.width)) // _SQUARE
    return np.where((rows + columns) % 2, _GREY, _WHITE).astype(np.uint8)
