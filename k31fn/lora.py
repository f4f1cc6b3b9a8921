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

LAYERS = r"^layers\.\d+\.(attn|ffn)\.(?!.*\b(indexer|router)\b)"
"""Paths of the matrices of a model's decoder layers, without indexers and routers, which choose."""

Held = Literal["bfloat16", "fp8", "mxfp4"]
Tile = tuple[slice, ...]
Read = Callable[[str, Tile], Tensor]
"""``(path, tile) -> values``: a part of a weight of the model that is adapted, by its path there.
"""

_SPLIT = frozenset(
    {"heads", "mlp", "vocab", "expert_mlp"}
)  # logical axes that tensor parallelism splits
_MOST_RANKS = 8  # of it that find whole FP8 blocks


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
    matrices = [path for path, spec in tree.flatten_with_paths(specs) if "matrix" in spec.tags]
    if not any(re.search(pattern, path) for path in matrices):
        raise ValueError(
            f"lora.pattern={pattern!r} matches no matrix; there are {matrices[:3]}, ..."
        )

    def adapt(path: str, spec: ParamSpec) -> Any:
        base = _base(path, spec, cfg)
        if "matrix" not in spec.tags or not re.search(pattern, path):
            return base
        (*lead, rows, columns), (*first, of_rows, of_columns) = spec.shape, spec.axes
        tags = spec.tags & {"expert"}
        a = ParamSpec(
            (*lead, rows, rank),
            (*first, of_rows, ""),
            Normal(rows**-0.5),
            tags=tags,
            beside=(of_columns,),
        )
        b = ParamSpec(
            (*lead, rank, columns),
            (*first, "", of_columns),
            Constant(0.0),
            tags=tags,
            beside=(of_rows,),
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

    def part(path: str, spec: ParamSpec) -> Tile:
        given = tuple(slice(None) for _ in spec.shape) if tile is None else tile(path, spec)
        return tuple(slice(*s.indices(n)[:2]) for s, n in zip(given, spec.shape, strict=True))

    def held(path: str, at: str, node: Any) -> Any:
        """What stands ``at`` a path of the adapted model, made from the weight at ``path``."""
        if isinstance(node, Quantized):
            tiles = {
                name: part(f"{at}.{name}", getattr(node, name)) for name in ("codes", "scales")
            }
            return _encode_tiles(node, tiles, lambda tile: read(path, tile).to(key.device))
        return read(path, part(at, node)).to(device=key.device, dtype=node.dtype)

    def leaf(path: str, node: Any) -> Any:
        if not isinstance(node, LowRank):
            return held(path, path, node)
        a, b = (
            declared.draw(
                f"{path}.{name}", spec, key, dtype=dtype, tile=part(f"{path}.{name}", spec)
            )
            for name, spec in (("a", node.a), ("b", node.b))
        )
        return dataclasses.replace(node, base=held(path, f"{path}.base", node.base), a=a, b=b)

    return tree.unflatten(
        tree.flatten(specs, is_leaf=_is_weight)[1],
        [leaf(path, node) for path, node in tree.flatten_with_paths(specs, is_leaf=_is_weight)],
    )


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
        wide = precision.island(dtype)
        return (_dense(w.base, wide) + w.scale * (w.a.to(wide) @ w.b.to(wide))).to(dtype)
    return w.to(dtype)


def _base(path: str, spec: ParamSpec, cfg: Config) -> Any:
    """The frozen form of a leaf."""
    tags = (spec.tags & {"expert", "no_decay"}) | {"frozen", "as_declared"}
    frozen = dataclasses.replace(spec, tags=tags, head_dim=0)
    rows, columns = spec.shape[-2:] if "matrix" in spec.tags else (0, 0)

    def quantised(
        codes: tuple[int, int], scales: tuple[int, int], dtype: torch.dtype, fmt: declared.Format
    ) -> Any:
        parts = zip((codes, scales), (torch.uint8, dtype), strict=True)
        return Quantized(
            *(
                dataclasses.replace(
                    frozen, shape=(*spec.shape[:-2], *s), init=Constant(0.0), dtype=d
                )
                for s, d in parts
            ),
            format=fmt,
        )

    if not rows or not re.search(cfg.held_pattern, path):
        return frozen
    if cfg.held == "fp8":
        blocks = [_block(n, axis) for n, axis in zip((rows, columns), spec.axes[-2:], strict=True)]
        return quantised(
            (rows, columns), (rows // blocks[0], columns // blocks[1]), torch.float32, "fp8"
        )
    if cfg.held == "mxfp4" and "expert" in spec.tags:
        mxfp4.check_columns(rows)  # along which it is packed: the columns of a checkpoint
        return quantised((rows // 2, columns), (rows // mxfp4.GROUP, columns), torch.uint8, "mxfp4")
    return frozen


def _block(size: int, axis: str) -> int:
    return fp8.block_size(size // math.gcd(size, _MOST_RANKS) if axis in _SPLIT else size)


def _encode_tiles(
    node: Quantized[ParamSpec], tiles: dict[str, Tile], read: Callable[[Tile], Tensor]
) -> Any:
    """Tiles of codes and scales: the weight is read from the start of the first group to the end of
    the last.
    """
    rows, columns = (
        node.codes.shape[-2] * (2 if node.format == "mxfp4" else 1),
        node.codes.shape[-1],
    )
    groups = rows // node.scales.shape[-2], columns // node.scales.shape[-1]
    per_element = {"codes": (rows // node.codes.shape[-2], 1), "scales": groups}
    found, made = {}, dict[Any, Any]()
    for name, tile in tiles.items():
        *lead, height, width = tile
        each = list(zip((height, width), per_element[name], groups, strict=True))
        ranges = [(s.start * n // g * g, -(-s.stop * n // g) * g) for s, n, g in each]
        source = (*lead, *(slice(*r) for r in ranges))
        if (known := str(source)) not in made:
            made[known] = _encode(node.format, read(source), groups)
        inner = [
            slice(s.start - r[0] // n, s.stop - r[0] // n)
            for (s, n, _), r in zip(each, ranges, strict=True)
        ]
        found[name] = made[known][name == "scales"][..., inner[0], inner[1]].contiguous()
    return Quantized(found["codes"], found["scales"], node.format)


def _encode(fmt: declared.Format, dense: Tensor, groups: tuple[int, int]) -> tuple[Tensor, Tensor]:
    if fmt == "fp8":
        return fp8.encode(dense, groups)
    codes, scales = mxfp4.encode(dense.mT)
    return codes.mT, scales.mT
