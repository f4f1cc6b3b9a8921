r"""Low-rank adapters of Kimi K3.1 Pro, its frozen matrices in FP8.

What each of 128 devices needs::

    python -m k31fn.inspect configs/k31_pro_lora.py --memory \
        --mesh.fsdp 32 --mesh.tp 4 --mesh.ep 128
"""

from pathlib import Path

from k31fn import config, data, lora
from k31fn import model as text
from k31fn.config import Optimizer, Recipe


def model() -> text.Config:
    """K3.1 Pro."""
    return config.load(Path(__file__).with_name("k31_pro.py"))


def train() -> Recipe:
    """Adapters of every matrix of every layer, experts included; one row of 8192 tokens for each of
    32 data ranks.
    """
    return Recipe(
        name="k31_pro_lora",
        model=model(),
        data=data.Config(path="stdlib"),
        lora=lora.Config(rank=16, alpha=32.0, held="fp8"),
        optimizer=Optimizer(kind="adamw", peak_lr=1e-4, weight_decay=0.0),
        batch_size=32,
        length=8192,
        compute="bfloat16",
        remat="layer",
    )
