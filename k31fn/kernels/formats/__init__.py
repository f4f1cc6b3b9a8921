"""Narrow formats of numbers, as functions of tensors.

* :mod:`~k31fn.kernels.formats.mxfp4`: 4-bit numbers with a power of two per 32 of them, how
  released checkpoints hold the weights of routed experts.
* :mod:`~k31fn.kernels.formats.mxfp8`: 8-bit numbers with a power of two per 32: activations beside
  such weights.
* :mod:`~k31fn.kernels.formats.fp8`: 8-bit numbers (E4M3, E5M2) with a scale per block: frozen
  weights, and the operands of FP8 products.

``encode`` gives codes and scales as bytes, so that they are sent, stored and compared like any
integers; ``decode`` is exact. ``fake_quantise`` is both at once for training that is to end in the
format: the value is rounded, the gradient is that of the identity (the straight-through estimator,
Bengio et al. 2013, arXiv 1308.3432), where values saturate too.
"""
