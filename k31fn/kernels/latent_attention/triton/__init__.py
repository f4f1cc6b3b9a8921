"""Triton kernels of attention over chosen latents: gathered tiles, sums over keys, rows by key."""
