"""Kimi K3.1 Pro: Kimi K3 with a lightning indexer in each full-attention layer (Gated DSA)."""

from pathlib import Path

from k31fn import config
from k31fn import model as k31
from k31fn.layers import dsa, indexer, mla


def model() -> k31.Config:
    """2,780.11B parameters, 104.37B active; 2,779.66B of them are the text model's."""
    k3 = config.load(Path(__file__).with_name("k3.py"))
    attention: mla.Config = k3.sublayers["full_attention"]
    index = indexer.Config(k3.hidden_size, attention.q_lora_rank, num_heads=32, head_dim=128)
    return k3.with_sublayers(full_attention=dsa.Config(attention, index, topk=2048))
