"""Residual attention: ``python -m benchmarks.attn_res [--tune] [--json FILE]`` on a CUDA device.

Checks values, gradients and repeatability, then times the fused op beside its peers: plain torch, the same from a CUDA
graph, torch.compile, and fla-core's Triton kernels where that package is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.measure import Row, print_rows, write_json
from benchmarks.op import Subject, check, measure, tune
from k31fn import device as devices
from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.registry import use_impl

__all__ = ["TUNED", "main", "subject"]

EPS = 1e-5
TUNED = ({"warps": (4, 8), "per_core": (1, 2), "stages": (3, 4, 5)},) * 2
"""What the tuner may choose, per kernel of the table."""


def plain(query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
    """The equations on a stack of the sources."""
    v = torch.stack(sources)
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    probs = torch.softmax((keys * (query * norm)).sum(-1), 0)
    return (probs[..., None] * wide).sum(0).to(v.dtype)


def fused(query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
    """By the kernels."""
    with use_impl(attn_res="triton"):
        return attn_res(sources, query, norm, EPS)


def peers() -> dict[str, Callable[..., Tensor]]:
    """fla-core's, if it is installed."""
    try:
        fla = importlib.import_module("fla.ops.attnres")
    except ImportError:
        return {}
    return {"fla": lambda q, n, *s: fla.fused_attnres(q, s, n, rms_eps=EPS, scale=1.0)}


def subject(n: int, tokens: int, width: int, where: torch.device, dtype: torch.dtype = torch.bfloat16) -> Subject:
    """N sources ``[1, tokens, width]``, weights in float32."""

    def draw() -> list[Tensor]:
        sources = [torch.randn(1, tokens, width, device=where).to(dtype) for _ in range(n)]
        return [torch.randn(width, device=where) * width**-0.5, torch.rand(width, device=where) + 0.5, *sources]

    size = tokens * width * dtype.itemsize
    name = f"N{n} T{tokens} D{width}"
    return Subject(name, draw, fused, plain, plain, (n + 1) * size, (3 * n + 2) * size)


def main() -> int:
    """Prints a table; with ``--tune`` also the best tiles, and returns 1 if those of the kernels are not among them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--sources", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = devices.parse(args.device)
    errors, rows, tuned = {}, list[Row](), True
    for n, tokens, width in ((1, 17, 37), (args.sources, 129, args.width), (12, 65, 1000)):
        small = subject(n, tokens, width, where)
        errors[small.shape] = check(small)
        print(f"{small.shape}: largest error {errors[small.shape]:.1e}", flush=True)
        assert errors[small.shape] < 2**-8, "a bfloat16 result is rounded once: 2^-9 at most"
    for tokens in args.tokens:
        big = replace(subject(args.sources, tokens, args.width, where), peers=peers())
        some = measure(big, where, sets=2, repeats=args.repeats)
        print_rows(some, big.forward_bytes, big.both_bytes)
        rows += some
        if args.tune:
            module = importlib.import_module("k31fn.kernels.attn_res.triton")
            tuned &= tune(big, module, where, TUNED, repeats=args.repeats)
    write_json(args.json, "AttnRes", where, rows, {"errors": errors})
    return 0 if tuned else 1


if __name__ == "__main__":
    sys.exit(main())
