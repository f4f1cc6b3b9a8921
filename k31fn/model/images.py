"""Images in the text: the tower layer by layer, the projector, and the features in their places."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor

from k31fn.layers import projector, vision, vision_block
from k31fn.layers.patches import Images, Patches
from k31fn.model.config import Config
from k31fn.model.layers import Remat, run_steps
from k31fn.model.params import Params, whole
from k31fn.parallel.fsdp.placement import Placements, gather
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.typing import Float, Int

__all__ = ["check_images", "see"]


def see(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    images: Images,
    cfg: Config,
    *,
    remat: Remat = "none",
    placements: Placements = (),
    sh: Sharding = UNSHARDED,
) -> Float[Tensor, "B T D"]:
    """The embeddings ``x`` with those at placeholders replaced by what the tower and the projector
    make of the images.

    On a mesh pixels, patches and slots are split over the context and equal over ``sh.sequence``,
    as tokens are. Rows without images are padding to the tower: they cost the same work, and every
    rank issues the same collectives.
    """
    tower, onto = cfg.vision, cfg.projector
    assert not isinstance(tower, tuple), "check_images was not called"
    assert not isinstance(onto, tuple), "check_images was not called"
    # The tower's ends are gathered for the whole of it, its layers one by one as they run.
    ends = _without_blocks(params.vision)
    if placements:
        ends = gather(ends, _without_blocks(placements.vision))
    y = vision.embed(ends, images.pixels.to(x.dtype), tower, patches=images.patches, sh=sh)
    blocks = params.vision.blocks
    # The same loop as the decoder's, with the same remat and prefetch: images.patches is what all
    # its layers share, and none has anything of its own.
    y, _ = run_steps(
        [functools.partial(_run_block, tower.block, sh)] * len(blocks),
        blocks,
        placements.vision.blocks if placements else [],
        y,
        images.patches,
        [()] * len(blocks),
        remat=remat,
        light=vision_block.without_branches,
    )
    # Features are of this rank's tokens; the projector's weights are gathered as the table's are.
    y = vision.merge(ends, y, tower, patches=images.patches, sh=sh)
    features = projector.apply(whole(params, "projector", placements), y, onto, sh=sh)
    return projector.place(x, features, images.slots, sh=sh)


def _without_blocks(tower: Any) -> Any:
    return dataclasses.replace(tower, blocks=())


def _run_block(
    cfg: vision_block.Config, sh: Sharding, params: Any, x: Tensor, patches: Patches, _: Any
) -> tuple[Tensor, Any]:
    """A layer of the tower from integers: the angles are made again in each, so that none is kept
    or differentiated.
    """
    return vision_block.apply(
        params, x, cfg, geometry=vision_block.geometry(patches, cfg, x.dtype), sh=sh
    ), ()


def check_images(images: Images, tokens: Int[Tensor, "B T"], cfg: Config) -> None:
    """Raises ValueError about images that the model cannot see, or that are not of these tokens."""
    # By shapes alone: values are on the device, and looking at them would wait for it.
    if isinstance(cfg.vision, tuple):
        raise ValueError(
            "a batch with images for a model of text alone; set model.Config.vision and .projector"
        )
    if images.slots.shape != tokens.shape or len(images.pixels) != len(tokens):
        raise ValueError(
            f"images of {len(images.pixels)} rows with slots {list(images.slots.shape)} do not "
            "belong to tokens "
            f"{list(tokens.shape)}: they need as many rows, and a slot or -1 for each token"
        )
    if images.pixels.shape[-1] != cfg.vision.pixels_per_patch:
        raise ValueError(
            f"patches of {images.pixels.shape[-1]} numbers, the tower takes "
            f"{cfg.vision.pixels_per_patch}: "
            f"num_channels={cfg.vision.num_channels} of {cfg.vision.patch_size} x "
            f"{cfg.vision.patch_size} pixels"
        )
