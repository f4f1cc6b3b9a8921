"""Triton kernels of random words and of rounding with them."""
