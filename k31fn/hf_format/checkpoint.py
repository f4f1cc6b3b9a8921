"""Checkpoints of a model in K3's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from k31fn import balance, model, tree
from k31fn.hf_format import config
from k31fn.hf_format.leaves import SHARD_BYTES, pieces, read_leaves, tile_of, write_folder
from k31fn.hf_format.rank_part import ALONE, RankPart
from k31fn.hf_format.table import Weights, entries, specs
from k31fn.typing import Tensor

__all__ = ["export", "load", "to_names"]


def load(
    directory: str | Path,
    cfg: model.Config,
    *,
    dtype: torch.dtype | None = None,
    part: RankPart = ALONE,
) -> tuple[model.Params[Tensor], balance.State]:
    """The parameters and the routers' balance of a checkpoint in K3's names.

    Reads safetensors, one file or shards with an index, tensor by tensor into the parameters; of
    each only the bytes of the rank's own tile. Experts stored as MXFP4 are decoded. Vision weights
    are left out if ``cfg`` has no vision.

    Args:
        directory: of the checkpoint.
        cfg: the model; :func:`k31fn.hf.config_from_hf` gives the one that ``config.json``
            describes.
        dtype: of the model. None: each weight as it is stored, MXFP4 as bfloat16. Either way
            float32 islands are at least float32.
        part: what this rank holds; the balance is whole on every rank.

    Raises:
        ValueError: files that are incomplete, missing, unknown and misshaped tensors, wrong dtypes,
            all in one message; or weights that are not finite, all named.
    """
    values = read_leaves(entries(cfg), Path(directory), dtype=dtype, part=part)
    weights: Weights = tree.unflatten(tree.flatten(specs(cfg))[1], values)
    layers = model.moe_layers(cfg)
    empty = balance.init(layers, model.experts(cfg).num_experts)
    return weights.params, balance.State(weights.balance, layers) if layers else empty


def export(
    params: model.Params[Tensor],
    state: balance.State,
    cfg: model.Config,
    directory: str | Path,
    *,
    quantise: bool = False,
    shard_bytes: int = SHARD_BYTES,
    part: RankPart = ALONE,
) -> None:
    """Writes a checkpoint in K3's names into a new folder: all of it, or nothing.

    The dtypes are those of the leaves (``params.cast`` changes them). Memory for one tensor is
    needed beside the parameters. On several ranks each writes its own tiles; all must see the same
    folder.

    Args:
        params: this rank's part of the parameters.
        state: the routers' balance.
        cfg: of the model.
        directory: must not exist, or be empty.
        quantise: whether the routed experts are written as MXFP4, of their values in bfloat16.
        shard_bytes: of one file, about; a checkpoint that fits in one has no index.
        part: what this rank holds.

    Raises:
        ValueError: the trees do not fit ``cfg``, ``cfg`` has what K3's format cannot say, the
            folder is not empty, or an expert's tile is no whole groups of MXFP4.
        RuntimeError: another rank failed.
    """
    if state.layers != model.moe_layers(cfg):
        raise ValueError(
            f"balance.State.layers={state.layers} must be the MoE layers of cfg "
            f"{model.moe_layers(cfg)}"
        )
    leaves = _leaves(Weights(params, state.bias if state.layers else ()), specs(cfg))
    # Made before anything is written: it refuses what K3's format cannot say.
    text = config.describe(cfg, params.embedding.weight.dtype, quantised=quantise)
    write_folder(
        entries(cfg),
        leaves,
        Path(directory),
        {config.FILE: text},
        quantise=quantise,
        shard_bytes=shard_bytes,
        part=part,
    )


def to_names(params: model.Params[Tensor], cfg: model.Config) -> dict[str, Tensor]:
    """Parameters, or a tree like them such as gradients, by K3's names and in K3's layout (views
    where possible).
    """
    table = [entry for entry in entries(cfg) if entry.path != "balance"]
    # Some tensors there are three leaves here, in whatever order the tree has them.
    thirds: dict[str, dict[int, Tensor]] = {}
    for entry, leaf in zip(table, _leaves(params, specs(cfg).params), strict=True):
        for name, tile, value in pieces(entry, leaf, tile_of(entry, ALONE)):
            stored = entry.row.transform.export(value, tile, entry.shape)
            if entry.row.third is None:
                stored = stored.reshape(entry.stored_shape)
            thirds.setdefault(name, {})[entry.row.third or 0] = stored
    named: dict[str, Tensor] = {}
    for name, parts in thirds.items():
        named[name] = parts[0] if len(parts) == 1 else torch.cat([parts[0], parts[1], parts[2]])
    return named


def _leaves(values: Any, declared: Any) -> list[Tensor]:
    """The leaves of ``values``, which must have the structure of the specs."""
    tree.map(lambda *_: 0, declared, values)  # only for its error, which says where they differ
    return tree.leaves(values)
