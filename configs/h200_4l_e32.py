"""Four layers at Kimi K3.1 Pro's width, with 32 experts each: what one H200 trains.

Memory at 8,192 tokens: parameters, two moments and gradients in bfloat16 are 8 bytes a parameter,
66.2 GiB; with what the layers keep for their backward, and 2.5 GiB of logits, the peak is 78.9 GiB.
"""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.config import Optimizer, Recipe


def model() -> k31.Config:
    """8.88B parameters: three KDA layers and one of Gated DSA, all with experts, and the whole
    vocabulary; text alone.
    """
    pro = config.load(Path(__file__).with_name("k31_pro.py"))
    few_experts = pro.with_sublayers(moe=replace(pro.sublayers["moe"], num_experts=32))
    mixers = ("kda", "kda", "kda", "full_attention")
    layers = tuple((mixer, "moe") for mixer in mixers)
    return replace(few_experts, layers=layers, vision=(), projector=())


def train() -> Recipe:
    """A row of 8,192 bytes a step. The state is narrow, so that it fits: parameters are rounded
    stochastically, without a float32 copy.
    """
    return Recipe(
        name="h200_4l_e32",
        model=model(),
        optimizer=Optimizer(kind="adamw", peak_lr=1e-4, state_dtype="bfloat16"),
        steps=100,
        batch_size=1,
        length=8192,
        compute="bfloat16",
        master="bfloat16",
    )
