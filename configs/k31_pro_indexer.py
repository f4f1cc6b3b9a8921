"""From Kimi K3 to K3.1 Pro: the indexers learn under dense attention, then all learns under sparse
attention.

K3.1's own schedule is not public. This is the one of DeepSeek-V3.2 (arXiv 2512.02556) on the same
kind of indexer: 1000 steps at 1e-3 with the trunk frozen, 2.1B tokens, then 15000 steps at 7.3e-6,
943.7B tokens. In rows of 131072 tokens that is 16 and 480 rows a step.
"""

from pathlib import Path

from k31fn import config, data
from k31fn import model as k31
from k31fn.config import Optimizer, Phase, Recipe


def model() -> k31.Config:
    """The model of ``k31_pro.py``."""
    return config.load(Path(__file__).with_name("k31_pro.py"))


def train() -> Recipe:
    """Starts from a run of K3 (``--init RUN``; ``python -m k31fn.hf import`` makes one of a
    checkpoint).
    """
    warm_up = Phase(
        steps=1000, batch_size=16, trainable="indexer", attention="dense_warmup", peak_lr=1e-3
    )
    return Recipe(
        name="k31_pro_indexer",
        model=model(),
        data=data.Prepared(
            train=("data/train",), heldout=("data/heldout",), tokenizer="data/tiktoken.model"
        ),
        optimizer=Optimizer(kind="muon", peak_lr=7.3e-6, warmup_steps=0),
        steps=16_000,
        batch_size=480,
        length=131_072,
        compute="bfloat16",
        remat="layer",
        phases=(warm_up, Phase(peak_lr=7.3e-6)),
    )
