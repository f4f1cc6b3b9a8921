"""The refusal of ``torch.compile``, which would drop the rules of this library.

Its tracer takes a function with a rule of its own for what the function computes forward, or breaks
the graph at each of them: minutes for a layer, and nothing gained. A step as one graph is
:func:`k31fn.jit.jit`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["refuse_compile"]


def refuse_compile(name: str) -> None:
    """Raises where ``torch.compile`` traces the caller.

    Raises:
        RuntimeError: names what to use instead.
    """
    if torch.compiler.is_dynamo_compiling():
        # An error raised while it traces would only make it run the function as it is. So the graph
        # is made to end here, and the call comes when the compiled function runs.
        refuse: Any = torch.compiler.disable(_refuse)
        refuse(name)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} under torch.compile: its derivatives would be dropped or wrong; call it as it is, "
        "or make a graph of the whole step with k31fn.jit.jit"
    )
