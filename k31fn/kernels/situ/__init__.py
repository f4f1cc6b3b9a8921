"""SiTU, the bounded gated activation of the MLPs and experts (Kimi K3 report, arXiv 2607.24653).

``situ_glu(gate, up, beta, linear_beta) = [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u /
linear_beta)]``, elementwise in float32 (float64 for float64 inputs) and rounded once to the dtype
of ``gate``; ``|y| < beta * linear_beta``. For small inputs it is SwiGLU, ``g sigmoid(g) u``.
``gate`` and ``up`` have one shape and dtype. Differentiable to any order.
"""

from k31fn.kernels.registry import Op
from k31fn.kernels.situ.reference import situ_glu as _situ_glu

__all__ = ["situ_glu"]

situ_glu = Op("situ_glu", _situ_glu)
