"""Triton kernels of KDA: factors of 16 tokens at a time, scans over them, gradients."""
