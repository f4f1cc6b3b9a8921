"""Whether a recipe can run on its mesh, before any work."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping

import torch

from k31fn import model, tree
from k31fn.layers import kinds
from k31fn.layers.kind import ChannelMixer, Experts, TokenMixer
from k31fn.layers.patches import MERGE
from k31fn.limits import divisors, nearest
from k31fn.parallel.mesh import Mesh
from k31fn.parallel.moonep.plan import make_plan
from k31fn.parallel.partition import AxisRules, partition, resolve
from k31fn.params import ParamSpec

__all__ = ["check_mesh", "check_placement", "check_split", "split_share"]

# Of the parameters, that fsdp must split: with less, ranks hold most of the model each, and the
# memory that was to be saved is not.
_LEAST_SHARE = 0.5
_TRIES = 100
_POWERS_OF_TWO = tuple(1 << n for n in range(16))


def check_mesh(
    mesh: Mesh,
    cfg: model.Config,
    *,
    batch_size: int,
    micro_batches: int,
    length: int,
    patches: int = 0,
    num_chunks: int = 1,
) -> None:
    """Refuses a mesh over which the model or a step does not split evenly.

    Raises:
        ValueError: names the view, all sizes that it does not divide, and the nearest values that
            would do.
    """
    # All checks are on the host and by numbers: a mesh of thousands of ranks is refused at once.
    _divides("mesh.tp", mesh.tp, _tensor_parallel(cfg))
    counts, widths = _expert_parallel(cfg)
    if counts:
        # ranks of tp that do not hold other experts split the width of each
        expert_width_ranks = math.prod(a.size for a in mesh.axes().etp)
        _divides("mesh.ep", mesh.ep, counts)
        _divides("mesh.tp without the ranks of mesh.ep", expert_width_ranks, widths)
    _check_kinds(mesh, cfg)
    if mesh.pp > 1:
        _check_stages(mesh, cfg, micro_batches, num_chunks)
    # tp too: between the layers its ranks split the tokens (Sharding.sequence)
    _multiple("length", length, {"mesh.cp": mesh.cp, "mesh.tp": mesh.tp})
    if patches:
        _multiple(
            "data.patches",
            patches,
            {"mesh.cp": mesh.cp, "mesh.tp": mesh.tp, "2 x 2 patches": MERGE**2},
        )
    _multiple(
        "batch_size",
        batch_size,
        {"mesh.dp": mesh.dp, "mesh.fsdp": mesh.fsdp, "micro_batches": micro_batches},
    )
    if mesh.cp > 1:
        _check_halos(mesh, cfg, length)


def check_placement(mesh: Mesh, cfg: model.Config) -> None:
    """Refuses MoonEP on one rank, and with so few slots that it would end the run.

    For the mesh of a run, not for that of a config file, which the command line may change.

    Raises:
        ValueError: names the field, and what would do.
    """
    for name in cfg.used():
        config = cfg.sublayers[name]
        kind = kinds.kind_of(config)
        if not isinstance(kind, ChannelMixer) or kind.experts is None:
            continue
        experts = kind.experts(config)
        if experts.placement == "plain":
            continue
        if mesh.ep == 1:
            raise ValueError(
                f"mesh.ep=1 with model.{name}.placement={experts.placement!r}: one rank has no "
                "other to compute its experts; set mesh.ep to 2 or more, or the placement to "
                "'plain'"
            )
        needed = _slots_of_collapse(experts, mesh.ep)
        if 0 < experts.slots < needed:
            raise ValueError(
                f"model.{name}.slots={experts.slots} on mesh.ep={mesh.ep}: a rank needs {needed} "
                f"when all tokens choose the same {experts.top_k} experts; set it to {needed} or "
                "more, or to 0, which suffices for any routes"
            )


def _slots_of_collapse(experts: Experts, num_ranks: int) -> int:
    """Slots that a rank needs when a router has collapsed: what MoonEP must be able to bear."""
    counts = torch.zeros(num_ranks, experts.num_experts, dtype=torch.int64)
    counts[:, : experts.top_k] = 1
    plan = make_plan(counts, experts.top_k, experts.num_experts // num_ranks)
    return int((plan.slots >= 0).sum(1).max())


def _check_kinds(mesh: Mesh, cfg: model.Config) -> None:
    """Refuses views over which a kind of layer of the model does not know how to work."""
    for name in cfg.used():
        kind = kinds.sublayer_of(cfg.sublayers[name])
        for view in ("tp", "cp"):
            ranks = getattr(mesh, view)
            if ranks > 1 and view not in kind.splits:
                can = ", ".join(sorted(kind.splits)) or "none"
                raise ValueError(
                    f"mesh.{view}={ranks}: layers of kind {kind.name} (model.{name}) do not split "
                    f"over {view}; set mesh.{view}=1, or split rows (mesh.dp, mesh.fsdp), layers "
                    f"(mesh.pp) or what they can ({can})"
                )


def _check_halos(mesh: Mesh, cfg: model.Config, length: int) -> None:
    """Refuses slices of the context that are shorter than what a neighbour reads of them."""
    for name in cfg.used():
        config = cfg.sublayers[name]
        kind = kinds.sublayer_of(config)
        halo = kind.halo(config) if isinstance(kind, TokenMixer) and kind.halo else None
        if halo is None or length // mesh.cp >= halo.tokens:
            continue
        fitting = [n for n in divisors(length) if length // n >= halo.tokens]
        raise ValueError(
            f"mesh.cp={mesh.cp} leaves a rank {length // mesh.cp} of length={length} tokens, "
            f"fewer than the {halo.tokens} that {halo.reader} of "
            f"model.{name}.{halo.field}={getattr(config, halo.field)} looks back; "
            f"nearest: {nearest(mesh.cp, fitting)}"
        )


def check_split(mesh: Mesh, cfg: model.Config) -> None:
    """Refuses an ``fsdp`` of whose ranks each would hold most of the model.

    For the model of a run, not for a few of its layers, of which less may split than of all.

    Raises:
        ValueError: names the ranks, the share that they split, and the nearest values that split
            half or more.
    """
    weights = _distinct_weights(cfg)
    share = _share(mesh, weights)
    if share >= _LEAST_SHARE:
        return
    fitting = []
    # each try costs some milliseconds: of a mesh of thousands only sizes near its own are tried
    first = max(1, mesh.fsdp - _TRIES)
    powers = [n for n in _POWERS_OF_TWO if n < first]
    for n in (*powers, *range(first, min(2 * mesh.fsdp, mesh.fsdp + _TRIES) + 1)):
        try:
            other = dataclasses.replace(mesh, fsdp=n)
        except ValueError:
            continue  # mesh.ep, which lies inside of fsdp and the others, does not fit it
        if n not in fitting and _share(other, weights) >= _LEAST_SHARE:
            bisect.insort(fitting, n)
    ranks = f"mesh.fsdp={mesh.fsdp}"
    if mesh.cp > 1:
        ranks += f" x mesh.cp={mesh.cp} = {mesh.fsdp * mesh.cp}"
    raise ValueError(
        f"{ranks} splits {share:.1%} of the parameters: each of its ranks holds all of a weight "
        "of which it divides no size, and at least half must be split; nearest: mesh.fsdp "
        f"{nearest(mesh.fsdp, fitting)}"
    )


def split_share(mesh: Mesh, cfg: model.Config) -> float:
    """The share of the parameters of which each rank of ``fsdp`` holds a part of its own; 1 without
    ``fsdp``.
    """
    return _share(mesh, _distinct_weights(cfg))


def _distinct_weights(cfg: model.Config) -> dict[str, tuple[ParamSpec, int]]:
    """Each declaration of the model's weights, by the path of the first that has it, and how many
    have it.
    """
    # layers of one kind have equal declarations: a hundred layers cost as much as one of each
    specs = model.specs(cfg)
    leaves = tree.leaves(specs)
    counts = Counter(leaves)
    weights: dict[str, tuple[ParamSpec, int]] = {}
    # popped: a declaration that comes again has been counted under its first path
    for path, spec in zip(tree.paths(specs), leaves, strict=True):
        if spec in counts:
            weights[path] = (spec, counts.pop(spec))
    return weights


def _share(mesh: Mesh, weights: Mapping[str, tuple[ParamSpec, int]]) -> float:
    axes = mesh.axes()
    wanted = {axis.name for axis in axes.fsdp}
    split = total = 0
    # by path, which is how an error of partition names a weight
    partitions = partition({path: spec for path, (spec, _) in weights.items()}, AxisRules(), mesh)
    for path, (spec, count) in weights.items():
        dims = resolve(partitions[path], axes, len(spec.shape))
        names = {axis.name for axis in itertools.chain.from_iterable(dims)}
        size = count * spec.numel
        total += size
        # over all of fsdp's axes: split over a part of them, ranks of the rest hold the same
        if wanted <= names:
            split += size
    return split / total


def _check_stages(mesh: Mesh, cfg: model.Config, micro_batches: int, num_chunks: int) -> None:
    if mesh.pp * num_chunks > cfg.num_layers:
        fitting = cfg.num_layers // num_chunks
        raise ValueError(
            f"mesh.pp={mesh.pp} x pipeline.num_chunks={num_chunks} stages are more than "
            f"model.num_layers={cfg.num_layers}: a stage has a layer at least; nearest: mesh.pp "
            f"{max(fitting, 1)}"
        )
    if num_chunks > 1:  # an interleaved schedule takes micro-batches in groups of as many
        _multiple("micro_batches", micro_batches, {"mesh.pp": mesh.pp})
    if cfg.num_mtp_layers:
        raise ValueError(
            f"mesh.pp={mesh.pp} with model.mtp={cfg.mtp}: that layer reads the embedding, which "
            "the last stage does not have; set mesh.pp=1 or mtp=()"
        )


def _tensor_parallel(cfg: model.Config) -> dict[str, int]:
    """Sizes that tensor parallelism splits, by the path of their field in the recipe."""
    # the embedding and the head are split by tokens of the vocabulary
    sizes = {"model.vocab_size": cfg.vocab_size}
    for name in cfg.used():
        config = cfg.sublayers[name]
        for field, size in kinds.sublayer_of(config).tensor_parallel(config).items():
            sizes[f"model.{name}.{field}"] = size
    if not isinstance(cfg.vision, tuple):
        sizes["model.vision.block.num_heads"] = cfg.vision.block.num_heads
        sizes["model.vision.block.intermediate_size"] = cfg.vision.block.intermediate_size
        sizes["model.vision.output_size"] = cfg.vision.output_size
    return sizes


def _expert_parallel(cfg: model.Config) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers of experts, and their widths, of the layers that have any."""
    counts, widths = {}, {}
    for name in cfg.used():
        config = cfg.sublayers[name]
        kind = kinds.kind_of(config)
        if isinstance(kind, ChannelMixer) and kind.experts is not None:
            experts = kind.experts(config)
            counts[f"model.{name}.num_experts"] = experts.num_experts
            widths[f"model.{name}.expert_size"] = experts.expert_size
    return counts, widths


def _divides(view: str, ranks: int, sizes: Mapping[str, int]) -> None:
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % ranks]
    if not wrong:
        return
    # what divides all sizes, not only the wrong ones, or the next try would fail at another
    fitting = divisors(math.gcd(*sizes.values()))
    raise ValueError(
        f"{view}={ranks} does not divide {', '.join(wrong)}; nearest: {nearest(ranks, fitting)}"
    )


def _multiple(name: str, size: int, pieces: Mapping[str, int]) -> None:
    """``size`` must be a multiple of the product of ``pieces``; says what would do of each and of
    the size.
    """
    product = math.prod(pieces.values())
    if size % product == 0:
        return
    shown = []
    fixes = []
    for piece, n in pieces.items():
        shown.append(f"{piece}={n}")
        # one piece is changed and the others stay, if that can help
        rest = product // n
        if n > 1 and size % rest == 0:
            fixes.append(f"{piece} {nearest(n, divisors(size // rest))}")
    below, above = size // product * product, -(-size // product) * product
    near = f"{below}, {above}" if below else f"{above}"  # 0 is no size
    fixes.append(f"{name} {near}")
    raise ValueError(
        f"{' x '.join(shown)} = {product} does not divide {name}={size}; nearest: "
        f"{' or '.join(fixes)}"
    )
