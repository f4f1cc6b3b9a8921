"""Triton kernels between tokens and the rows of experts."""
