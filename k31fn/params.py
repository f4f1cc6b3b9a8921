"""Parameters: one declaration per weight.

A layer's ``specs(cfg)`` returns a tree of :class:`ParamSpec`. Initial values, sharding, optimiser
groups, the checkpoint layout, parameter counts and abstract evaluation are all derived from that
one declaration.

Weights are stored ``[in, out]``. A leaf is a Tensor, :class:`Quantized` or :class:`LowRank`; layers
multiply through ``k31fn.layers.linear`` and need not know which.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

import torch
from torch import Tensor

from k31fn import precision, random, tree
from k31fn.parallel.partition import AxisRules
from k31fn.random.keys import check_key
from k31fn.typing import Leaf

__all__ = [
    "Constant",
    "Format",
    "Initializer",
    "LowRank",
    "Normal",
    "ParamSpec",
    "Quantized",
    "SoftplusInverse",
    "TruncatedNormal",
    "Uniform",
    "abstract",
    "cast",
    "count",
    "draw",
    "init",
    "leaf_key",
    "leaf_keys",
    "select",
]


def __dir__() -> list[str]:
    return __all__


Tile = tuple[slice, ...]


def _check_std(name: str, std: float) -> None:
    if not std >= 0:
        raise ValueError(f"{name}.std={std}: a standard deviation is not negative")


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float

    def draw(self, key: Tensor, shape: tuple[int, ...], tile: Tile | None) -> Tensor:
        """The tile of the initial value in float32."""
        if tile is not None:
            shape = tuple(len(range(n)[s]) for n, s in zip(shape, tile, strict=True))
        return torch.full(shape, self.value, dtype=torch.float32, device=key.device)


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float

    def __post_init__(self) -> None:
        _check_std("Normal", self.std)

    def draw(self, key: Tensor, shape: tuple[int, ...], tile: Tile | None) -> Tensor:
        """The tile of the initial value in float32."""
        # scaled here and not in the draw, so that two specs with one key differ by a factor alone
        return random.normal(key, shape, tile=tile) * self.std


@dataclass(frozen=True)
class TruncatedNormal:
    """N(0, std^2) cut at ``bound`` standard deviations."""

    std: float
    bound: float = 3.0

    def __post_init__(self) -> None:
        _check_std("TruncatedNormal", self.std)
        if not self.bound > 0:
            raise ValueError(f"TruncatedNormal.bound={self.bound} must be positive")

    def draw(self, key: Tensor, shape: tuple[int, ...], tile: Tile | None) -> Tensor:
        """The tile of the initial value in float32."""
        return random.truncated_normal(key, shape, bound=self.bound, tile=tile) * self.std


@dataclass(frozen=True)
class Uniform:
    """U(low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"Uniform.low={self.low} must be at most high={self.high}")

    def draw(self, key: Tensor, shape: tuple[int, ...], tile: Tile | None) -> Tensor:
        """The tile of the initial value in float32."""
        return random.uniform(key, shape, low=self.low, high=self.high, tile=tile)


@dataclass(frozen=True)
class SoftplusInverse:
    """softplus^-1(dt), dt log-uniform in [low, high]: the Mamba-2 rule for a time-step bias."""

    low: float = 1e-3
    high: float = 1e-1

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(
                f"SoftplusInverse.low={self.low} must be positive and at most high={self.high}: "
                "they bound a time step"
            )

    def draw(self, key: Tensor, shape: tuple[int, ...], tile: Tile | None) -> Tensor:
        """The tile of the initial value in float32."""
        log_low = math.log(self.low)
        log_high = math.log(self.high)
        dt = random.uniform(key, shape, low=log_low, high=log_high, tile=tile).exp()
        # log(e^dt - 1) without the overflow of e^dt or the cancellation at small dt
        return dt + torch.log(-torch.expm1(-dt))


Initializer = Constant | Normal | TruncatedNormal | Uniform | SoftplusInverse

TAGS = frozenset({"matrix", "per_head", "no_decay", "expert", "frozen", "as_declared"})

# Of the library's own rules, which nearly all weights have.
_AXES = AxisRules.known_axes()

Format = Literal["scaled", "fp8", "mxfp4"]
"""Format of the codes of a :class:`Quantized` leaf."""


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of one weight.

    Attributes:
        shape: the global shape, ``[in, out]`` for a matrix.
        axes: one logical axis name per dimension, a field of
            :class:`k31fn.parallel.AxisRules`; ``""``: not split.
        init: the initial value.
        dtype: bfloat16, or float32 for an island: a weight that stays float32 in a bf16 model
            through build, cast, sharding, save and load.
        tags: of ``matrix`` (Muon), ``per_head`` (split by head for Muon), ``no_decay``, ``expert``,
            ``frozen``, and ``as_declared``, which keeps ``dtype`` whatever dtype the model is asked
            to be.
        head_dim: columns of one head in the last dimension; set exactly on ``per_head`` leaves,
            else 0.
        beside: logical axes of the weight that this is a low-rank factor of, and has not itself:
            where they are split, a rank's use of the factor is a part of the whole use.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer
    dtype: torch.dtype = torch.bfloat16
    tags: frozenset[str] = frozenset()
    head_dim: int = 0
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"ParamSpec.axes={self.axes}: needs one name per dimension of shape {self.shape}"
            )
        if not _AXES.issuperset(self.axes + self.beside):
            self._check_axes()
        # an absent weight is () in the tree, not a weight without elements
        if any(n < 1 for n in self.shape):
            raise ValueError(f"ParamSpec.shape={self.shape}: every dimension must be at least 1")
        # a misspelt tag would silently hand a matrix to the wrong optimiser
        unknown = self.tags - TAGS
        if unknown:
            raise ValueError(f"ParamSpec.tags={sorted(unknown)} unknown; known: {sorted(TAGS)}")
        divides = self.head_dim > 0 and self.shape and self.shape[-1] % self.head_dim == 0
        if not (divides if "per_head" in self.tags else self.head_dim == 0):
            raise ValueError(
                f"ParamSpec.head_dim={self.head_dim}, tags={sorted(self.tags)}, "
                f"shape={self.shape}: a per_head leaf needs a head_dim that divides its last "
                "dimension, any other leaf 0"
            )

    def _check_axes(self) -> None:
        """Refuses an axis that no rules have, also none that a layer brought with it."""
        known = AxisRules.known_axes()
        for axis in self.axes + self.beside:
            if axis not in known:
                names = sorted(known - {""})
                nearest = "".join(difflib.get_close_matches(axis, names, 1))
                raise ValueError(
                    f"ParamSpec.axes={self.axes}: no rule knows {axis!r}"
                    f"{f', nearest: {nearest!r}' if nearest else ''}; known: {', '.join(names)}, "
                    "or '' for a dimension that nothing splits"
                )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@tree.dataclass
class Quantized(Generic[Leaf]):
    """A weight ``[in, out]`` in low precision; no gradient flows to its codes.

    | format | codes | scales | |---|---|---| | ``scaled`` | numbers ``[..., in, out]`` | ``[..., in
    / group, out]``: factors of groups of rows | | ``fp8`` | bytes of E4M3 ``[..., in, out]`` |
    ``[..., in / rows, out / columns]``: factors of blocks | | ``mxfp4`` | bytes, two rows in each:
    ``[..., in / 2, out]`` | bytes: powers of two ``[..., in / 32, out]`` |

    Scales of the first have a gradient. The other two are those of :mod:`k31fn.kernels.formats`,
    and frozen: a product with them decodes the weight and keeps only the bytes for its backward.

    Attributes:
        codes: see above.
        scales: see above.
        format: of the codes.
    """

    codes: Leaf
    scales: Leaf
    format: Format = tree.static(default="scaled")


@tree.dataclass
class LowRank(Generic[Leaf]):
    """A weight ``[in, out]`` plus a low-rank update ``scale a @ b`` (LoRA); products never form the
    dense update.

    Attributes:
        base: Tensor or :class:`Quantized` ``[..., in, out]``.
        a: ``[..., in, rank]``.
        b: ``[..., rank, out]``.
        scale: factor of the update.
    """

    base: Any
    a: Leaf
    b: Leaf
    scale: float = tree.static(default=1.0)


def init(
    specs: Any,
    key: Tensor,
    *,
    dtype: torch.dtype | None = None,
    tile: Callable[[str, ParamSpec], Tile] | None = None,
) -> Any:
    """Draws the initial values on the key's device.

    Each leaf's key is folded from a 63-bit hash of its path, so a weight's values do not depend on
    which others exist, and a tile drawn alone is bit-equal to that slice of the whole.

    Args:
        specs: tree of :class:`ParamSpec`.
        key: from :func:`k31fn.random.key`.
        dtype: dtype of the model; float32 islands stay at least float32. None: each spec's own.
        tile: ``(path, spec) -> slices``: the part of each weight to draw. None: all of it.
    """
    check_key(key)

    def of_leaf(path: str, spec: ParamSpec) -> Tensor:
        slices = None if tile is None else tile(path, spec)
        return draw(path, spec, key, dtype=dtype, tile=slices)

    return tree.map_with_path(of_leaf, specs)


def draw(
    path: str,
    spec: ParamSpec,
    key: Tensor,
    *,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The initial value of the leaf at ``path``, as :func:`init` draws it; ``tile`` is a part of
    it.
    """
    # drawn in float32 and cast: a bfloat16 model starts from the rounded values of a float32 one
    value = spec.init.draw(leaf_key(key, path), spec.shape, tile)
    return value.to(_leaf_dtype(spec, dtype))


def abstract(specs: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Meta tensors of the global shapes: for shape evaluation and planning without allocating."""
    return tree.map(
        lambda s: torch.empty(s.shape, dtype=_leaf_dtype(s, dtype), device="meta"), specs
    )


def cast(params: Any, specs: Any, dtype: torch.dtype) -> Any:
    """``params`` in ``dtype``; leaves whose spec is a float32 island stay at least float32."""
    return tree.map(lambda p, s: p.to(_leaf_dtype(s, dtype)), params, specs)


def count(specs: Any, where: Callable[[str, ParamSpec], bool] | None = None) -> int:
    """Number of parameters, of those leaves for which ``where(path, spec)`` holds."""
    numel = 0
    for path, spec in tree.flatten_with_paths(specs):
        if where is None or where(path, spec):
            numel += spec.numel
    return numel


def select(params: Any, specs: Any, where: Callable[[str, ParamSpec], bool]) -> dict[str, Any]:
    """``{path: leaf}`` of the leaves whose ``(path, spec)`` satisfies ``where``."""
    # the same structure, or an error that names the path: zip would pair leaves that do not belong
    tree.map(lambda *_: 0, params, specs)
    selected = {}
    pairs = zip(tree.flatten_with_paths(specs), tree.leaves(params), strict=True)
    for (path, spec), leaf in pairs:
        if where(path, spec):
            selected[path] = leaf
    return selected


def leaf_key(key: Tensor, path: str) -> Tensor:
    """The key of the leaf at ``path``."""
    return random.fold_in(key, _path_digest(path))


def leaf_keys(key: Tensor, paths: Sequence[str]) -> dict[str, Tensor]:
    """The keys of many leaves by path, made at once: each alone costs a device a hundred
    launches.
    """
    if not paths:
        return {}
    # filled, not copied: a step that makes keys waits for nothing, and can be captured
    words = [
        torch.full((), _path_digest(path), dtype=torch.int64, device=key.device) for path in paths
    ]
    keys = torch.func.vmap(random.fold_in, (None, 0))(key, torch.stack(words))
    return dict(zip(paths, keys.unbind(), strict=True))


def _path_digest(path: str) -> int:
    # of Python's own hash no two processes have the same
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    # 63 bits, which int64 holds: with 32, two of a model's thousands of leaves would share a key
    # once in a few hundred models
    return int.from_bytes(digest, "little") >> 1


def _leaf_dtype(spec: ParamSpec, dtype: torch.dtype | None) -> torch.dtype:
    # as_declared: the base of LoRA stays in bfloat16 under float32 adapters
    if dtype is None or "as_declared" in spec.tags:
        return spec.dtype
    return precision.storage_dtype(spec.dtype, dtype)
