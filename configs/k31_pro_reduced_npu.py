"""Kimi K3.1 Pro cut to 8 layers and 64 experts at full width: what fits on two nodes of 8 NPUs."""

from dataclasses import replace
from pathlib import Path

from k31fn import config
from k31fn import model as k31


def model() -> k31.Config:
    """22.75B parameters: six KDA layers and two of Gated DSA, the first dense, one AttnRes block;
    the whole tower.
    """
    full = config.load(Path(__file__).with_name("k31_pro.py"))
    few_experts = full.with_sublayers(moe=replace(full.sublayers["moe"], num_experts=64))
    return replace(few_experts, layers=full.layers[:8])
