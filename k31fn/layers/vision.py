"""The vision tower (MoonViT-V2): packed patches of images of any size to one feature per cell of 2
x 2 patches.

Equations (arXiv 2607.24653)::

    x = pixels W + bilinear(table, row, column) [+ time(frame)]    block by block     y = RMSNorm(x)
    out[cell] = [ mean_t y[t, 0, 0] | mean_t y[t, 0, 1] | mean_t y[t, 1, 0] | mean_t y[t, 1, 1] ]

The learned table is stretched over each image; the fixed time table is added to clips (more than
one frame) only. :func:`embed`, :func:`k31fn.layers.vision_block.apply` and :func:`merge` are the
steps of :func:`apply`, for callers that gather or recompute layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from einops import rearrange

from k31fn import tree
from k31fn.kernels.norm import rms_norm
from k31fn.layers import vision_block
from k31fn.layers.linear import linear
from k31fn.layers.patch_position import table_rows, time_rows
from k31fn.layers.patches import MERGE, Patches
from k31fn.parallel.collectives import all_gather, pslice, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Constant, Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.precision import upcast
from k31fn.typing import Float, Leaf, Tensor

__all__ = ["Config", "Params", "apply", "embed", "init", "merge", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """The tower.

    Attributes:
        block: the layers.
        num_layers: how many.
        patch_size: side of a patch in pixels.
        num_channels: of the pixels.
        table_size: height and width of the position table.
        num_frames: of the longest clip: rows of the time table.
    """

    block: vision_block.Config
    num_layers: int = field(metadata={"most": 10_000})
    patch_size: int = 14
    num_channels: int = 3
    table_size: tuple[int, int] = (64, 64)
    num_frames: int = 4

    def __post_init__(self) -> None:
        for name in ("num_layers", "patch_size", "num_channels", "num_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"vision.Config.{name}={getattr(self, name)} must be at least 1")
        if len(self.table_size) != 2 or min(self.table_size) < 1:
            raise ValueError(
                f"vision.Config.table_size={self.table_size} must be height and width, such as "
                "(64, 64)"
            )
        if self.block.hidden_size % 2:
            raise ValueError(
                f"vision.Config.block.hidden_size={self.block.hidden_size} must be even: the time "
                "table is half sines"
            )

    @property
    def pixels_per_patch(self) -> int:
        """Numbers that describe a patch: channels, then rows, then columns."""
        return self.num_channels * self.patch_size**2

    @property
    def output_size(self) -> int:
        """Width of a merged feature."""
        return MERGE**2 * self.block.hidden_size


@tree.dataclass
class Params(Generic[Leaf]):
    """``patch [CPP D]  table [S S D]  blocks  norm [D]``."""

    patch: Leaf
    table: Leaf
    blocks: tuple[vision_block.Params[Leaf], ...]
    norm: Leaf


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters; the table is looked up, not multiplied, so it is no ``matrix``."""
    D = cfg.block.hidden_size
    no_decay = frozenset({"no_decay"})
    return Params(
        patch=ParamSpec(
            (cfg.pixels_per_patch, D),
            ("", "hidden"),
            Normal(cfg.block.init_std),
            tags=frozenset({"matrix"}),
        ),
        table=ParamSpec((*cfg.table_size, D), ("", "", "hidden"), Normal(1.0), tags=no_decay),
        blocks=tuple(vision_block.specs(cfg.block) for _ in range(cfg.num_layers)),
        norm=ParamSpec((D,), ("hidden",), Constant(1.0), tags=no_decay),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    pixels: Float[Tensor, "B N X"],
    cfg: Config,
    *,
    patches: Patches,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B M Y"]:
    """Features of the images, one per slot (:mod:`k31fn.layers.patches`); those of padding mean
    nothing.

    On a mesh ``pixels`` and ``patches`` are split over ``sh.context`` and equal over
    ``sh.sequence``, as tokens and segments are; the result is split over ``sh.tokens``. Each rank's
    share must be a multiple of 4 patches.

    Gradients: to ``params`` and ``pixels``, to any order.
    """
    x = embed(params, pixels, cfg, patches=patches, sh=sh)
    # Once for all layers: each of them turns queries and keys alike.
    geometry = vision_block.geometry(patches, cfg.block, x.dtype)
    for block in params.blocks:
        x = vision_block.apply(block, x, cfg.block, geometry=geometry, sh=sh)
    return merge(params, x, cfg, patches=patches, sh=sh)


def embed(
    params: Params[Any],
    pixels: Float[Tensor, "B N X"],
    cfg: Config,
    *,
    patches: Patches,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B T D"]:
    """``pixels W + table rows [+ time rows]``: patches to the residual stream; of ``params`` the
    blocks may be absent.

    Raises:
        ValueError: the layout has room for longer clips than the time table.
    """
    if not isinstance(patches.cells, tuple) and patches.cells.shape[-1] > cfg.num_frames:
        raise ValueError(
            f"patches have room for clips of {patches.cells.shape[-1]} frames, more than "
            f"vision.Config.num_frames={cfg.num_frames}; make them with max_frames of at most that"
        )
    # Pixels and layout are those of the slice of the context; the tower works on this rank's share.
    local = tree.map(lambda field: pslice(field, sh.sequence, 1), patches)
    # Whole on every rank, for this rank's patches: pvary sums the gradients over the ranks.
    patch = tree.map(lambda w: pvary(w, sh.sequence), params.patch)
    x = linear(pslice(pixels, sh.sequence, 1), patch)
    position = table_rows(pvary(params.table, sh.sequence), local)
    if not isinstance(patches.cells, tuple):
        position = position + time_rows(local, cfg.num_frames, x.shape[-1], position.dtype)
    # Both tables are added up in their island and rounded once.
    return x + position.to(x.dtype)


def merge(
    params: Params[Any],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    patches: Patches,
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B M Y"]:
    """The final norm, the mean over frames and the 2 x 2 merge; of ``params`` the blocks may be
    absent.

    Raises:
        ValueError: a rank's patches are not whole cells.
    """
    if x.shape[1] % MERGE**2:
        raise ValueError(
            f"vision.merge: a rank holds {x.shape[1]} patches of a row, which are no whole cells "
            f"of {MERGE**2}; make the row a multiple of {MERGE**2} times the ranks that split it"
        )
    y = rms_norm(x, pvary(params.norm, sh.sequence), cfg.block.norm_eps)
    # The four patches of a cell lie one after another, so the merge moves nothing.
    y = rearrange(y, "b (cell patch) d -> b cell (patch d)", patch=MERGE**2)
    if isinstance(patches.cells, tuple):
        return y  # without clips slot i is cell i
    cells = pslice(patches.cells, sh.sequence, 1)
    # A slot's frames may lie on any rank.
    y = upcast(all_gather(all_gather(y, sh.sequence, 1), sh.context, 1))
    has_frame = cells >= 0
    frames: list[Tensor] = []
    for f in range(cells.shape[-1]):
        # A missing frame reads cell 0 and is made zero, gradient included.
        frame = torch.take_along_dim(y, cells[..., f, None].clamp(min=0), 1)
        frames.append(torch.where(has_frame[..., f, None], frame, 0.0))
    # A slot of padding has no frame: its mean is 0 and not 0 / 0.
    mean = torch.stack(frames).sum(0) / has_frame.sum(-1, keepdim=True).clamp(min=1)
    return mean.to(x.dtype)
