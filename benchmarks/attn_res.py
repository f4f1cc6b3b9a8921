"""Residual attention: ``python -m benchmarks.attn_res [--tune] [--json FILE]`` on a CUDA device.

Checks values, gradients and repeatability, then times the fused op beside its peers: plain torch,
the same from a CUDA graph, torch.compile, fla-core's Triton kernels where that package is
installed; and a compiled sum of the sources, which moves the forward's bytes and does little else.
The forward is that of training, which keeps what the backward needs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.measure import Row, cuda_device, print_rows, write_json
from benchmarks.op import Subject, check, measure, tune
from k31fn import device as devices
from k31fn.kernels.attn_res import attn_res
from k31fn.kernels.registry import use_impl

__all__ = ["TUNED", "main", "subject"]

EPS = 1e-5
TUNED = {
    "attn_res": (
        {"warps": (4, 8), "per_core": (1, 2), "stages": (4, 5)},
        {"warps": (4, 8), "per_core": (1, 2), "stages": (3, 4)},
        {"warps": (8, 16), "stages": (2, 3)},
    ),
}
"""Values that the tuner may choose, per op and kernel of its table."""


def plain(query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
    """The equations on a stack of the sources."""
    v = torch.stack(sources)
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    probs = torch.softmax((keys * (query * norm)).sum(-1), 0)
    return (probs[..., None] * wide).sum(0).to(v.dtype)


def fused(query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
    """The op by its Triton kernels."""
    with use_impl(attn_res="triton"):
        return attn_res(sources, query, norm, EPS)


def added(query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
    """The sum of the sources: the same bytes, no norm, no weights."""
    del query, norm
    return functools.reduce(torch.add, sources)


def peers() -> dict[str, Callable[..., Tensor]]:
    """fla-core's, if it is installed."""
    try:
        fla = importlib.import_module("fla.ops.attnres")
    except ImportError:
        return {}
    return {"fla": lambda q, n, *s: fla.fused_attnres(q, s, n, rms_eps=EPS, scale=1.0)}


def subject(
    n: int, tokens: int, width: int, where: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Subject:
    """N sources ``[1, tokens, width]``, weights in float32."""

    def draw() -> list[Tensor]:
        sources = [torch.randn(1, tokens, width, device=where).to(dtype) for _ in range(n)]
        return [
            torch.randn(width, device=where) * width**-0.5,
            torch.rand(width, device=where) + 0.5,
            *sources,
        ]

    size = tokens * width * dtype.itemsize
    name = f"N{n} T{tokens} D{width}"
    return Subject(name, draw, fused, plain, plain, (n + 1) * size, (3 * n + 2) * size, bare=added)


def main() -> int:
    """Prints a table; with ``--tune`` also the best tiles, and returns 1 if those of the kernels
    are not among them.

    The JSON file is written anew after each row, so a run that is stopped has left what it found.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    shapes = ["9x4096x7168", "9x8192x7168", "4x1024x5120", "4x2048x2560"]
    parser.add_argument("--shapes", nargs="*", default=shapes, help="sources x tokens x width")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    errors = dict[str, float]()
    rows = list[Row]()
    tuned = True
    for small in (
        subject(2, 17, 37, where),
        subject(9, 129, 7168, where),
        subject(12, 65, 1000, where),
    ):
        errors[small.shape] = check(small)
        print(f"{small.shape}: largest error {errors[small.shape]:.1e}", flush=True)
        assert errors[small.shape] < 2**-8, "a bfloat16 result is rounded once: 2^-9 at most"
    module = importlib.import_module(attn_res.implementations["triton"].kernels)
    for shape in args.shapes:
        each = replace(subject(*map(int, shape.split("x")), where=where), peers=peers())

        def told(row: Row, of: Subject = each) -> None:
            print_rows([row], of.forward_bytes, of.both_bytes)
            rows.append(row)
            write_json(args.json, "AttnRes", where, rows, {"errors": errors})

        measure(each, where, repeats=args.repeats, each=told)
        if args.tune:
            tuned &= tune(each, module, where, TUNED["attn_res"], repeats=args.repeats)
    return 0 if tuned else 1


if __name__ == "__main__":
    sys.exit(main())
