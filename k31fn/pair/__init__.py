"""Two versions of one run beside each other: the acceptance test of an operator.

``python -m k31fn.pair CONFIG --a kernels=reference --b kernels=triton --steps 300`` trains both
from one state on the same rows. :mod:`k31fn.pair.judge` says how it decides whether they compute
the same.
"""
