"""A step of an optimiser on a GPU: time against its bytes or products, and its memory.

``python -m benchmarks.optimizer_step --device cuda``: the parameters of a model of four layers with
32 experts (9.3 G, bfloat16), gradients and moments in bfloat16, random values.

AdamW steps with its parameters rounded stochastically, from a CUDA graph and launch by launch,
beside torch's fused AdamW on the same parameters and gradients, which rounds to nearest. Muon steps
the matrices; beside it stand the products of Newton-Schulz alone, of the same shapes. The floor is
the time of the bytes that must move at 4.3 TB/s, or of those products. Peaks are measured, over
what was there before the step: parameters, gradients and state.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import Row, cuda_device, graphed, take_turns, write_json
from k31fn import config, device, model, optim, tree
from k31fn.kernels.adamw import Constants, adamw_step

BYTES_PER_SECOND = 4.3e12
BF16 = torch.bfloat16
muon_module = importlib.import_module("k31fn.optim.muon")  # the package's name is the function's


def specs_of(num_layers: int, num_experts: int) -> Any:
    """Three quarters of the layers are KDA, one quarter is full attention."""
    pro = config.load("configs/k31_pro.py")
    experts = dataclasses.replace(pro.sublayers["moe"], num_experts=num_experts)
    kinds = ["full_attention" if i % 4 == 3 else "kda" for i in range(num_layers)]
    layers = tuple((kind, "moe") for kind in kinds)
    return model.specs(dataclasses.replace(pro.with_sublayers(moe=experts), layers=layers))


def draw(specs: Any, where: torch.device, scale: float) -> Any:
    """A tree of random values in the dtypes of a model in bfloat16."""

    def leaf(spec: Any) -> Tensor:
        x = torch.empty(spec.shape, dtype=spec.dtype, device=where)
        return x.normal_(0, scale)

    return tree.map(leaf, specs)


def moved(params: Any, *others: Any) -> int:
    """Bytes of reading ``params`` and all others, and of writing all but the first of those."""
    read = sum(x.nbytes for x in tree.leaves((params, *others)))
    return read + sum(x.nbytes for x in tree.leaves((params, *others[1:])))


def peak_over(work: Callable[[], Any], where: torch.device) -> int:
    """Bytes that a call takes beyond those that are held before it."""
    device.synchronize(where)
    before = device.memory_allocated(where)
    device.reset_peak_memory(where)
    work()
    device.synchronize(where)
    return device.peak_memory(where) - before


def row(name: str, shape: str, ms: float, floor: float, peak: int, note: str = "") -> Row:
    """A row of one pass, which is printed."""
    print(
        f"{shape:24} {name:22} {ms:9.3f} ms, {ms / floor:5.2f} times its floor of {floor:8.3f} ms, "
        f"peak {peak / 2**20:8.1f} MiB {note}",
        flush=True,
    )
    return Row(shape, name, ms, ms, floor, floor, peak, note)


def adamw_rows(specs: Any, params: Any, grads: Any, where: torch.device, repeats: int) -> list[Row]:
    """AdamW, clipping's pass, and the peer."""
    shape = f"{sum(x.numel() for x in tree.leaves(params)) / 1e9:.1f} G parameters"
    transform = optim.rounded(optim.adamw(specs, storage=optim.Storage(BF16)), specs, 0)
    state = transform.init(params)
    scale = torch.full((), 0.5, device=where)
    skip = torch.zeros((), dtype=torch.bool, device=where)
    lr = device.number(1e-6, where)

    def step() -> Any:
        return transform.update(grads, state, params, lr=lr, scale=scale, skip=skip, donate=True)

    def norm() -> Tensor:
        return optim.global_norm(grads)

    step()
    peak = peak_over(step, where)
    norm_peak = peak_over(norm, where)
    times = take_turns(
        {
            "eager": [step],
            "graph": [graphed(step, where)],
            "norm": [norm],
            "norm, graph": [graphed(norm, where)],
        },
        where,
        repeats,
    )
    floor = 1e3 * moved(params, grads, state.inner.mu, state.inner.nu) / BYTES_PER_SECOND
    norm_floor = 1e3 * sum(x.nbytes for x in tree.leaves(grads)) / BYTES_PER_SECOND
    rows = [
        row("fused, graph", f"AdamW, {shape}", times["graph"], floor, peak, "rounded"),
        row("fused", f"AdamW, {shape}", times["eager"], floor, peak, "rounded"),
        row("fused, graph", f"norm, {shape}", times["norm, graph"], norm_floor, norm_peak),
        row("fused", f"norm, {shape}", times["norm"], norm_floor, norm_peak),
    ]
    del state
    return [*rows, peer_row(params, grads, where, repeats, floor, f"AdamW, {shape}")]


def peer_row(
    params: Any, grads: Any, where: torch.device, repeats: int, floor: float, shape: str
) -> Row:
    """torch's fused AdamW."""
    leaves = tree.leaves(params)
    for p, g in zip(leaves, tree.leaves(grads), strict=True):
        p.grad = g
    peer = torch.optim.AdamW(leaves, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    peer.step()
    peak = peak_over(peer.step, where)
    ms = take_turns({"peer": [peer.step]}, where, repeats)["peer"]
    for p in leaves:
        p.grad = None
    return row("eager", shape, ms, floor, peak, "torch.optim.AdamW(fused=True), to nearest")


def leaf_rows(where: torch.device, repeats: int) -> list[Row]:
    """The kernel alone on one leaf, in the dtypes that it takes."""
    rows = []
    for p_dtype, other in ((torch.float32, BF16), (torch.float32, torch.float32)):
        p = torch.randn(32, 3584, 3072, device=where).to(p_dtype)
        g, mu, nu = (torch.rand_like(p).to(other) for _ in range(3))
        step = torch.ones((), device=where)
        lr = torch.full((), 1e-6, device=where)

        def work(x: tuple[Tensor, ...] = (p, g, mu, nu, step, lr)) -> Any:
            return adamw_step(*x, Constants(0.9, 0.95, 1e-8, 0.1))

        ms = take_turns({"leaf": [graphed(work, where)]}, where, repeats)["leaf"]
        floor = 1e3 * moved(p, g, mu, nu) / BYTES_PER_SECOND
        name = f"AdamW, experts 32, float32 with {str(other).removeprefix('torch.')}"
        rows.append(row("fused, graph", name, ms, floor, peak_over(work, where)))
    return rows


def muon_rows(specs: Any, params: Any, grads: Any, where: torch.device, repeats: int) -> list[Row]:
    """Muon on the matrices, against the products of Newton-Schulz."""
    transform = optim.rounded(optim.muon(specs, storage=optim.Storage(BF16)), specs, 0)
    state = transform.init(params)
    lr = device.number(1e-6, where)
    shapes: list[torch.Size] = []
    plain = muon_module.orthogonalize

    def noting(x: Tensor, **how: Any) -> Tensor:
        shapes.append(x.shape)
        return plain(x, **how)

    def step() -> Any:
        return transform.update(grads, state, params, lr=lr, donate=True)

    with mock.patch.object(muon_module, "orthogonalize", noting):
        noted = optim.rounded(optim.muon(specs, storage=optim.Storage(BF16)), specs, 0)
        noted.update(grads, state, params, lr=lr, donate=True)
    peak = peak_over(step, where)
    made = {
        s: torch.randn(s[0], *sorted(s[1:]), dtype=BF16, device=where) / 64 for s in set(shapes)
    }
    drawn = [made[s] for s in shapes]
    floor = take_turns({"all": [lambda: products(drawn)]}, where, repeats)["all"]
    del made, drawn
    ms = take_turns({"step": [step]}, where, repeats)["step"]
    stepped = sum(x.numel() for x in tree.leaves(state.inner.momentum)) / 1e9
    return [row("fused", f"Muon, {stepped:.1f} G parameters", ms, floor, peak)]


def products(batches: list[Tensor]) -> None:
    """Five steps of Newton-Schulz on batches of matrices, products alone."""
    for y in batches:
        for _ in range(5):
            a = torch.bmm(y, y.mT)
            torch.baddbmm(y, torch.baddbmm(a, a, a), y)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", default="", help="a JSON file for benchmarks.table")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    specs = specs_of(args.layers, args.experts)
    rows = leaf_rows(where, args.repeats)
    params = draw(specs, where, 0.02)
    grads = draw(specs, where, 1e-3)
    rows += adamw_rows(specs, params, grads, where, args.repeats)
    write_json(args.out, "optimiser", where, rows, {})
    rows += muon_rows(specs, params, grads, where, max(2, args.repeats // 4))
    write_json(args.out, "optimiser", where, rows, {})


if __name__ == "__main__":
    main()
