"""Triton kernels of the residual attention."""
