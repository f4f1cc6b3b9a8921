"""K3's names of the weights: one row per kind of weight.

A row says which leaves of the tree it covers (``{i}`` is a layer), what they are called in the
checkpoint and how their layout differs. A name with ``{j}`` (expert) or ``{m}`` (MoE layer) stands
for one tensor per element of the leaf's first dimension; a row with a ``third`` for that part of a
tensor's first dimension. The leaves come from the model's specs, so a weight without a row, or with
two, is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import torch

from k31fn import model, tree
from k31fn.hf_format.transforms import (
    DEPTHWISE,
    HEADS_PADDED,
    KERNEL,
    ROW,
    SAME,
    TRANSPOSED,
    Tile,
    Transform,
)
from k31fn.params import Constant, ParamSpec

__all__ = ["ROWS", "VISION", "Entry", "Weights", "entries", "specs"]

# How names begin.
LANGUAGE = "language_model."
VISION = ("vision_tower.", "mm_projector.")


class _TableRow(NamedTuple):
    """A kind of weight: its name in the checkpoint, its path in the tree, and how they differ in
    layout.

    Attributes:
        name: in the checkpoint.
        path: in the tree.
        transform: between the layouts.
        third: 0, 1 or 2: which third of the stored rows it is; None: all.
        wide: whether it must be stored as float32 or wider.
    """

    name: str
    path: str
    transform: Transform
    third: int | None = None
    wide: bool = False


def _layer(name: str, path: str, transform: Transform, *, wide: bool = False) -> _TableRow:
    return _TableRow(
        LANGUAGE + "model.layers.{i}." + name, "params.layers.{i}." + path, transform, wide=wide
    )


def _block(name: str, path: str, transform: Transform, third: int | None = None) -> _TableRow:
    return _TableRow(
        "vision_tower.encoder.blocks.{i}." + name,
        "params.vision.blocks.{i}." + path,
        transform,
        third,
    )


def _attention(path: str) -> tuple[_TableRow, ...]:
    """Rows of Gated MLA, at ``path`` of the layer: Gated DSA holds it beside the indexer.

    The gate and the output projection of KDA have the same names as Gated MLA's.
    """
    return (
        _layer("self_attn.q_a_proj.weight", f"{path}.w_qa", TRANSPOSED),
        _layer("self_attn.q_a_layernorm.weight", f"{path}.q_norm", SAME),
        _layer("self_attn.q_b_proj.weight", f"{path}.w_qb", TRANSPOSED),
        _layer("self_attn.kv_a_proj_with_mqa.weight", f"{path}.w_kva", TRANSPOSED),
        _layer("self_attn.kv_a_layernorm.weight", f"{path}.kv_norm", SAME),
        _layer("self_attn.kv_b_proj.weight", f"{path}.w_kvb", TRANSPOSED),
        _layer("self_attn.g_proj.weight", f"{path}.w_g", TRANSPOSED),
        _layer("self_attn.o_proj.weight", f"{path}.w_o", TRANSPOSED),
    )


ROWS = (
    # Around the layers. A query of AttnRes is stored as a linear map onto one number.
    _TableRow(LANGUAGE + "model.embed_tokens.weight", "params.embedding.weight", SAME),
    _TableRow(LANGUAGE + "model.output_attn_res_proj.weight", "params.final_mix.query", ROW),
    _TableRow(LANGUAGE + "model.output_attn_res_norm.weight", "params.final_mix.norm", SAME),
    _TableRow(LANGUAGE + "model.norm.weight", "params.final_norm.weight", SAME),
    _TableRow(LANGUAGE + "lm_head.weight", "params.head", TRANSPOSED),
    # Norms and AttnRes of every layer.
    _layer("self_attention_res_proj.weight", "attn_mix.query", ROW),
    _layer("self_attention_res_norm.weight", "attn_mix.norm", SAME),
    _layer("input_layernorm.weight", "attn_norm.weight", SAME),
    _layer("mlp_res_proj.weight", "ffn_mix.query", ROW),
    _layer("mlp_res_norm.weight", "ffn_mix.norm", SAME),
    _layer("post_attention_layernorm.weight", "ffn_norm.weight", SAME),
    # KDA.
    _layer("self_attn.q_proj.weight", "attn.w_q", TRANSPOSED),
    _layer("self_attn.k_proj.weight", "attn.w_k", TRANSPOSED),
    _layer("self_attn.v_proj.weight", "attn.w_v", TRANSPOSED),
    _layer("self_attn.q_conv1d.weight", "attn.conv_q.weight", DEPTHWISE),
    _layer("self_attn.k_conv1d.weight", "attn.conv_k.weight", DEPTHWISE),
    _layer("self_attn.v_conv1d.weight", "attn.conv_v.weight", DEPTHWISE),
    _layer("self_attn.f_a_proj.weight", "attn.w_fa", TRANSPOSED),
    _layer("self_attn.f_b_proj.weight", "attn.w_fb", TRANSPOSED),
    # These two set the decay, whose logarithm is summed over a document: float32 in the release.
    _layer("self_attn.dt_bias", "attn.dt_bias", SAME, wide=True),
    _layer("self_attn.A_log", "attn.A_log", HEADS_PADDED, wide=True),
    _layer("self_attn.b_proj.weight", "attn.w_b", TRANSPOSED),
    _layer("self_attn.o_norm.weight", "attn.o_norm", SAME),
    # Gated MLA, alone or inside of Gated DSA, whose indexer comes after it.
    *_attention("attn"),
    *_attention("attn.attn"),
    _layer("self_attn.indexer.wq_b.weight", "attn.indexer.w_q", TRANSPOSED),
    _layer("self_attn.indexer.wk.weight", "attn.indexer.w_k", TRANSPOSED),
    _layer("self_attn.indexer.k_norm.weight", "attn.indexer.k_norm_weight", SAME),
    _layer("self_attn.indexer.k_norm.bias", "attn.indexer.k_norm_bias", SAME),
    _layer("self_attn.indexer.weights_proj.weight", "attn.indexer.w_w", TRANSPOSED),
    # Dense channel mixers of the first layers.
    _layer("mlp.gate_proj.weight", "ffn.w_gate", TRANSPOSED),
    _layer("mlp.up_proj.weight", "ffn.w_up", TRANSPOSED),
    _layer("mlp.down_proj.weight", "ffn.w_down", TRANSPOSED),
    # MoE. The balance of all layers is one leaf of ours and a tensor of each layer there. The
    # release counts gate, down and up as 1, 2 and 3.
    _layer("block_sparse_moe.gate.weight", "ffn.router.weight", TRANSPOSED),
    _TableRow(
        LANGUAGE + "model.layers.{m}.block_sparse_moe.gate.e_score_correction_bias",
        "balance",
        SAME,
        wide=True,
    ),
    _layer("block_sparse_moe.routed_expert_down_proj.weight", "ffn.latent_down", TRANSPOSED),
    _layer("block_sparse_moe.experts.{j}.w1.weight", "ffn.experts.w_gate", TRANSPOSED),
    _layer("block_sparse_moe.experts.{j}.w3.weight", "ffn.experts.w_up", TRANSPOSED),
    _layer("block_sparse_moe.experts.{j}.w2.weight", "ffn.experts.w_down", TRANSPOSED),
    _layer("block_sparse_moe.routed_expert_norm.weight", "ffn.norm.weight", SAME),
    _layer("block_sparse_moe.routed_expert_up_proj.weight", "ffn.latent_up", TRANSPOSED),
    _layer("block_sparse_moe.shared_experts.gate_proj.weight", "ffn.shared.w_gate", TRANSPOSED),
    _layer("block_sparse_moe.shared_experts.up_proj.weight", "ffn.shared.w_up", TRANSPOSED),
    _layer("block_sparse_moe.shared_experts.down_proj.weight", "ffn.shared.w_down", TRANSPOSED),
    # Vision. Queries, keys and values are three leaves of ours: tensor parallelism splits each by
    # heads.
    _TableRow("vision_tower.patch_embed.proj.weight", "params.vision.patch", KERNEL),
    _TableRow("vision_tower.patch_embed.pos_emb.weight", "params.vision.table", SAME),
    _block("norm0.weight", "attn_norm", SAME),
    _block("wqkv.weight", "w_q", TRANSPOSED, 0),
    _block("wqkv.weight", "w_k", TRANSPOSED, 1),
    _block("wqkv.weight", "w_v", TRANSPOSED, 2),
    _block("wo.weight", "w_o", TRANSPOSED),
    _block("norm1.weight", "mlp_norm", SAME),
    _block("mlp.fc0.weight", "w_in", TRANSPOSED),
    _block("mlp.fc1.weight", "w_out", TRANSPOSED),
    _TableRow("vision_tower.encoder.final_layernorm.weight", "params.vision.norm", SAME),
    _TableRow("mm_projector.proj.0.weight", "params.projector.w_in", TRANSPOSED),
    _TableRow("mm_projector.proj.2.weight", "params.projector.w_out", TRANSPOSED),
    _TableRow("mm_projector.post_norm.weight", "params.projector.norm", SAME),
)


@tree.dataclass
class Weights:
    """What a checkpoint holds: the parameters and the routers' balance, ``()`` without MoE
    layers.
    """

    params: Any
    balance: Any


class Entry(NamedTuple):
    """A leaf and where it is stored.

    Attributes:
        path: of the leaf.
        spec: of the leaf.
        row: the kind of weight.
        names: the tensors, several if ``stacked``.
        stacked: whether each tensor is one element of the leaf's first dimension.
    """

    path: str
    spec: ParamSpec
    row: _TableRow
    names: tuple[str, ...]
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what one tensor stands for."""
        return self.spec.shape[1:] if self.stacked else self.spec.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the checkpoint."""
        return self._whole(self.row.transform.stored_shape(self.shape))

    @property
    def sliced_shape(self) -> tuple[int, ...]:
        """The shape of the same memory with the dimensions of :meth:`stored_tile`."""
        return self._whole(self.row.transform.sliced_shape(self.shape))

    @property
    def quantisable(self) -> bool:
        """Whether the released checkpoints hold it as MXFP4."""
        return "expert" in self.spec.tags

    def stored_tile(self, tile: Tile) -> Tile:
        """The place in the tensor of a tile of what it stands for."""
        # The first dimension is the one that thirds are taken along, whatever the transform.
        first, *rest = self.row.transform.stored_tile(tile, self.shape)
        if self.row.third is not None:
            begin = self.row.third * self.row.transform.sliced_shape(self.shape)[0]
            first = slice(first.start + begin, first.stop + begin)
        return (first, *rest)

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.row.third is None else (3 * shape[0], *shape[1:])


def specs(cfg: model.Config) -> Weights:
    """Declares all that a checkpoint of ``cfg`` holds.

    Raises:
        ValueError: ``cfg`` has an MTP layer.
    """
    if cfg.num_mtp_layers:
        raise ValueError(
            f"model.Config.mtp={cfg.mtp}: K3's checkpoint format has no MTP layer; set it to (), "
            "and for an export replace params.mtp by () and leave out the last row of the balance"
        )
    # One row of the balance for each MoE layer; without any, no leaf: an empty tensor has no name.
    bias = (len(model.moe_layers(cfg)), model.experts(cfg).num_experts)
    balance = ParamSpec(bias, ("", ""), Constant(0.0), torch.float32) if bias[0] else ()
    return Weights(model.specs(cfg), balance)


def entries(cfg: model.Config, rows: tuple[_TableRow, ...] = ROWS) -> list[Entry]:
    """Every leaf of ``cfg`` with the names of its tensors (:func:`_entries_of`)."""
    return _entries_of(specs(cfg), model.moe_layers(cfg), rows)


def _entries_of(
    declared: Weights, moe_layers: tuple[int, ...], rows: tuple[_TableRow, ...] = ROWS
) -> list[Entry]:
    """Every leaf of a tree of ParamSpecs with the names of its tensors, in the order of the tree.

    Raises:
        ValueError: leaves that no row or several rows cover, and names that several leaves have,
            all listed.
    """
    # Escaped whole, so the braces that stand for the layer have to be looked for escaped.
    patterns = [re.compile(re.escape(row.path).replace(r"\{i\}", r"(?P<i>\d+)")) for row in rows]
    entries: list[Entry] = []
    wrong: list[str] = []
    for path, spec in tree.flatten_with_paths(declared):
        matches: list[tuple[_TableRow, dict[str, str]]] = []
        for row, pattern in zip(rows, patterns, strict=True):
            match = pattern.fullmatch(path)
            if match:
                matches.append((row, match.groupdict()))
        if len(matches) != 1:
            names = [row.name for row, _ in matches]
            wrong.append(f"{path} is covered by {len(matches)} rows {names}")
        # Of a leaf with two rows the first, so that a name of two leaves is found too.
        for row, layer in matches[:1]:
            entries.append(_entry(moe_layers, path, spec, row, layer))
    counts: Counter[tuple[str, int | None]] = Counter()
    for entry in entries:
        counts.update((name, entry.row.third) for name in entry.names)
    for (name, _), count in counts.items():
        if count > 1:
            wrong.append(f"{name} is the name of {count} leaves")
    if wrong:
        raise ValueError(
            f"k31fn.hf_format.table needs one row per leaf and one leaf per name; {len(wrong)}: "
            f"{wrong[:20]}"
        )
    return entries


def _entry(
    moe_layers: tuple[int, ...], path: str, spec: ParamSpec, row: _TableRow, layer: dict[str, str]
) -> Entry:
    pattern = row.name.replace("{i}", layer.get("i", ""))
    for letter, numbers in (("{j}", range(spec.shape[0])), ("{m}", moe_layers)):
        if letter in pattern:
            names = tuple(pattern.replace(letter, str(number)) for number in numbers)
            return Entry(path, spec, row, names, True)
    return Entry(path, spec, row, (pattern,), False)
