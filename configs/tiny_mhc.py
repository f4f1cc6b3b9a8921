"""The tiny K3.1 on hyper-connections: four streams in place of AttnRes, all else as in
``tiny.py``.
"""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.config import Recipe
from k31fn.layers import mhc


def model() -> k31.Config:
    """The model of ``tiny.py`` with another residual scheme."""
    return replace(config.load(Path(__file__).with_name("tiny.py")), residual=mhc.Config())


def train() -> Recipe:
    """The run of ``tiny.py``."""
    return replace(
        config.load_recipe(Path(__file__).with_name("tiny.py")), name="tiny_mhc", model=model()
    )
