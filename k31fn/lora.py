"""Low-rank adaptation as a transform of a tree of ParamSpecs (LoRA, Hu et al. 2021, arXiv
2106.09685).

    adapted = lora.apply(specs, pattern=r"attn", rank=8, alpha=16.0, held="fp8")
    params = lora.init(adapted, key, read)              # read(path, tile): the weights to adapt
    dense = lora.merge(params)

A chosen matrix ``W [in, out]`` becomes ``W + alpha / rank  A B`` with ``A [in, rank]`` normal, of
variance 1 / in, and ``B [rank, out]`` zero, one pair for each expert of a routed layer. Everything
but A and B is tagged ``frozen``: it gets no gradient and no optimiser state. How frozen weights are
held:

* ``bfloat16``: as declared.
* ``fp8``: the chosen matrices as E4M3 with a power of two per block of 128 x 128; of a dimension
  that 128 does not divide, or that tensor parallelism may split in up to eight, blocks are smaller.
* ``mxfp4``: the chosen matrices of routed experts as released checkpoints have them, the others in
  bfloat16.

Layers decode such a weight for each product (:mod:`k31fn.layers.linear`); it is sent over a mesh,
and kept, in bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from k31fn import params as declared
from k31fn import precision, tree
from k31fn.kernels.formats import fp8, mxfp4
from k31fn.layers.linear import dequantize
from k31fn.params import Constant, LowRank, Normal, ParamSpec, Quantized

__all__ = ["LAYERS", "Config", "Held", "Read", "apply", "init", "merge"]


def __dir__() -> list[str]:
    return __all__


LAYERS = r"^layers\.\d+\.(attn|ffn)\.(?!.*\b(indexer|router)\b)"
"""Paths of the matrices of a model's decoder layers, without indexers and routers, which choose."""

Held = Literal["bfloat16", "fp8", "mxfp4"]
Tile = tuple[slice, ...]
Read = Callable[[str, Tile], Tensor]
"""``(path, tile) -> values``: a part of a weight of the model that is adapted, by its path there.
"""

# Logical axes that tensor parallelism splits, and the most ranks of it that find whole FP8 blocks.
_SPLIT = frozenset({"heads", "mlp", "vocab", "expert_mlp"})
_MOST_RANKS = 8


@dataclass(frozen=True)
class Config:
    """What is adapted and how.

    Attributes:
        base: the model that is adapted: a checkpoint in K3's names, or a run or a checkpoint of it;
            "": initial values of the run's seed.
        pattern: regular expression that paths of adapted matrices match somewhere.
        rank: of the update.
        alpha: the update is ``alpha / rank A B``.
        held: how frozen matrices are held.
        held_pattern: of those that ``held`` is for.
    """

    base: str = ""
    pattern: str = LAYERS
    rank: int = 16
    alpha: float = 32.0
    held: Held = "bfloat16"
    held_pattern: str = LAYERS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha={self.alpha} must be positive")
        if self.held not in get_args(Held):
            raise ValueError(f"lora.held={self.held!r} must be one of {list(get_args(Held))}")
        for name in ("pattern", "held_pattern"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ValueError(
                    f"lora.{name}={getattr(self, name)!r} must be a regular expression of paths: "
                    f"{error}"
                ) from error


def apply(
    specs: Any,
    *,
    pattern: str = LAYERS,
    rank: int = 16,
    alpha: float = 32.0,
    held: Held = "bfloat16",
    held_pattern: str = LAYERS,
) -> Any:
    """The specs of the adapted model: ``specs`` with :class:`LowRank` and :class:`Quantized` nodes
    for some leaves.

    Args:
        specs: of the model; leaves tagged ``matrix`` can be adapted and quantised.
        pattern: see :class:`Config`, also of the others.
        rank: of the update.
        alpha: its scale, times the rank.
        held: how frozen matrices are held.
        held_pattern: which of them.

    Raises:
        ValueError: ``pattern`` matches no matrix, or an argument is out of its range.
    """
    cfg = Config("", pattern, rank, alpha, held, held_pattern)
    # A pattern with a typing error would otherwise train nothing, in silence.
    matrices = [path for path, spec in tree.flatten_with_paths(specs) if "matrix" in spec.tags]
    if not any(re.search(pattern, path) for path in matrices):
        raise ValueError(
            f"lora.pattern={pattern!r} matches no matrix; there are {matrices[:3]}, ..."
        )

    def adapt(path: str, spec: ParamSpec) -> Any:
        base = _base(path, spec, cfg)
        if "matrix" not in spec.tags or not re.search(pattern, path):
            return base
        *lead, rows, columns = spec.shape
        *lead_axes, row_axis, column_axis = spec.axes
        tags = spec.tags & {"expert"}
        # ``beside``: the axis of W that the adapter lacks, so that its gradient is summed over the
        # ranks among which W is split there.
        a = ParamSpec(
            (*lead, rows, rank),
            (*lead_axes, row_axis, ""),
            Normal(rows**-0.5),
            tags=tags,
            beside=(column_axis,),
        )
        # B is zero, so the adapted model begins as the base, and A is not, so B has a gradient.
        b = ParamSpec(
            (*lead, rank, columns),
            (*lead_axes, "", column_axis),
            Constant(0.0),
            tags=tags,
            beside=(row_axis,),
        )
        return LowRank(base, a, b, alpha / rank)

    return tree.map_with_path(adapt, specs)


def init(
    specs: Any,
    key: Tensor,
    read: Read,
    *,
    dtype: torch.dtype | None = None,
    tile: Callable[[str, ParamSpec], Tile] | None = None,
) -> Any:
    """Draws the adapters, and encodes the weights that are read, on the device of ``key``.

    A rank reads of each weight what its tiles of codes and scales are made from; the bits are those
    of the whole.

    Args:
        specs: from :func:`apply`.
        key: of the adapters, as in :func:`k31fn.params.init`.
        read: gives the model to adapt.
        dtype: of the adapters.
        tile: see :func:`k31fn.params.init`; paths are those of the adapted model.
    """

    def tile_of(path: str, spec: ParamSpec) -> Tile:
        """This rank's tile, with start and stop in every dimension."""
        if tile is None:
            return tuple(slice(0, n) for n in spec.shape)
        given = tile(path, spec)
        return tuple(slice(*s.indices(n)[:2]) for s, n in zip(given, spec.shape, strict=True))

    def frozen(path: str, adapted_path: str, node: Any) -> Any:
        """The leaf at ``adapted_path``, made from the weight at ``path`` of the model read."""
        if isinstance(node, Quantized):
            codes_tile = tile_of(f"{adapted_path}.codes", node.codes)
            scales_tile = tile_of(f"{adapted_path}.scales", node.scales)
            # On the device, where encoding is quick.
            return _encode_tiles(
                node, codes_tile, scales_tile, lambda part: read(path, part).to(key.device)
            )
        return read(path, tile_of(adapted_path, node)).to(device=key.device, dtype=node.dtype)

    def adapter(path: str, spec: ParamSpec) -> Tensor:
        return declared.draw(path, spec, key, dtype=dtype, tile=tile_of(path, spec))

    def weight(path: str, node: Any) -> Any:
        if not isinstance(node, LowRank):
            return frozen(path, path, node)
        base = frozen(path, f"{path}.base", node.base)
        a = adapter(f"{path}.a", node.a)
        b = adapter(f"{path}.b", node.b)
        return dataclasses.replace(node, base=base, a=a, b=b)

    # A weight and its adapters as one node: each is made from one weight of the model read.
    structure = tree.flatten(specs, is_leaf=_is_weight)[1]
    pairs = tree.flatten_with_paths(specs, is_leaf=_is_weight)
    return tree.unflatten(structure, [weight(path, node) for path, node in pairs])


def merge(params: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The parameters of the model without adapters: ``W + scale A B``, and what was quantised, in
    ``dtype``.

    Sums are taken in float32 (float64 in a float64 run) and rounded once.
    """
    return tree.map(lambda w: _dense(w, dtype) if _is_weight(w) else w, params, is_leaf=_is_weight)


def _is_weight(node: Any) -> bool:
    return isinstance(node, LowRank | Quantized)


def _dense(w: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(w, Quantized):
        return dequantize(w, dtype)
    if isinstance(w, LowRank):
        # The sum in float32: in bfloat16 an update below 1/256 of a weight would be lost.
        wide = precision.island(dtype)
        return (_dense(w.base, wide) + w.scale * (w.a.to(wide) @ w.b.to(wide))).to(dtype)
    return w.to(dtype)


def _base(path: str, spec: ParamSpec, cfg: Config) -> Any:
    """The frozen form of a leaf."""
    tags = (spec.tags & {"expert", "no_decay"}) | {"frozen", "as_declared"}
    frozen = dataclasses.replace(spec, tags=tags, head_dim=0)
    if "matrix" not in spec.tags or not re.search(cfg.held_pattern, path):
        return frozen
    *lead, rows, columns = spec.shape

    def quantised(
        codes: tuple[int, int], scales: tuple[int, int], dtype: torch.dtype, fmt: declared.Format
    ) -> Any:
        # Zeros: what these are drawn as is never used, they are read.
        zeros = dataclasses.replace(frozen, init=Constant(0.0))
        return Quantized(
            dataclasses.replace(zeros, shape=(*lead, *codes), dtype=torch.uint8),
            dataclasses.replace(zeros, shape=(*lead, *scales), dtype=dtype),
            format=fmt,
        )

    if cfg.held == "fp8":
        height = _block(rows, spec.axes[-2])
        width = _block(columns, spec.axes[-1])
        blocks = (rows // height, columns // width)
        return quantised((rows, columns), blocks, torch.float32, "fp8")
    if cfg.held == "mxfp4" and "expert" in spec.tags:
        mxfp4.check_columns(rows)  # along which it is packed: the columns of a checkpoint
        return quantised((rows // 2, columns), (rows // mxfp4.GROUP, columns), torch.uint8, "mxfp4")
    return frozen


def _block(size: int, axis: str) -> int:
    """Side of the FP8 blocks of a dimension: one that divides each rank's part of it, too."""
    return fp8.block_size(size // math.gcd(size, _MOST_RANKS) if axis in _SPLIT else size)


def _encode_tiles(
    node: Quantized[ParamSpec],
    codes_tile: Tile,
    scales_tile: Tile,
    read: Callable[[Tile], Tensor],
) -> Any:
    """Tiles of codes and of scales.

    A code depends on all weights of its group, so the weight is read from the start of the first
    group that a tile touches to the end of the last. So the bits are those of the whole.
    """
    per_code = 2 if node.format == "mxfp4" else 1  # rows of the weight in one code
    rows = node.codes.shape[-2] * per_code
    columns = node.codes.shape[-1]
    groups = (rows // node.scales.shape[-2], columns // node.scales.shape[-1])
    codes_source, codes_inner = _source_of(codes_tile, (per_code, 1), groups)
    scales_source, scales_inner = _source_of(scales_tile, groups, groups)
    codes, scales = _encode(node.format, read(codes_source), groups)
    # Mostly they are of the same part of the weight, which is then read once.
    if str(scales_source) != str(codes_source):
        _, scales = _encode(node.format, read(scales_source), groups)
    # Contiguous: a slice would keep all of what was read alive.
    return Quantized(
        codes[..., *codes_inner].contiguous(), scales[..., *scales_inner].contiguous(), node.format
    )


def _source_of(
    tile: Tile, per_element: tuple[int, int], groups: tuple[int, int]
) -> tuple[Tile, list[slice]]:
    """The part of a weight, in whole groups, that a tile is encoded from, and its place therein.

    Args:
        tile: of codes or of scales.
        per_element: rows and columns of the weight that one of these stands for.
        groups: rows and columns of a group.
    """
    *lead, height, width = tile
    source: list[slice] = []
    inner: list[slice] = []
    for s, size, group in zip((height, width), per_element, groups, strict=True):
        start = s.start * size // group * group
        stop = -(-s.stop * size // group) * group
        source.append(slice(start, stop))
        inner.append(slice(s.start - start // size, s.stop - start // size))
    return (*lead, *source), inner


def _encode(fmt: declared.Format, dense: Tensor, groups: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight ``[in, out]``."""
    if fmt == "fp8":
        return fp8.encode(dense, groups)
    # Groups of MXFP4 run along the columns of ``[out, in]``, as a checkpoint stores it.
    codes, scales = mxfp4.encode(dense.mT)
    return codes.mT, scales.mT
