"""Whole attention layers of K3.1 and K3, forward and backward, beside their products alone; and the
vision tower by fused and by plain attention.

``python -m benchmarks.dsa_layer --json benchmarks/results/dsa_layer.json``, on a CUDA device. Of a
layer: Gated DSA with its loss and Gated MLA; gradients of all parameters and of the input; each of
its products alone, forward and for its gradients, and cuDNN's dense causal attention, in the same
run. Launches are those that the device saw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.dsa import SCALE, N, P, V
from benchmarks.dsa_peers import cudnn_dense
from benchmarks.kda import peak as peak_bytes
from benchmarks.kda_layer import Product, kernels, product_times
from benchmarks.measure import Row, cuda_device, graphed, take_turns, write_json
from k31fn import device as devices
from k31fn import params, random, tree
from k31fn.kernels.registry import use_impl
from k31fn.layers import dsa, indexer, mla, vision, vision_block
from k31fn.layers.patches import from_grids
from k31fn.segments import whole

__all__ = ["main"]

HIDDEN, HEADS, RANK, LATENT = 7168, 96, 1536, 512
IMAGES, SIDE = 16, 32
NOTHING = float("nan")
Loss = Callable[[Any, Tensor], Tensor]


def configs() -> dict[str, Any]:
    """Gated DSA and Gated MLA."""
    attention = mla.Config(HIDDEN, HEADS, RANK, LATENT, N, P, V)
    sparse = dsa.Config(attention, indexer.Config(HIDDEN, RANK))
    return {"Gated DSA": sparse, "Gated MLA": attention}


def layer_of(cfg: Any, tokens: int, where: torch.device) -> tuple[Loss, Any, Tensor]:
    """A scalar of the layer's output and of its loss, its parameters and an input."""
    module: Any = dsa if isinstance(cfg, dsa.Config) else mla
    packing = whole(1, tokens, device=where)
    p = params.init(module.specs(cfg), random.key(0, device=where), dtype=torch.bfloat16)
    x = torch.randn(1, tokens, HIDDEN, device=where).bfloat16()

    def loss(p: Any, x: Tensor) -> Tensor:
        out = module.apply(p, x, cfg, segments=packing)
        kl = out.aux.kl if isinstance(cfg, dsa.Config) else 0.0
        return out.y.sum(dtype=torch.float32) + kl

    return loss, p, x


def tower_of(where: torch.device) -> tuple[Loss, Any, Tensor]:
    """The same of the tower, on images of a size."""
    block = vision_block.Config(1024, 12, 128, 4096)
    cfg = vision.Config(block, num_layers=27)
    patches = from_grids([[(1, SIDE, SIDE)] * IMAGES], IMAGES * SIDE**2, device=where)
    p = params.init(vision.specs(cfg), random.key(0, device=where), dtype=torch.bfloat16)
    pixels = torch.randn(1, IMAGES * SIDE**2, cfg.pixels_per_patch, device=where).bfloat16()

    def loss(p: Any, x: Tensor) -> Tensor:
        return vision.apply(p, x, cfg, patches=patches).sum(dtype=torch.float32)

    return loss, p, pixels


def both(loss: Loss, p: Any, x: Tensor) -> Callable[[], Any]:
    """Value and gradients of all parameters and of the input."""
    leaves, structure = tree.flatten((p, x))

    def run() -> Any:
        wanted = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(*tree.unflatten(structure, wanted))
        return value.detach(), torch.autograd.grad(value, wanted, allow_unused=True)

    return run


def products(p: Any, x: Tensor) -> list[Product]:
    """All products of a layer with its weights: one forward, two backward; of the indexer's one,
    since its inputs receive no gradient.
    """
    rows = len(x[0])
    found: list[Product] = []
    for path, w in zip(tree.paths(p), tree.leaves(p), strict=True):
        if w.ndim < 2:
            continue
        given, grad = (torch.randn(rows, n, device=w.device).to(w.dtype) for n in w.shape)
        found += [Product(path, given, w), Product(f"{path}, of itself", given.mT, grad)]
        if "indexer" not in path:
            found.append(Product(f"{path}, of its input", grad, w.mT))
    return found


def cudnn(tokens: int, where: torch.device, repeats: int) -> float:
    """Milliseconds of cuDNN's dense causal attention, forward and backward, from a graph."""
    shapes = [(1, HEADS, tokens, n) for n in (N + P, N + P, V)]
    xs = [torch.randn(s, device=where).bfloat16() for s in shapes]
    attend = cudnn_dense(SCALE)
    ct = torch.randn_like(xs[2])

    def work() -> Any:
        leaves = [x.detach().requires_grad_() for x in xs]
        return torch.autograd.grad(attend(*leaves), leaves, ct)

    return take_turns({"": [graphed(work, where)]}, where, repeats)[""]


def measured(
    shape: str, name: str, work: Callable[[], Any], where: torch.device, repeats: int
) -> tuple[list[Row], dict[str, Any]]:
    """As called and from a graph, and what the device ran; of plain torch one call, which takes
    seconds.
    """
    most = peak_bytes(work, where)
    ran = kernels(work, where)
    note = f"{sum(n for n, _ in ran.values())} launches"
    works = {name: [work]}
    if name.endswith("plain"):
        repeats = 1
    else:
        works[f"{name}, graph"] = [graphed(work, where)]
    rows = []
    for form, ms in take_turns(works, where, repeats).items():
        rows.append(Row(shape, form, NOTHING, ms, NOTHING, NOTHING, most, note))
    return rows, ran


def main() -> int:
    """Prints a table and what the device ran, and writes the JSON file anew after each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    torch.manual_seed(0)
    core = cudnn(args.tokens, where, args.repeats)
    print(f"cuDNN dense, T{args.tokens}: {core:.3f} ms", flush=True)
    rows: list[Row] = []
    extra: dict[str, Any] = {"cudnn": core, "kernels": {}, "products": {}}

    def add(shape: str, name: str, work: Callable[[], Any]) -> None:
        some, extra["kernels"][name] = measured(shape, name, work, where, args.repeats)
        rows.extend(some)
        for row in some:
            mib = row.peak_bytes / 2**20
            print(f"{shape} {row.name:28} {row.both:9.3f} ms {mib:7.0f} MiB {row.note}", flush=True)
        for kernel, (count, ms) in list(extra["kernels"][name].items())[:12]:
            print(f"  {count:3} {ms:9.4f}  {kernel}", flush=True)
        write_json(args.json, "DSA layer", where, rows, extra)

    for name, cfg in configs().items():
        loss, p, x = layer_of(cfg, args.tokens, where)
        times = product_times(products(p, x), where, args.repeats)
        extra["products"][name] = times
        print(f"{name}: products alone {sum(times.values()):.3f} ms", flush=True)
        add(f"T{args.tokens} H{HEADS} D{HIDDEN}", name, both(loss, p, x))
        del loss, p, x
        torch.cuda.empty_cache()
    work = both(*tower_of(where))
    for name in ("fused", "plain"):
        impl = "triton" if name == "fused" else "reference"
        with use_impl(interval_attention=impl):
            add(f"{IMAGES} images of {SIDE**2} patches", f"tower, {name}", work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
