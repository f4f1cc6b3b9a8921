"""Triton kernels of the read of hyper-connected streams."""
