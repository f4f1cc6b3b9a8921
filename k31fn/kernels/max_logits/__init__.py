"""The largest attention logit of each head, of which QK-Clip keeps the growth in bounds.

``max_logits(q, k, k_shared, start, stop, scale)``, and over a chosen set of keys
``max_chosen_logits(q, k, k_shared, topk_idx, scale)``::

    m[h] = max over queries t and the keys s that t attends to of
           scale <q[t, h], [k[s, h] ; k_shared[s]]>

Source: Kimi K2, arXiv 2507.20534 (QK-Clip).

Shapes: ``q [B T H K]``, ``k [B S Hk N]``, ``k_shared [B S P]`` with K = N + P, Hk = H or 1 (the
absorbed form); the result is ``[H]`` in float32 (float64 for float64 inputs).

Mask: that of :mod:`k31fn.kernels.attention` (``start, stop [B T]``) or of
:mod:`k31fn.kernels.sparse_attention` (``topk_idx [B T M]``, -1 where there are fewer). If no query
attends to anything the result is -1e30.

No gradient. It costs the products of queries and keys once more, and holds the scores of one tile
of queries.
"""

from k31fn.kernels.max_logits.reference import max_chosen_logits as _chosen
from k31fn.kernels.max_logits.reference import max_logits as _visible
from k31fn.kernels.registry import Op

__all__ = ["max_chosen_logits", "max_logits"]

max_logits = Op("max_logits", _visible)
max_chosen_logits = Op("max_chosen_logits", _chosen)
