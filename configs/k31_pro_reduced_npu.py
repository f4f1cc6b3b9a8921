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
    return replace(
        full, num_layers=8, full_attention_layers=(3, 7), moe=replace(full.moe, num_experts=64)
    )
