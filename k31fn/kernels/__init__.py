"""Operators on plain tensors: one sub-package each, with its contract, its reference and its fused
implementations.
"""
