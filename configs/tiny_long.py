"""The tiny K3.1 on rows that grow from 128 to 512 tokens, with as many tokens a step throughout."""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.config import Phase, Recipe


def model() -> k31.Config:
    """The model of ``tiny.py``."""
    return config.load(Path(__file__).with_name("tiny.py"))


def train() -> Recipe:
    """The recipe of ``tiny.py`` in three phases; it is scored on rows of 512."""
    tiny = config.load_recipe(Path(__file__).with_name("tiny.py"))
    phases = (
        Phase(steps=200, length=128, batch_size=24),
        Phase(steps=150, length=256, batch_size=12),
        Phase(),
    )
    return replace(tiny, name="tiny_long", length=512, batch_size=6, phases=phases)
