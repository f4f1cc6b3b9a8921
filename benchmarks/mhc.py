"""A round of hyper-connections: ``python -m benchmarks.mhc [--tune] [--json FILE]`` on a CUDA
device.

The read of the streams and their update around a sublayer that is given. Checks values, gradients
and repeatability, then times the fused ops beside their peers: plain torch, the same from a CUDA
graph, and torch.compile.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import torch
from torch import Tensor

from benchmarks.measure import Row, cuda_device, print_rows, write_json
from benchmarks.op import Subject, check, measure, tune
from k31fn import device as devices
from k31fn.kernels.mhc_post import mhc_post
from k31fn.kernels.mhc_pre import mhc_pre
from k31fn.kernels.registry import OPS, use_impl

__all__ = ["TUNED", "main", "subject"]

EPS, ITERATIONS = 1e-6, 20
_STREAMED = {"warps": (1, 2, 4), "columns": (256, 512, 1024)}
TUNED = {
    "mhc_pre": (
        {"warps": (4, 8), "rows": (64, 128), "columns": (64, 128), "stages": (3, 4)},
        {**_STREAMED, "rows": (4, 8)},
        {**_STREAMED, "rows": (4, 8)},
        {"per_core": (2, 3), "rows": (32, 64), "columns": (64, 128)},
        {"per_core": (4, 8)},
    ),
    "mhc_post": ({**_STREAMED, "per_core": (16, 32)}, {**_STREAMED, "stages": (2, 3)}),
}
"""Values that the tuner may choose, per module and kernel of its table."""


def plain(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """What the sublayer reads, and the next streams, as the equations have them."""
    n = x.shape[-2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    flat = wide.flatten(-2)
    z = (flat @ phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    z_pre, z_post, z_res = z.split((n, n, n * n), -1)
    b_pre, b_post, b_res = base.split((n, n, n * n))
    h_pre = torch.sigmoid(scale[0] * z_pre + b_pre) + EPS
    h_post = 2 * torch.sigmoid(scale[1] * z_post + b_post)
    m = torch.softmax((scale[2] * z_res + b_res).unflatten(-1, (n, n)), -1) + EPS
    m = m / (m.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    y = (h_pre[..., None] * wide).sum(-2).to(x.dtype)
    after = h_post[..., None] * f.to(wide.dtype)[..., None, :] + torch.einsum(
        "btij,btid->btjd", m, wide
    )
    return y, after.to(x.dtype)


def fused(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The op by its Triton kernels."""
    with use_impl(mhc_pre="triton", mhc_post="triton"):
        pre = mhc_pre(x, phi, scale, base, EPS, ITERATIONS)
        return pre.y, mhc_post(pre.x, f, pre.h_post, pre.h_res)


def subject(
    tokens: int, n: int, width: int, where: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Subject:
    """N streams ``[1, tokens, N, width]``; parameters in float32.

    Bytes that must move, in streams' width per token: forward 3 N + 2 (each of two ops reads the
    streams, one writes them, and one vector each); backward 5 N + 3 (streams and their cotangent
    are read by both, written once).
    """

    def draw() -> list[Tensor]:
        x, f = (
            torch.randn(1, tokens, *rest, device=where).to(dtype) for rest in ((n, width), (width,))
        )
        phi = torch.randn(n * width, 2 * n + n * n, device=where) * (n * width) ** -0.5
        return [x, f, phi, torch.rand(3, device=where), torch.randn(2 * n + n * n, device=where)]

    size = tokens * width * dtype.itemsize
    name = f"S{tokens} N{n} D{width}"
    return Subject(name, draw, fused, plain, plain, (3 * n + 2) * size, (8 * n + 5) * size)


def main() -> int:
    """Prints a table; with ``--tune`` also the best tiles, and returns 1 if those of the kernels
    are not among them.

    The JSON file is written anew after each row, so a run that is stopped has left what it found.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["1024x4x5120", "2048x4x2560"],
        help="tokens x streams x width",
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    errors = {}
    rows = list[Row]()
    tuned = True
    for shape in ((17, 2, 37), (130, 4, 1000), (33, 8, 264)):
        small = subject(*shape, where)
        errors[small.shape] = check(small)
        print(f"{small.shape}: largest error {errors[small.shape]:.1e}", flush=True)
        assert errors[small.shape] < 2**-7, (
            "bfloat16: a sum of two results that are each rounded to 2^-9"
        )
    for shape in args.shapes:
        tokens, streams, width = map(int, shape.split("x"))
        big = subject(tokens, streams, width, where)

        def told(row: Row, of: Subject = big) -> None:
            print_rows([row], of.forward_bytes, of.both_bytes)
            rows.append(row)
            write_json(args.json, "mHC round", where, rows, {"errors": errors})

        measure(big, where, repeats=args.repeats, each=told)
        if args.tune:
            for op, options in TUNED.items():
                module = importlib.import_module(OPS[op].implementations["triton"].kernels)
                tuned &= tune(big, module, where, options, repeats=args.repeats)
    return 0 if tuned else 1


if __name__ == "__main__":
    sys.exit(main())
