"""Gated DeltaNet's recurrence: the kernels beside plain torch and fla-core's
``chunk_gated_delta_rule``, in one run, on normalised q and k and log-decays in float32.

Per distribution of decays at 8192 tokens, then for other lengths; as called, and from a CUDA graph,
which has no time of the host. Ours are compared with the float64 reference first. On Hopper
fla-core refuses its backward with versions of Triton that compile it wrongly (3.4 to 3.7.0): its
forward alone is timed then. ``python -m benchmarks.gdn --json benchmarks/results/gdn.json``, on a
CUDA device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kda import Function, gradients, timed
from benchmarks.measure import Row, cuda_device, error, print_rows, write_json
from k31fn import device as devices
from k31fn.kernels.gdn import gdn
from k31fn.kernels.registry import use_impl

__all__ = ["main"]

WIDTH = 128
GATES = ("initial", "weak", "hard", "beyond", "alike")
NAMES = ["fused", "fla", "plain"]
PLAIN_AT_MOST = 8192  # tokens: more would take seconds and say nothing new


def draw(tokens: int, heads: int, gate: str, where: torch.device) -> list[Tensor]:
    """q, k, v, g, beta, ids and a state. ``initial``: decays of a new layer, -0.001 to -1.6 a
    token; ``hard``: -5; ``beyond``: a tenth of the tokens forgets all, the others little;
    ``alike``: weak, and neighbouring keys of cosine 0.99 with beta near 1.
    """
    shape = (1, tokens, heads, WIDTH)
    q, k, v = (torch.randn(shape, device=where) for _ in range(3))
    beta = torch.sigmoid(2 * torch.randn(shape[:3], device=where))
    if gate == "alike":
        k = torch.randn(heads, WIDTH, device=where) + 0.1 * k
        beta = torch.full_like(beta, 0.999)
    g = torch.full_like(beta, -5.0 if gate == "hard" else -0.01)
    if gate == "initial":
        rate = torch.exp(2.77 * torch.rand(heads, device=where))
        step = torch.exp(torch.rand(heads, device=where) * 4.6 - 6.9)
        g = -rate * step * torch.exp(0.3 * torch.randn_like(beta))
    elif gate == "beyond":
        g = torch.where(torch.rand_like(beta) < 0.1, -1000.0, g)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    ids = torch.ones(1, tokens, dtype=torch.int64, device=where)
    state = 0.3 * torch.randn(1, heads, WIDTH, WIDTH, device=where)
    low = ((q * WIDTH**-0.5).bfloat16(), k.bfloat16(), v.bfloat16())
    return [*low, g, beta, ids, state]


def by_op(impl: str) -> Function:
    """The op by an implementation."""

    def run(*xs: Tensor) -> tuple[Tensor, Tensor]:
        with use_impl(gdn=impl):
            out = gdn(*xs)
        return out.o, out.state

    return run


def peers() -> dict[str, Function]:
    """fla-core's, where it is installed."""
    try:
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
        )
    except ImportError:
        return {}

    def fla(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        del ids  # one document
        out = chunk_gated_delta_rule(q, k, v, g, beta, 1.0, state, output_final_state=True)
        return out[0], out[1]

    return {"fla": fla}


def errors(f: Function, gate: str, where: torch.device) -> dict[str, float]:
    """Of o, the state and each gradient at 1000 tokens of 4 heads, against float64."""
    xs = draw(1000, 4, gate, where)
    cts = [torch.randn_like(xs[2]), torch.randn_like(xs[6])]
    wide = [x.double() if x.is_floating_point() else x for x in xs]
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    ours = gradients(f, xs, cts)
    exact = gradients(by_op("reference"), wide, cts)
    # norms: where every decay is e^-1000, that of the state's gradient is 0
    return {n: error(a, b) for n, a, b in zip(names, ours, exact, strict=True) if b.any()}


def moved(tokens: int, heads: int) -> tuple[int, int]:
    """Bytes of inputs and outputs in bfloat16, forward and both; g and beta are a 64th of q."""
    each = tokens * heads * WIDTH
    return 8 * each, 22 * each


def rows_of(
    tokens: int, heads: int, gate: str, where: torch.device, repeats: int, names: list[str]
) -> Iterator[Row]:
    """A row for each implementation as called, and from a graph."""
    xs = draw(tokens, heads, gate, where)
    rate = (devices.peak_rates(where) or devices.PeakRates(float("nan"), float("nan"))).bytes
    floors = [1e3 * x / rate for x in moved(tokens, heads)]
    functions = {"fused": by_op("triton"), "plain": by_op("reference"), **peers()}
    shape = f"T{tokens} H{heads} {gate}"
    for name in names:
        plain = name == "plain"
        if name in functions and not (plain and tokens > PLAIN_AT_MOST):
            times = 3 if plain else repeats
            f = functions[name]
            yield from timed(shape, name, f, xs, floors, where, times, in_graph=not plain)


def main() -> int:
    """Prints a table. The JSON file is written anew after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 32768])
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    torch.manual_seed(0)
    off: dict[str, dict[str, float]] = {}
    for gate in args.gates:
        off[gate] = errors(by_op("triton"), gate, where)
        print(gate, " ".join(f"{name} {x:.1e}" for name, x in off[gate].items()), flush=True)
    rows: list[Row] = []
    # plain torch once: its time does not depend on the decays
    shapes = [
        (8192, gate, args.names if i == 0 else [n for n in args.names if n != "plain"])
        for i, gate in enumerate(args.gates)
    ]
    shapes += [(n, args.gates[0], args.names) for n in args.tokens]
    for length, gate, names in shapes:
        for row in rows_of(length, args.heads, gate, where, args.repeats, names):
            print_rows([row], *moved(length, args.heads))
            rows.append(row)
            write_json(args.json, "gdn", where, rows, {"errors": off})
    return 0


if __name__ == "__main__":
    sys.exit(main())
