"""Small image files for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

pil: Any = pytest.importorskip("PIL.Image", reason="Pillow (the extra `vision`) is not installed")


def png(width: int, height: int, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    return file(pil.new("RGB", (width, height), colour), "PNG")


def file(image: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def coordinates(width: int, height: int) -> np.ndarray:
    """Red is the column, green the row, blue 7: a pixel tells where it was."""
    rows, columns = np.indices((height, width))
    return np.stack([columns, rows, np.full_like(rows, 7)], -1).astype(np.uint8)
