"""k31fn: train Kimi K3.1-class models with pure functions over parameter pytrees in PyTorch.

``import k31fn`` imports nothing else: ``k31fn.layers`` and the others are imported when they are
asked for. ``K31FN_CHECK=1`` is :func:`checked` from the start.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all of this one
if TYPE_CHECKING:
    from typing import Any

    from k31fn import (
        autodiff,
        balance,
        checkpoint,
        config,
        data,
        device,
        hf,
        inspect,
        jit,
        kernels,
        layers,
        lora,
        metrics,
        model,
        optim,
        pair,
        parallel,
        params,
        plot,
        precision,
        random,
        sample,
        scopes,
        segments,
        testing,
        trackers,
        trainer,
        tree,
        typing,
    )

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "autodiff",
    "balance",
    "checked",
    "checkpoint",
    "config",
    "data",
    "device",
    "hf",
    "inspect",
    "jit",
    "kernels",
    "layers",
    "lora",
    "metrics",
    "model",
    "optim",
    "pair",
    "parallel",
    "params",
    "plot",
    "precision",
    "random",
    "sample",
    "scopes",
    "segments",
    "testing",
    "trackers",
    "trainer",
    "tree",
    "typing",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def checked() -> None:
    """Checks shapes, dtypes and types of every call from now on, as the annotations say.

    For research and for debugging: an error names the argument, its shape and the letters of
    :mod:`k31fn.typing`. Calls take longer. Needs beartype.

    Raises:
        RuntimeError: a module is imported already, whose functions would go unchecked, or beartype
            is missing.
    """
    # here, since it is imported before any module that is to be checked
    from k31fn.annotations import install

    install()


if os.environ.get("K31FN_CHECK", "0") not in ("", "0"):
    checked()
