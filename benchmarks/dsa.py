"""The core of a Gated DSA layer: choice of keys, attention to them, teacher and loss of the
indexer, beside cuDNN's dense attention, flex_attention with the set as its mask, and plain torch.
``gathered``: attention and teacher in the absorbed form, without the products that absorb.

One run: errors against float64 and twenty repeats first, then for each length and kind of index
scores a row per part and implementation, forward and forward + backward. ``random``: every query
scores anew; ``alike``: index queries drift, so that neighbours choose much alike, and how much is
printed. ``--tune`` times other tiles. ``python -m benchmarks.dsa --json
benchmarks/results/dsa.json``, on a CUDA device.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.dsa_peers import cudnn_dense, flex_chosen
from benchmarks.kda import peak
from benchmarks.measure import Row, cuda_device, error, graphed, take_turns, write_json
from benchmarks.op import variants
from k31fn import device as devices
from k31fn.autodiff import vjp
from k31fn.kernels.attention import attention
from k31fn.kernels.indexer import index_topk
from k31fn.kernels.indexer_kl import indexer_kl
from k31fn.kernels.latent_attention import latent_attention, latent_probs
from k31fn.kernels.registry import use_impl
from k31fn.kernels.sparse_attention import head_probs, sparse_attention

__all__ = ["main"]

N, P, V = 128, 64, 128
RANK = 512  # of the latent
INDEX_HEADS, INDEX_DIM = 32, 128
SCALE, INDEX_SCALE = (N + P) ** -0.5, INDEX_DIM**-0.5
KINDS = ("random", "alike")
PARTS = ("index_topk", "sparse_attention", "attention", "head_probs", "indexer_kl", "core")
NAMES = ("fused", "gathered", "plain", "cudnn", "flex")
GRAPHED = ("fused", "cudnn")  # a capture that fails would end the whole run
PLAIN_AT_MOST = 4096  # tokens: more would take seconds and say nothing new
OPS = ("index_topk", "sparse_attention", "attention", "head_probs", "indexer_kl")
OPS += ("latent_attention", "latent_probs")
TUNED = (
    {"warps": (4, 8), "rows": (64, 128), "columns": (64, 128), "stages": (2, 3)},
    {"warps": (4, 8), "rows": (64, 128), "columns": (32, 64), "stages": (1, 2)},
    {"warps": (4, 8), "rows": (32, 64), "columns": (64, 128), "stages": (1, 2)},
)
"""What ``--tune`` times of the attention's forward, its queries' and its keys' gradients."""

Function = Callable[..., Any]
Work = Callable[[], Any]


class Inputs(NamedTuple):
    """Of a layer's core: what the attention and the indexer take."""

    heads: list[Tensor]
    latents: list[Tensor]
    indexer: list[Tensor]
    start: Tensor
    stop: Tensor


def draw(tokens: int, heads: int, kind: str, where: torch.device) -> Inputs:
    """One document in bfloat16; head weights of the indexer in float32."""

    def low(*shape: int) -> Tensor:
        return torch.randn(shape, device=where).bfloat16()

    shapes = (heads, N + P), (heads, N), (P,), (heads, V)
    of_heads = [low(1, tokens, *shape) for shape in shapes]
    q, w = low(1, tokens, INDEX_HEADS, INDEX_DIM), torch.rand(1, tokens, INDEX_HEADS, device=where)
    if kind == "alike":
        # a new direction each 256 queries, and some of one's own
        held = torch.arange(tokens, device=where) // 256 * 256
        q = (q[:, held].float() + 0.3 * q.float()).bfloat16()
        w = w[:, held]
    stop = torch.arange(1, tokens + 1, device=where)[None]
    index = [q, low(1, tokens, INDEX_DIM), w * INDEX_HEADS**-0.5]
    # scores as large as those of the heads
    latents = [low(1, tokens, heads, RANK + P) * 0.5, low(1, tokens, RANK + P)]
    return Inputs(of_heads, latents, index, torch.zeros_like(stop), stop)


def by(impl: str, op: Function, *numbers: Any) -> Function:
    """The op by one implementation of all, with numbers behind its tensors."""

    def run(*xs: Tensor) -> Any:
        with use_impl(**dict.fromkeys(OPS, impl)):
            return op(*xs, *numbers)

    return run


def core(impl: str, x: Inputs, topk: int) -> Function:
    """All of it: the output, and the loss of the indexer."""

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, k, shared, v, *index = leaves
        with use_impl(**dict.fromkeys(OPS, impl)):
            chosen = index_topk(*index, x.start, x.stop, topk, INDEX_SCALE)
            out, lse = sparse_attention(q, k, shared, v, chosen, SCALE)
            teacher = head_probs(q, k, shared, lse, chosen, SCALE) / q.shape[2]
            return out, indexer_kl(*index, teacher, chosen, INDEX_SCALE)

    return run


def gathered_core(x: Inputs, topk: int) -> Function:
    """The same with latents in place of keys and values by head."""

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, kv, *index = leaves
        with use_impl(**dict.fromkeys(OPS, "triton")):
            chosen = index_topk(*index, x.start, x.stop, topk, INDEX_SCALE)
            out, lse = latent_attention(q, kv, chosen, SCALE, RANK)
            teacher = latent_probs(q, kv, lse, chosen, SCALE) / q.shape[2]
            return out, indexer_kl(*index, teacher, chosen, INDEX_SCALE)

    return run


def both(f: Function, xs: Sequence[Tensor]) -> list[Tensor]:
    """Values, and gradients for cotangents of ones."""
    out, pull = vjp(f, *xs)
    cts = torch.ones_like(out) if isinstance(out, Tensor) else type(out)(map(torch.ones_like, out))
    return [*([out] if isinstance(out, Tensor) else out), *pull(cts)]


def errors(kind: str, where: torch.device, runs: int = 20) -> dict[str, float]:
    """Of the core's values and gradients at 700 tokens of 3 heads, against float64 on the sets that
    the kernels chose; and how many of those are not the reference's.

    Raises:
        AssertionError: two runs differ in a bit.
    """
    x = draw(700, 3, kind, where)
    leaves = [*x.heads, *x.indexer]
    fused = core("triton", x, 96)
    ours = both(lambda *xs: tuple(fused(*xs)), leaves)
    for _ in range(runs):
        again = both(lambda *xs: tuple(fused(*xs)), leaves)
        assert all(map(torch.equal, ours, again)), "two runs differ"
    arguments = (*x.indexer, x.start, x.stop, 96, INDEX_SCALE)
    chosen = by("triton", index_topk)(*arguments)
    wide = [a.double() for a in leaves]
    with mock.patch(f"{__name__}.index_topk", return_value=chosen):
        exact = both(lambda *xs: tuple(core("reference", x, 96)(*xs)), wide)
    names = ("out", "kl", "dq", "dk", "dshared", "dv", "dq index", "dk index", "dw index")
    found = {n: error(a, b) for n, a, b in zip(names, ours, exact, strict=True)}
    other = index_topk.reference(*arguments)
    found["keys chosen otherwise"] = float((chosen != other).double().mean())
    dense = by("triton", attention, x.start, x.stop, SCALE)
    ours = both(dense, x.heads)
    exact = both(by("reference", attention, x.start, x.stop, SCALE), wide[:4])
    found["dense, worst"] = max(map(error, ours, exact))
    return found


def overlap(chosen: Tensor, group: int) -> float:
    """Keys in the union of ``group`` neighbouring queries' sets over those of one, on the second
    half of the row.
    """
    tokens, slots = chosen.shape[1:]
    groups = chosen[0, tokens // 2 :].split(group)[:8]
    sizes = [int(some[some >= 0].unique().numel()) for some in groups]
    return sum(sizes) / len(sizes) / slots


def functions(x: Inputs, topk: int, names: Sequence[str]) -> Iterator[tuple[str, str, Any, Any]]:
    """Part, implementation, function, and the tensors that it takes and differentiates."""
    bounds = (x.start, x.stop)
    chosen = index_topk.reference(*x.indexer, *bounds, topk, INDEX_SCALE)
    for group in (2, 16, 64):
        print(f"union of {group} neighbouring sets over one: {overlap(chosen, group):.2f}")
    # by the references: a kernel that fails is to be one row without numbers
    with torch.no_grad():
        lse = by("reference", sparse_attention)(*x.heads, chosen, SCALE).lse
        teacher = by("reference", head_probs)(*x.heads[:3], lse, chosen, SCALE)
        teacher = teacher / x.heads[0].shape[2]
    for name, impl in (("fused", "triton"), ("plain", "reference")):
        if name not in names or (name == "plain" and chosen.shape[1] > PLAIN_AT_MOST):
            continue
        numbers = (*bounds, topk, INDEX_SCALE)
        yield "index_topk", name, by(impl, index_topk, *numbers), x.indexer
        of_sets = by(impl, lambda *a: sparse_attention(*a).out, chosen, SCALE)
        yield "sparse_attention", name, of_sets, x.heads
        yield "attention", name, by(impl, attention, *bounds, SCALE), x.heads
        yield "head_probs", name, by(impl, head_probs, lse, chosen, SCALE), x.heads[:3]
        yield "indexer_kl", name, by(impl, indexer_kl, teacher, chosen, INDEX_SCALE), x.indexer
        yield "core", name, core(impl, x, topk), [*x.heads, *x.indexer]
    if "gathered" in names:
        of_latents = by("triton", lambda *a: latent_attention(*a, chosen, SCALE, RANK).out)
        yield "sparse_attention", "gathered", of_latents, x.latents
        # its statistics are made in the run: few numbers, and no reference holds T x T
        with torch.no_grad():
            lse = by("triton", latent_attention, chosen, SCALE, RANK)(*x.latents).lse
        of_statistics = by("triton", latent_probs, lse, chosen, SCALE)
        yield "head_probs", "gathered", of_statistics, x.latents
        yield "core", "gathered", gathered_core(x, topk), [*x.latents, *x.indexer]
    q, k, shared, v = x.heads
    whole = torch.cat([k, shared[:, :, None].expand(-1, -1, k.shape[2], -1)], -1)
    heads_first = [a.transpose(1, 2).contiguous() for a in (q, whole, v)]
    if "cudnn" in names:
        yield "attention", "cudnn", cudnn_dense(SCALE), heads_first
    if "flex" in names:
        yield "sparse_attention", "flex", flex_chosen(chosen, SCALE), heads_first


def rows_of(tokens: int, args: argparse.Namespace, kind: str, where: torch.device) -> Iterator[Row]:
    """A row for each part and implementation, as called and from a graph."""
    x = draw(tokens, args.heads, kind, where)
    shape = f"T{tokens} H{args.heads} top{args.topk} {kind}"
    for part, name, f, xs in functions(x, args.topk, args.names):
        if part not in args.parts:
            continue
        one_way = part in ("index_topk", "head_probs")
        works: dict[str, Work] = {"forward": lambda f=f, xs=xs: f(*xs)}
        if not one_way:
            works["both"] = lambda f=f, xs=xs: both(f, xs)
        label = f"{part} {name}"
        try:
            most = peak(list(works.values())[-1], where)
            if name in GRAPHED:
                for way, work in list(works.items()):
                    works[f"{way}, graph"] = graphed(work, where)
            repeats = args.repeats if name != "plain" else 3
            times = take_turns({way: [work] for way, work in works.items()}, where, repeats)
        except Exception as e:  # a part that fails is a row that says so, and the others go on
            note = f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"
            nothing = float("nan")
            yield Row(shape, label, nothing, nothing, nothing, nothing, 0, note)
            continue
        for form in ("", ", graph") if name in GRAPHED else ("",):
            forward = times[f"forward{form}"]
            whole = times.get(f"both{form}", float("nan"))
            nothing = float("nan")
            yield Row(shape, f"{label}{form}", forward, whole, nothing, nothing, most)


def tune(tokens: int, args: argparse.Namespace, where: torch.device) -> None:
    """Prints the best tiles of each attention kernel, on random sets."""
    from k31fn.kernels.attention.triton import op  # not there without triton

    x = draw(tokens, args.heads, "random", where)
    chosen = index_topk.reference(*x.indexer, x.start, x.stop, args.topk, INDEX_SCALE)
    attend = by("triton", lambda *a: sparse_attention(*a).out, chosen, SCALE)
    found: dict[int, list[tuple[float, str]]] = {0: [], 1: [], 2: []}
    for position, tile, tiles in variants(op, ("cuda", 2), TUNED):  # pyright: ignore[reportArgumentType]
        work = (lambda: attend(*x.heads)) if position == 0 else (lambda: both(attend, x.heads))
        with mock.patch.dict(op._TILES, {("cuda", 2): tiles}):
            try:
                milliseconds = take_turns({"": [work]}, where, 5)[""]
            except Exception as e:  # too much shared memory: not a candidate
                print(f"  {tile}: {type(e).__name__}: {str(e).splitlines()[0][:80]}", flush=True)
                continue
        found[position].append((milliseconds, str(tile)))
    for position, some in found.items():
        for milliseconds, tile in sorted(some)[:3]:
            print(f"T{tokens} tile {position}: {milliseconds:.3f} ms  {tile}", flush=True)


def main() -> int:
    """Prints a table, writes the JSON file anew after each row, and returns 1 if the check of
    numbers failed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    torch.manual_seed(0)
    off: dict[str, dict[str, float]] = {}
    failed = False
    for kind in args.kinds:
        try:
            off[kind] = errors(kind, where)
            print(kind, ", ".join(f"{name} {x:.1e}" for name, x in off[kind].items()), flush=True)
        except Exception:  # the times of the parts that run are wanted all the same
            failed = True
            traceback.print_exc()
    rows: list[Row] = []
    for tokens in args.tokens:
        if args.tune:
            tune(tokens, args, where)
        for kind in args.kinds:
            for row in rows_of(tokens, args, kind, where):
                rows.append(row)
                print(
                    f"{row.shape:28} {row.name:32} fwd {row.forward:9.3f} ms  both "
                    f"{row.both:9.3f} ms  peak {row.peak_bytes / 2**20:7.0f} MiB {row.note}",
                    flush=True,
                )
                write_json(args.json, "dsa", where, rows, {"errors": off})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
