"""Counter-based random numbers: a value is a function of (key, global index) and of nothing else.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011), written in int64 tensor operations. There is no state: a rank draws just its own tile of a
tensor and gets the bits that it would have cut out of the whole, on every mesh. A key is an int64
tensor of two 32-bit words, so keys batch under ``torch.func.vmap``; torch's own generators have no
such form on the CPU.

Counter of a draw: word ``j % 4`` of block ``(j // 4, row low, row high, 0)`` is element ``j`` of
the last dimension in the row with that 64-bit linear index over the leading dimensions. The fourth
word keeps draws, :func:`split` and :func:`fold_in` apart.

Everything after the integers is additions, products, one division and conversions of float32
tensors, each of them a torch operation of its own and rounded as IEEE 754 says: the same bits on a
CPU and on an H200, with torch 2.11 and 2.13. Library functions have not (measured: log, exp, cos
and even sqrt differ between CPU and CUDA, the CPU's sigmoid between the body and the tail of a
loop). A compiler that fuses a product with a sum takes this away: draw eagerly.
"""

from k31fn.random.draws import bits, normal, stochastic_round, truncated_normal, uniform
from k31fn.random.keys import fold_in, key, split

__all__ = [
    "bits",
    "fold_in",
    "key",
    "normal",
    "split",
    "stochastic_round",
    "truncated_normal",
    "uniform",
]


def __dir__() -> list[str]:
    return __all__
