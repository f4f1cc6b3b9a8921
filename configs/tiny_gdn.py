"""The tiny K3.1 with Gated DeltaNet in KDA's place, all else as in ``tiny.py``."""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.config import Recipe
from k31fn.layers import gdn


def model() -> k31.Config:
    """The model of ``tiny.py`` with three layers of Gated DeltaNet in place of three of KDA."""
    tiny = config.load(Path(__file__).with_name("tiny.py"))
    rest = {name: layer for name, layer in tiny.sublayers.items() if name != "kda"}
    mixer = gdn.Config(tiny.hidden_size, num_heads=2, head_dim=64)
    layers = tuple(("gdn" if name == "kda" else name, channels) for name, channels in tiny.layers)
    return replace(tiny, sublayers=k31.Sublayers(gdn=mixer, **rest), layers=layers)


def train() -> Recipe:
    """The run of ``tiny.py``."""
    return replace(
        config.load_recipe(Path(__file__).with_name("tiny.py")), name="tiny_gdn", model=model()
    )
