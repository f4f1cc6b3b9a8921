"""The tiny K3.1 with eyes: learns to read mosaics of handwritten digits in minutes on two cores."""

from dataclasses import replace
from pathlib import Path

from k31fn import config, data
from k31fn import model as k31
from k31fn.config import Optimizer, Recipe
from k31fn.layers import projector, vision, vision_block


def model() -> k31.Config:
    """The text model of ``tiny.py`` and a tower of two layers, whose patches are those of the
    full-size one.
    """
    text = config.load(Path(__file__).with_name("tiny.py"))
    block = vision_block.Config(hidden_size=64, num_heads=4, head_dim=16, intermediate_size=256)
    tower = vision.Config(block, num_layers=2, table_size=(4, 4))
    return replace(
        text, vision=tower, projector=projector.Config(tower.output_size, text.hidden_size)
    )


def train() -> Recipe:
    """Mosaics and captions that ``python -m examples.digits prepare build/digits`` made."""
    return Recipe(
        name="tiny_vision",
        model=model(),
        data=data.Prepared(
            train=("build/digits/train/train",),
            heldout=("build/digits/heldout/train",),
            patches=96,
            tokenizer="bytes+media",
        ),
        optimizer=Optimizer(kind="muon", peak_lr=5e-3, warmup_steps=20),
        steps=400,
        batch_size=8,
        length=128,
        eval_every=100,
        eval_bytes=2_000,
        heldout_bytes=10_000,
    )
