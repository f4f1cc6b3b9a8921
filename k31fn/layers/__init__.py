"""Pure layers: each module has ``Config``, ``Params``, ``specs(cfg)``, ``init(cfg, key)`` and
``apply(params, x, cfg, *, sh)``.

A module that can be a sublayer or the residual scheme of a model also has ``KIND``, its row in the
table :mod:`k31fn.layers.kinds`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k31fn.layers import (
        attn_res,
        block,
        dsa,
        embedding,
        gdn,
        indexer,
        kda,
        kind,
        kind_checks,
        kinds,
        latent_moe,
        linear,
        losses,
        mhc,
        mla,
        mlp,
        mtp,
        norm,
        patch_position,
        patches,
        plain_residual,
        projector,
        qat,
        routed,
        router,
        short_conv,
        vision,
        vision_block,
    )

__all__ = [
    "attn_res",
    "block",
    "dsa",
    "embedding",
    "gdn",
    "indexer",
    "kda",
    "kind",
    "kind_checks",
    "kinds",
    "latent_moe",
    "linear",
    "losses",
    "mhc",
    "mla",
    "mlp",
    "mtp",
    "norm",
    "patch_position",
    "patches",
    "plain_residual",
    "projector",
    "qat",
    "routed",
    "router",
    "short_conv",
    "vision",
    "vision_block",
]


def __getattr__(name: str) -> Any:
    # imported when it is asked for: a model has few of them
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
