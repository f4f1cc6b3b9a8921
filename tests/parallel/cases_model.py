"""The model and its layers on one rank of a mesh: what the tests run on every backend, and spawned
processes import.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn import balance, model, params, random, segments, tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.registry import use_impl
from k31fn.layers import (
    attn_res,
    block,
    dsa,
    embedding,
    indexer,
    kda,
    latent_moe,
    losses,
    mhc,
    mla,
    mlp,
    mtp,
    norm,
    plain_residual,
    projector,
    router,
    vision,
    vision_block,
)
from k31fn.layers.patches import Images, from_grids
from k31fn.parallel import (
    AxisRules,
    Mesh,
    MeshAxes,
    P,
    Sharding,
    all_gather_invariant,
    axes_of_process,
    check_invariance,
    fsdp,
    partition,
    pslice,
    psum,
    pvary,
)
from k31fn.parallel.tiling import cut
from k31fn.params import LowRank
from tests import small

D, T, ROWS, VOCAB = 16, 16, 4, 20
TOKENS = P(("dp", "fsdp"), ("cp", "tp"))  # of a layer's input and output
SLICE = P(("dp", "fsdp"), "cp")  # of token ids, labels, segments
# twice the rank is both head sizes: the two forms of MLA take equally many multiplications, so work
# can be compared
ATTENTION = mla.Config(
    D, 4, q_lora_rank=8, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
)
CFG = model.Config(
    vocab_size=VOCAB,
    hidden_size=D,
    sublayers=model.Sublayers(
        kda=kda.Config(D, num_heads=4, head_dim=4),
        full_attention=dsa.Config(ATTENTION, indexer.Config(D, 8, num_heads=2, head_dim=4), topk=4),
        dense=mlp.Config(D, 24),
        moe=latent_moe.Config(
            D, latent_size=8, expert_size=8, shared_size=8, num_experts=8, top_k=2
        ),
    ),
    layers=small.k3_layers(2, (1,)),
    residual=attn_res.Config(block_size=1, query_std=0.1),
)
CONFIGS = {
    "k31": CFG,
    "k31 deep": small.replace(
        CFG,
        num_layers=4,
        full_attention_layers=(1, 3),
        residual=dataclasses.replace(CFG.residual, block_size=2),
    ),
    "k31 mtp": small.replace(CFG, num_layers=1, full_attention_layers=(), num_mtp_layers=1),
    "k3": small.replace(
        CFG,
        full_attention=ATTENTION,
        residual=plain_residual.Config(),
        moe=dataclasses.replace(CFG.sublayers["moe"], balanced=False),
    ),
}
TOWER = vision.Config(
    vision_block.Config(hidden_size=8, num_heads=4, head_dim=4, intermediate_size=12),
    num_layers=2,
    patch_size=2,
    table_size=(3, 5),
)
CONFIGS["mhc"] = dataclasses.replace(
    CFG, residual=mhc.Config(num_streams=2, iterations=3, init_std=0.5, init_scale=0.5)
)
CONFIGS["k31 vision"] = dataclasses.replace(
    CFG, vision=TOWER, projector=projector.Config(TOWER.output_size, D)
)
PACKED = [
    [3, 7, 4],
    [1, 12],
    [16],
    [5, 6],
]  # documents cross slices of 4 and of 8 tokens; rows end in padding


def mesh_of(axes: MeshAxes) -> Mesh:
    views = ("pp", "dp", "fsdp", "cp", "tp", "ep")
    return Mesh(**{v: math.prod(a.size for a in axes.view(v)) for v in views})


def shaken(specs: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Parameters none of which is nearly absent or special, equal in float32 and float64 up to
    rounding.
    """
    drawn = params.init(specs, random.key(3), dtype=torch.float32)
    leaves, structure = tree.flatten(drawn)
    keys = random.split(random.key(4), len(leaves))
    moved = [w + 0.1 * random.normal(k, tuple(w.shape)) for w, k in zip(leaves, keys, strict=True)]
    return tree.map(lambda w: w.to(dtype), tree.unflatten(structure, moved))


# ---------------------------------------------------------------------------------- the whole model
def batch(cfg: model.Config = CFG) -> model.Batch:
    tokens, packing = (
        random.bits(random.key(5), (ROWS, T)) % cfg.vocab_size,
        segments.from_lengths(PACKED, T),
    )
    if isinstance(cfg.vision, tuple):
        return model.make_batch(tokens, packing, vocab_size=cfg.vocab_size)
    tokens, images = with_images(tokens, cfg.vision)
    return model.make_batch(tokens, packing, vocab_size=cfg.vocab_size, images=images)


GRIDS = [
    [(1, 2, 6), (1, 2, 2)],
    [(1, 6, 4)],
    [],
    [],
]  # the second row's lies on both halves; the others have none
PLACES = [[4, 5, 6, 11], [2, 3, 4, 5, 6, 7], [], []]  # of their placeholders
MEDIA, PATCHES = VOCAB - 1, 32


def with_images(tokens: Tensor, tower: vision.Config) -> tuple[Tensor, Images]:
    tokens = torch.where(tokens == MEDIA, 0, tokens)
    for row, places in enumerate(PLACES):
        tokens[row, places] = MEDIA
    pixels = random.normal(random.key(6), (ROWS, PATCHES, tower.pixels_per_patch)).to(torch.float64)
    return tokens, Images(pixels, from_grids(GRIDS, PATCHES), projector.slots(tokens, MEDIA))


def batch_specs(rows: model.Batch) -> Any:
    return tree.map(lambda x: SLICE if x.ndim else P(), rows)


BATCH_SPECS = batch_specs(batch())


def biases(cfg: model.Config, device: torch.device | str | None = None) -> balance.State:
    state = model.init_balance(cfg, device=device)
    bias = torch.linspace(-0.1, 0.1, state.bias.numel(), device=device).view(state.bias.shape)
    return dataclasses.replace(state, bias=bias)


class Step(NamedTuple):
    """The loss of all ranks and its parts, and the gradient of each parameter as the ranks hold
    it.
    """

    loss: Any
    parts: Any
    grads: Any


def step(
    axes: MeshAxes,
    weights: model.Params[Tensor],
    rows: model.Batch,
    *,
    name: str = "k31",
    remat: model.Remat = "none",
    rules: AxisRules | None = None,
) -> Step:
    """What a training step does on one rank before the optimiser."""
    cfg, specs = CONFIGS[name], model.specs(CONFIGS[name])
    places = fsdp.placements(specs, partition(specs, rules or AxisRules(), mesh_of(axes)), axes)
    state = biases(cfg, rows.tokens.device)

    def loss(weights: model.Params[Tensor]) -> tuple[Tensor, model.Losses]:
        return model.loss(
            weights, rows, cfg, balance=state, remat=remat, placements=places, sh=Sharding.on(axes)
        )

    (total, parts), grads = value_and_grad(loss, has_aux=True)(weights)
    return Step(psum(total, axes.data), tree.map(lambda x: psum(x, axes.data), parts), grads)


def step_on_rank(
    mesh: Mesh, name: str, remat: model.Remat, double: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """:func:`step` on a process, which cuts its tiles out of arguments it makes itself."""
    axes, coordinate = axes_of_process(mesh)
    cfg, dtype = CONFIGS[name], torch.float64 if double else torch.float32
    specs = model.specs(cfg)
    given = shaken(specs, dtype), batch(cfg)
    values, structure = tree.flatten(given)
    places = tree.leaves((partition(specs, AxisRules(), mesh), BATCH_SPECS))
    local = tree.unflatten(structure, cut(places, values, mesh, coordinate))
    with check_invariance():
        return tree.leaves(step(axes, *local, name=name, remat=remat)), {}


# ------------------------------------------------------------------------------ one layer at a time
WHOLE = AxisRules(spread=(), expert_spread=())
EMBEDDING = embedding.Config(VOCAB, D)
ROUTER = router.Config(D, num_experts=6, top_k=2)
RESIDUAL = attn_res.Config(block_size=2, query_std=0.1)
MTP = mtp.Config(block.Config(ATTENTION, mlp.Config(D, 8), plain_residual.Config()))


def vary(axes: MeshAxes, weights: Any) -> Any:
    """Weights that are whole over the data axes, as a layer uses them."""
    return tree.map(lambda w: pvary(w, axes.data), weights)


def look_up(axes: MeshAxes, table: embedding.Params[Tensor], tokens: Tensor) -> Tensor:
    return embedding.apply(vary(axes, table), tokens, EMBEDDING, sh=Sharding.on(axes))


def cross_entropy(
    axes: MeshAxes, hidden: Tensor, head: Any, labels: Tensor, *, logits_bytes: int = 2**20
) -> Tensor:
    sh, head = Sharding.on(axes), vary(axes, head)
    if isinstance(
        head, LowRank
    ):  # its first factor is whole on every rank, as k31fn.parallel.fsdp knows of specs
        head = dataclasses.replace(head, a=pvary(head.a, axes.tp))
    out = losses.linear_cross_entropy(hidden, head, labels, sh=sh, logits_bytes=logits_bytes)
    return psum(torch.stack([out.total, out.num_tokens.to(out.total.dtype)]), axes.data)


def cross_entropy_in_pieces(axes: MeshAxes, hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
    """Of three columns."""
    return cross_entropy(
        axes, hidden, head, labels, logits_bytes=3 * labels.numel() * hidden.element_size()
    )


def fused_cross_entropy(axes: MeshAxes, hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
    """``cross_entropy`` by the fused kernels, in two chunks of the tokens."""
    bound = -(-labels.numel() // 2) * head.shape[1] * hidden.element_size()
    with use_impl(head_cross_entropy="triton"):
        return cross_entropy(axes, hidden, head, labels, logits_bytes=bound)


def replicated_cross_entropy(
    axes: MeshAxes, hidden: Tensor, head: Tensor, labels: Tensor
) -> Tensor:
    """Equal values and gradients, without any work split: every rank computes all logits of all
    tokens.
    """
    whole, w = all_gather_invariant(hidden, axes.tp, 1), all_gather_invariant(head, axes.tp, 1)
    return cross_entropy(Mesh().axes(), whole, w, labels)


def normed(axes: MeshAxes, weights: norm.Params[Tensor], x: Tensor) -> Tensor:
    return norm.apply(vary(axes, weights), x, norm.Config(D), sh=Sharding.on(axes))


def routed(
    axes: MeshAxes, weights: router.Params[Tensor], x: Tensor, packing: segments.Segments
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and choices of this rank's tokens, without those of padding, and what all ranks
    count.
    """
    sh, bias = Sharding.on(axes), torch.linspace(-0.1, 0.1, ROUTER.num_experts)
    out = router.apply(vary(axes, weights), x, ROUTER, bias=bias, segments=packing, sh=sh)
    chosen = torch.where(pslice(packing.ids, sh.sequence, 1)[..., None] > 0, out.topk_idx, -1)
    return out.weights, chosen, psum(out.load, axes.atoms), psum(out.histogram, axes.atoms)


def residuals(axes: MeshAxes, weights: Any, x: Tensor) -> Tensor:
    """Two layers of two sublayers each in one block, a third that opens another, and the final
    mix.
    """
    weights, sh = vary(axes, weights), Sharding.on(axes)
    carry = attn_res.start(x, RESIDUAL)
    for i, mix in enumerate(weights[:-1]):
        carry, _ = attn_res.connect(
            mix, carry, RESIDUAL, lambda h: (h.tanh(), ()), opens_block=i % 4 == 0, sh=sh
        )
    return attn_res.finish(weights[-1], carry, RESIDUAL, sh=sh)


def predicted(
    axes: MeshAxes,
    weights: mtp.Params[Tensor],
    table: embedding.Params[Tensor],
    h: Tensor,
    tokens: Tensor,
    packing: segments.Segments,
) -> Tensor:
    weights, table = vary(axes, (weights, table))
    return mtp.apply(
        weights, h, tokens, MTP, embed=table, segments=packing, sh=Sharding.on(axes)
    ).hidden


def second_labels(axes: MeshAxes, labels: Tensor) -> Tensor:
    return mtp.labels(labels, context=axes.cp)
