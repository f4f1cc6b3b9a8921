"""Shape annotations and their legend.

Shapes are `jaxtyping` annotations, checked (by `beartype`) in the tests and under
:func:`k31fn.checked`. One letter means one thing everywhere, in annotations and in einsum strings
alike:

| letter | dimension | | letter | dimension |
|---|---|---|---|---|
| B | batch rows | | E | routed experts |
| T | tokens (queries) | | G | experts chosen per token (top-k of the router) |
| S | source positions (keys) | | F | inner width of an MLP or expert |
| D | hidden size | | L | latent width of the experts |
| H | heads | | N | residual sources (AttnRes) |
| K | key (query) dim of a head | | J | index heads |
| V | value dim of a head | | I | dim of an index head |
| R | rank of a latent projection | | M | chosen keys per query (top-k of the indexer) |
| P | dim of the shared key ("rope") part | | W | short convolution width |
| C | tokens of a chunk | | Z | vocabulary |

Several results are a NamedTuple; parameters are frozen dataclasses generic in their leaf
(`Params[Tensor]`, `Params[ParamSpec]`).
"""

from typing import TypeVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Leaf", "Tensor"]


def __dir__() -> list[str]:
    return __all__


Leaf = TypeVar("Leaf")
"""The leaves of a parameter tree: tensors, ParamSpecs, gradients, names."""
