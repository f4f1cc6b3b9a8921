"""Triton kernels of attention over intervals of keys or chosen sets: tiles that are seen, only."""
