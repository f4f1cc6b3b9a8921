"""Triton kernels of Gated DeltaNet's recurrence."""
