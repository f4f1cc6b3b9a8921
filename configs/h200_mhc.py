"""The four layers of ``h200_4l_e32.py`` on hyper-connections: four streams in place of AttnRes.

Memory at 8,192 tokens: the state and gradients of ``h200_4l_e32.py``. A layer's input has four
streams, 0.44 GiB, and is all that ``remat="layer"`` keeps.
"""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.config import Recipe
from k31fn.layers import mhc


def model() -> k31.Config:
    """The model of ``h200_4l_e32.py`` with another residual scheme."""
    small = config.load(Path(__file__).with_name("h200_4l_e32.py"))
    return replace(small, residual=mhc.Config())


def train() -> Recipe:
    """The run of ``h200_4l_e32.py``."""
    small = config.load_recipe(Path(__file__).with_name("h200_4l_e32.py"))
    return replace(small, name="h200_mhc", model=model(), remat="layer")
