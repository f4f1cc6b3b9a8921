"""Low-rank adapters of a tiny model: configs/tiny.py's, trained before.

python train.py configs/tiny.py
python train.py configs/tiny_lora.py --lora.base runs/tiny --data.path ~/notes
python -m k31fn.sample runs/tiny_lora --prompt "def "
python -m k31fn.hf export runs/tiny_lora merged
"""

from pathlib import Path

from k31fn import config, data, lora
from k31fn import model as text
from k31fn.config import Optimizer, Recipe


def model() -> text.Config:
    """That of configs/tiny.py."""
    return config.load(Path(__file__).with_name("tiny.py"))


def train() -> Recipe:
    """Adapters of every matrix of every layer, on routed experts in MXFP4, as a released checkpoint
    holds them.
    """
    return Recipe(
        name="tiny_lora",
        model=model(),
        data=data.Config(path="stdlib"),
        lora=lora.Config(base="runs/tiny", rank=8, alpha=16.0, held="mxfp4"),
        optimizer=Optimizer(kind="adamw", peak_lr=1e-3, warmup_steps=10, weight_decay=0.0),
        steps=100,
        batch_size=12,
        length=256,
        remat="layer",
    )
