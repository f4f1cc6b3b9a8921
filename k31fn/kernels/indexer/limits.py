"""How long a row the kernels of the choice take; here, since triton may be missing."""

__all__ = ["MOST_KEYS"]

MOST_KEYS = 32768
"""Keys of a row whose scores one program holds in registers."""
