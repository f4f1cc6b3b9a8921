"""The three short convolutions and the gated norm of a KDA layer, on a CUDA device.

``python -m benchmarks.kda_parts [--tune] [--json FILE]``. Checks values, gradients and
repeatability, then times the fused ops beside their peers: plain torch, the same from a CUDA
graph, torch.compile, and fla-core's kernels where that package is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Row, cuda_device, print_rows, write_json
from benchmarks.op import Subject, check, measure, tune
from k31fn import device as devices
from k31fn.kernels.gated_norm import gated_norm
from k31fn.kernels.gated_norm import triton as norm_kernels
from k31fn.kernels.registry import use_impl
from k31fn.kernels.short_conv import short_conv
from k31fn.kernels.short_conv.triton import op as conv_kernels

__all__ = ["conv_subject", "main", "norm_subject"]

EPS, TAPS = 1e-5, 4
TUNED = {
    "short_conv": (
        {"warps": (1, 2, 4), "columns": (256, 512, 1024)},
        {"warps": (1, 2, 4), "columns": (128, 256, 512)},
    ),
    "gated_norm": (
        {"warps": (2, 4, 8), "rows": (8, 16, 32)},
        {"warps": (2, 4, 8), "rows": (8, 16, 32)},
    ),
}
"""What the tuner may choose, per op and direction."""


def _documents(tokens: int, where: torch.device) -> Tensor:
    """Three documents and some padding at the end, as packed rows have them."""
    ids = torch.ones(1, tokens, dtype=torch.int64, device=where)
    ids[:, tokens // 4 :] = 2
    ids[:, tokens // 2 :] = 3
    ids[:, tokens - tokens // 100 :] = 0
    return ids


def conv_subject(tokens: int, channels: int, where: torch.device) -> Subject:
    """The convolutions of q, k and v, each ``[1, tokens, channels]`` in bfloat16.

    Bytes that must move, in inputs: forward 6 (read, written), backward 9 (input and cotangent
    read, gradient written).
    """
    ids = _documents(tokens, where)

    def draw() -> list[Tensor]:
        shape = (1, tokens, channels)
        inputs = [torch.randn(shape, device=where).to(torch.bfloat16) for _ in range(3)]
        return [*inputs, *(torch.rand(channels, TAPS, device=where) - 0.5 for _ in range(3))]

    def fused(*xs: Tensor) -> tuple[Tensor, ...]:
        with use_impl(short_conv="triton"):
            return short_conv(xs[:3], xs[3:], ids, ())

    def plain(*xs: Tensor) -> tuple[Tensor, ...]:
        return short_conv.reference(xs[:3], xs[3:], ids, ())

    size = tokens * channels * 2
    name = f"3 conv T{tokens} C{channels}"
    return Subject(name, draw, fused, plain, plain, 6 * size, 15 * size, _conv_peers())


def _conv_peers() -> dict[str, Callable[..., Any]]:
    """fla-core's convolution knows documents by offsets; here it takes the row as one."""
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]

    def fla(*xs: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(xs[:3], xs[3:], strict=True)
        return tuple(causal_conv1d(x, w.to(x.dtype), activation="silu")[0] for x, w in pairs)

    return {"fla": fla}


def norm_subject(tokens: int, heads: int, dim: int, where: torch.device) -> Subject:
    """``o`` and ``gate`` of ``[1, tokens, heads, dim]`` in bfloat16.

    Bytes that must move, in inputs: forward 3, backward 5 (o, gate and cotangent read, two
    gradients written).
    """

    def draw() -> list[Tensor]:
        shape = (1, tokens, heads, dim)
        o, gate = (torch.randn(shape, device=where).to(torch.bfloat16) for _ in range(2))
        return [o, gate, torch.rand(dim, device=where) + 0.5]

    def fused(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        with use_impl(gated_norm="triton"):
            return gated_norm(o, gate, weight, EPS)

    def plain(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_norm.reference(o, gate, weight, EPS)

    size = tokens * heads * dim * 2
    name = f"norm T{tokens} H{heads} V{dim}"
    return Subject(name, draw, fused, plain, plain, 3 * size, 8 * size, _norm_peers())


def _norm_peers() -> dict[str, Callable[..., Any]]:
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.modules.fused_norm_gate import (  # pyright: ignore[reportMissingImports]
        rms_norm_gated,
    )

    def fla(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_gated(o, gate, weight, None, activation="sigmoid", eps=EPS)

    return {"fla": fla}


def main() -> int:
    """Prints a table; with ``--tune`` also the best tiles, and returns 1 if those of the kernels
    are not among them.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    small = [conv_subject(301, 264, where), norm_subject(301, 3, 128, where)]
    errors = {}
    for subject in small:
        errors[subject.shape] = check(subject)
        print(f"{subject.shape}: largest error {errors[subject.shape]:.1e}", flush=True)
        # bfloat16: one rounding to 2^-9, and sums of two such in gradients
        assert errors[subject.shape] < 2**-7, subject.shape
    conv = conv_subject(args.tokens, args.heads * 128, where)
    norm = norm_subject(args.tokens, args.heads, 128, where)
    rows: list[Row] = []
    tuned = True
    for subject, op, module in (
        (conv, "short_conv", conv_kernels),
        (norm, "gated_norm", norm_kernels),
    ):

        def note(row: Row, of: Subject = subject) -> None:
            print_rows([row], of.forward_bytes, of.both_bytes)
            rows.append(row)
            write_json(args.json, "KDA parts", where, rows, {"errors": errors})

        measure(subject, where, repeats=args.repeats, each=note)
        if args.tune:
            tuned &= tune(subject, module, where, TUNED[op], repeats=args.repeats)
    return 0 if tuned else 1


if __name__ == "__main__":
    sys.exit(main())
