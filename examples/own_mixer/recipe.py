"""A model of two mixers that the library does not have, trained like any other::

    python train.py examples/own_mixer/recipe.py --steps 100
    python train.py examples/own_mixer/recipe.py --steps 100 --resume auto
    python train.py examples/own_mixer/recipe.py --model.local.window 32
    python -m k31fn.inspect examples/own_mixer/recipe.py
    python -m k31fn.sample runs/own_mixer --recipe examples/own_mixer/recipe.py --prompt "def "

A mixer is one file that says all about itself in its ``KIND``: its name, its weights, its FLOPs,
what of a mesh it can work on, how it decodes. ``register`` puts it into the table of kinds, and
then its ``Config`` may stand in a model beside those of the library. A module that lies in the
folder of a recipe can be imported by its bare name.

``config.json`` of a run holds the name of a kind and runs no code. So the run goes on from this
file, which registers the kinds, with the values of this file (``--resume auto``) or of its own::

    python train.py runs/own_mixer/TIME/config.json --recipe examples/own_mixer/recipe.py

From its ``config.json`` alone it is refused, with the name of the kind that is missing.
"""

from examples.own_mixer import mamba2, sliding_window
from k31fn import data
from k31fn import model as text
from k31fn.config import Optimizer, Recipe
from k31fn.layers import kinds, mlp, plain_residual

kinds.register(mamba2.KIND)
kinds.register(sliding_window.KIND)


def model() -> text.Config:
    """Mamba-2 and sliding windows by turns, each with a dense MLP, on bytes as tokens."""
    size = 128
    return text.Config(
        vocab_size=264,
        hidden_size=size,
        sublayers=text.Sublayers(
            ssm=mamba2.Config(size, num_heads=4, head_dim=32, state_size=16),
            local=sliding_window.Config(size, num_heads=4, head_dim=32, window=64),
            dense=mlp.Config(size, intermediate_size=256),
        ),
        layers=(("ssm", "dense"), ("local", "dense")) * 2,
        residual=plain_residual.Config(),
    )


def train() -> Recipe:
    """Python source as bytes."""
    return Recipe(
        name="own_mixer",
        model=model(),
        data=data.Config(path="stdlib"),
        optimizer=Optimizer(kind="muon", peak_lr=5e-3, warmup_steps=20),
        steps=300,
        batch_size=12,
        length=256,
    )
