"""The four layers of ``h200_4l_e32.py`` with 64 experts each.

Memory at 8,192 tokens: 8 bytes a parameter are 97.7 GiB, 24.4 of them gradients. The peak is 103.6
GiB: most of the gradients are made when most of what layers keep for their backward is freed.
"""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.config import Recipe


def model() -> k31.Config:
    """13.11B parameters."""
    small = config.load(Path(__file__).with_name("h200_4l_e32.py"))
    return small.with_sublayers(moe=replace(small.sublayers["moe"], num_experts=64))


def train() -> Recipe:
    """The run of ``h200_4l_e32.py``."""
    small = config.load_recipe(Path(__file__).with_name("h200_4l_e32.py"))
    return replace(small, name="h200_4l_e64", model=model())
