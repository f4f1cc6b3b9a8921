"""Implementations of the experts' grouped product: ``python -m benchmarks.grouped_experts --device
cuda``.

For several numbers of experts and of rows per expert, balanced (every expert as likely) and skewed
(likelihoods are exponentially distributed), the milliseconds of one product with its two gradients,
the implementations taking turns; medians. ``batches`` and ``padding`` are those of ``buckets``: how
many products it does, and how many rows of zeros it adds per row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import told
from k31fn import device as devices
from k31fn.autodiff import vjp
from k31fn.kernels.experts import grouped_matmul
from k31fn.kernels.experts.buckets import split
from k31fn.kernels.registry import use_impl


def draw_sizes(num_experts: int, mean: int, skewed: bool) -> Tensor:
    """Rows per expert."""
    generator = torch.Generator().manual_seed(0)
    likely = (
        torch.rand(num_experts, generator=generator).log().neg()
        if skewed
        else torch.ones(num_experts)
    )
    chosen = torch.multinomial(likely, num_experts * mean, replacement=True, generator=generator)
    return chosen.bincount(minlength=num_experts)


def seconds(f: Callable[[], object], device: torch.device) -> float:
    """Of one call, to the end of its work on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    f()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def measure(rows: Tensor, w: Tensor, sizes: Tensor, repeats: int) -> dict[str, float | str]:
    """Median milliseconds per implementation, or why one cannot run."""
    ct = torch.ones(rows.shape[0], w.shape[2], dtype=rows.dtype, device=rows.device)

    def both(name: str) -> None:
        with use_impl(grouped_matmul=name):
            vjp(lambda r, m: grouped_matmul(r, m, sizes), rows, w)[1](ct)

    found: dict[str, float | str] = {}
    for name in grouped_matmul.implementations:
        if grouped_matmul.refusal(name, rows, w, sizes):
            found[name] = "-"
    names = [n for n in (*grouped_matmul.implementations, "reference") if n not in found]
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats + 2):
        for name in names:
            times[name].append(seconds(lambda: both(name), rows.device))  # noqa: B023
    return found | {n: 1e3 * statistics.median(t[2:]) for n, t in times.items()}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 128, 896])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[2, 8, 32, 128], help="mean rows per expert"
    )
    parser.add_argument("--inner", type=int, default=256, help="width of a row")
    parser.add_argument("--outer", type=int, default=256, help="width of a product")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device = told(parser, lambda: devices.parse(args.device))
    dtype = getattr(torch, args.dtype)
    names = [*grouped_matmul.implementations, "reference"]
    print(
        f"{'experts':>7} {'rows':>5} {'routes':>8} {'batches':>7} {'padding':>7}",
        *(f"{n:>10}" for n in names),
    )
    for num_experts in args.experts:
        w = torch.randn(num_experts, args.inner, args.outer, device=device, dtype=dtype)
        for mean in args.rows:
            rows = torch.randn(num_experts * mean, args.inner, device=device, dtype=dtype)
            for skewed in (False, True):
                sizes = draw_sizes(num_experts, mean, skewed)
                buckets = [b for b in split(sizes.tolist()) if b.batch]
                padding = sum(len(b.experts) * b.batch for b in buckets) / rows.shape[0] - 1
                times = measure(rows, w, sizes.to(device), args.repeats)
                shown = []
                for name in names:
                    time = times[name]  # or why there is none
                    shown.append(f"{time:10.2f}" if isinstance(time, float) else f"{time:>10}")
                routes = "skewed" if skewed else "balanced"
                print(
                    f"{num_experts:7} {mean:5} {routes:>8} {len(buckets):7} {padding:7.2f}",
                    *shown,
                    flush=True,
                )


if __name__ == "__main__":
    main()
