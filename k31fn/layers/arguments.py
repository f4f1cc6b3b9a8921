"""Checks of what a layer is called with, cheap enough to be always on.

They look at classes, ranks and dtypes and never at values: nothing waits for a device, and they
hold under every transform and in a step that is captured.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k31fn.parallel.axis import active
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import ParamSpec
from k31fn.segments import Segments

__all__ = ["check_call"]


def check_call(
    params: Any,
    x: Any,
    cfg: Any,
    classes: tuple[type, type],
    *,
    segments: Any = None,
    sh: Sharding = UNSHARDED,
) -> None:
    """Checks the arguments of a sublayer's ``apply``, named after the module of its config.

    Args:
        params: of the layer.
        x: ``[B T D]``, floating, of the config's width.
        cfg: of the layer.
        classes: of ``params`` and of ``cfg``.
        segments: of as many tokens as ``x``, where tokens are not split; None: none are given.
        sh: sharding.

    Raises:
        ValueError: names the argument, what it is and what to give.
    """
    of_params, of_cfg = classes
    layer = of_cfg.__module__.rpartition(".")[2]
    if not isinstance(cfg, of_cfg):
        raise ValueError(f"{layer}.apply: cfg is {_described(cfg)}; give a {layer}.Config")
    if not isinstance(params, of_params):
        raise ValueError(
            f"{layer}.apply: params is {_described(params)}; give the {layer}.Params of "
            f"{layer}.init(cfg, key)"
        )
    if isinstance(next(iter(vars(params).values())), ParamSpec):
        raise ValueError(
            f"{layer}.apply: params holds ParamSpecs, which declare weights; draw them with "
            f"{layer}.init(cfg, key) or k31fn.params.init(specs, key)"
        )
    width = cfg.hidden_size
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"{layer}.apply: x is {_described(x)}; give [B, T, hidden_size={width}]")
    if not x.is_floating_point():
        raise ValueError(
            f"{layer}.apply: x is {_described(x)}; give hidden states in a floating dtype (tokens "
            "go through embedding.apply first)"
        )
    if segments is None:
        return
    if not isinstance(segments, Segments):
        raise ValueError(
            f"{layer}.apply: segments is {_described(segments)}; make it with "
            "segments.from_lengths(lengths, T)"
        )
    # Where ranks split the tokens of a slice, each is given the segments of all of them.
    if not active(sh.sequence) and segments.ids.shape != x.shape[:2]:
        raise ValueError(
            f"{layer}.apply: segments have shape {list(segments.ids.shape)}, x is {_described(x)}; "
            "every row needs its own packing of the same length"
        )


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{list(x.shape)} in {x.dtype}"
    cls = type(x)
    module = cls.__module__.rpartition(".")[2]
    return f"a {cls.__name__}" if module == "builtins" else f"a {module}.{cls.__name__}"
