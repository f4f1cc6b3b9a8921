"""Triton kernels of the short convolutions of several inputs, one launch each way."""
