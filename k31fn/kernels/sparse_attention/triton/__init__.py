"""Triton kernels of attention over chosen keys: sets as bit masks, tiles without a key skipped."""
