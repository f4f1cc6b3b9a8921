"""Reading and writing checkpoints of the text model in K3's names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from k31fn import balance, model, precision, tree
from k31fn.hf import config
from k31fn.hf.files import DTYPES, INDEX, SINGLE, Info, Output, Source, open_source, write_json, write_tensors
from k31fn.hf.table import Entry, Weights, entries, specs
from k31fn.params import ParamSpec
from k31fn.typing import Tensor

__all__ = ["export", "load", "to_names"]

OTHER_PARTS = ("vision_tower.", "mm_projector.")  # of a multimodal checkpoint; not the text model's


def load(
    directory: str | Path, cfg: model.Config, *, dtype: torch.dtype | None = None
) -> tuple[model.Params[Tensor], balance.State]:
    """The parameters and the routers' balance of a checkpoint in K3's names.

    Reads safetensors, one file or shards with an index, tensor by tensor into the parameters. Vision weights are left
    out.

    Args:
        directory: of the checkpoint.
        cfg: the model; :func:`k31fn.hf.config_from_hf` gives the one that ``config.json`` describes.
        dtype: of the model. None: each weight as it is stored. Either way float32 islands are at least float32.

    Raises:
        ValueError: missing, unknown and misshaped tensors, all in one message.
    """
    table = entries(cfg)
    with open_source(Path(directory)) as source:
        if problems := _problems(table, source.tensors):
            raise ValueError(f"checkpoint {directory} does not fit the config:\n{problems}")
        values = [_read(entry, source, dtype) for entry in table]
    weights: Weights = tree.unflatten(tree.flatten(specs(cfg))[1], values)
    layers = model.moe_layers(cfg)
    empty = balance.init(layers, cfg.moe.num_experts)
    return weights.params, balance.State(weights.balance, layers) if layers else empty


def export(params: model.Params[Tensor], state: balance.State, cfg: model.Config, directory: str | Path) -> None:
    """Writes ``model.safetensors`` and ``config.json`` in K3's names, each whole or not at all.

    The dtypes are those of the leaves (``params.cast`` changes them). Memory for one tensor is needed beside the
    parameters.

    Raises:
        ValueError: the trees do not fit ``cfg``, ``cfg`` has what K3's format cannot say, or the directory holds a
            checkpoint in shards.
    """
    target = Path(directory)
    described = config.describe(cfg, params.embedding.weight.dtype)
    if (target / INDEX).exists():
        raise ValueError(f"{target} holds {INDEX}, which readers would mix up with the new file; use another directory")
    if state.layers != model.moe_layers(cfg):
        raise ValueError(f"balance.State.layers={state.layers} must be the MoE layers of cfg {model.moe_layers(cfg)}")
    outputs: dict[str, Output] = {}
    table = entries(cfg)
    for entry, value in zip(
        table, _leaves(Weights(params, state.bias if state.layers else ()), specs(cfg)), strict=True
    ):
        for name, part in _parts(entry, value):
            transform = entry.row.transform
            outputs[name] = Output(entry.stored_shape, value.dtype, lambda t=transform, p=part: t.export(p))
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / SINGLE, outputs)
    write_json(target / config.FILE, described)


def to_names(params: model.Params[Tensor], cfg: model.Config) -> dict[str, Tensor]:
    """Parameters, or a tree like them such as gradients, by K3's names and in K3's layout (views where possible)."""
    table = [entry for entry in entries(cfg) if entry.path != "balance"]
    pairs = zip(table, _leaves(params, specs(cfg).params), strict=True)
    return {name: e.row.transform.export(part) for e, value in pairs for name, part in _parts(e, value)}


def _leaves(values: Any, declared: Any) -> list[Tensor]:
    """The leaves of ``values``, in the order of the specs.

    Raises:
        ValueError: another structure or another shape than declared.
    """

    def check(path: str, value: Tensor, spec: ParamSpec) -> Tensor:
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"{path} has shape {list(value.shape)}, cfg wants {list(spec.shape)}")
        return value

    tree.map(lambda *_: 0, declared, values)  # the same structure, or a clear error
    leaves = tree.leaves(values)
    return [check(path, v, spec) for (path, spec), v in zip(tree.flatten_with_paths(declared), leaves, strict=True)]


def _parts(entry: Entry, value: Tensor) -> Iterable[tuple[str, Tensor]]:
    """The names of a leaf's tensors, each with its part of the leaf."""
    return zip(entry.names, value.unbind(0) if entry.stacked else (value,), strict=True)


def _read(entry: Entry, source: Source, dtype: torch.dtype | None) -> Tensor:
    stored = [source.read(name) for name in entry.names[:1]]
    stored = [DTYPES[source.tensors[name].dtype] for name in entry.names]
    wanted = functools.reduce(torch.promote_types, stored) if dtype is None else dtype
    value = torch.empty(entry.spec.shape, dtype=precision.storage_dtype(entry.spec.dtype, wanted))
    for name, part in _parts(entry, value):
        part.copy_(entry.row.transform.load(source.read(name), entry.shape))
    return value


def _problems(table: list[Entry], tensors: dict[str, Info]) -> str:
    """What does not fit, grouped by kind of weight; empty if all fits."""
    wanted = {name: entry for entry in table for name in entry.names}
    missing = [name for name in wanted if name not in tensors]
    extra = sorted(name for name in tensors if name not in wanted and not name.startswith(OTHER_PARTS))
    both = [(name, entry, tensors[name]) for name, entry in wanted.items() if name in tensors]
    shapes = [f"{n}: {list(t.shape)}, wanted {list(e.stored_shape)}" for n, e, t in both if t.shape != e.stored_shape]
    dtypes = [f"{name}: {info.dtype}" for name, _, info in both if info.dtype not in DTYPES]
    found = [
        *_listed("missing", missing),
        *_listed("not of this model", extra),
        *_listed("of another shape", shapes),
        *_listed("not floating point", dtypes),
    ]
    if not found:
        return ""
    if any(name.endswith(".weight_packed") for name in extra):
        return "\n".join([*found, "fix: this checkpoint is quantised (MXFP4); load one with plain .weight tensors"])
    return "\n".join([*found, "fix: load with the config of this checkpoint: k31fn.hf.config_from_hf(directory)"])


def _listed(what: str, items: list[str], most: int = 20) -> list[str]:
    """One line per kind: names that differ in numbers of layers and experts only are one kind, shown by their first."""
    kinds: dict[str, list[str]] = {}
    for item in items:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", item), []).append(item)
    lines = [
        f"  {group[0]}" + (f"  (and {len(group) - 1} like it)" if len(group) > 1 else "")
        for group in list(kinds.values())[:most]
    ]
    if len(kinds) > most:
        lines.append(f"  ... {len(kinds) - most} more kinds")
    return [f"{len(items)} {what}:", *lines] if items else []
