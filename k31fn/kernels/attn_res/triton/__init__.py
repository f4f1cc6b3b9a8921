"""Triton kernels of the residual attention: one pass, and the two phases."""
