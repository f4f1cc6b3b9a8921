"""The tiny K3.1 on conversations: questions about Python's standard library, loss on the answers
only.
"""

from pathlib import Path

from k31fn import config, data
from k31fn import model as k31
from k31fn.config import Optimizer, Recipe


def model() -> k31.Config:
    """The model of ``tiny.py``: its vocabulary has room for the four tokens of conversations."""
    return config.load(Path(__file__).with_name("tiny.py"))


def train() -> Recipe:
    """Conversations that ``python -m examples.docstrings build/docstrings`` made; ``--init RUN``
    starts from a run.
    """
    return Recipe(
        name="tiny_sft",
        model=model(),
        data=data.Prepared(
            train=("build/docstrings/prepared/train",),
            heldout=("build/docstrings/prepared/heldout",),
            tokenizer="bytes+chat",
        ),
        optimizer=Optimizer(kind="muon", peak_lr=5e-3, warmup_steps=20),
        steps=300,
        batch_size=8,
        length=320,
        eval_every=100,
        eval_bytes=5_000,
        heldout_bytes=20_000,
    )
