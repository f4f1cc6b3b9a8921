"""KDA: the kernels beside plain torch and fla-core's ``chunk_kda``, in one run.

The plain forms take normalised q and k and log-decays in float32, the "gated" ones projections:
they make norms and gates too. Per distribution of decays at 8192 tokens, then six documents there,
then few heads, as a rank of tensor parallel has them, then 1 K to 64 K tokens, then a million
tokens of few heads; at last plain torch, and torch.compile of it. As called, and from a CUDA graph,
which has no time of the host. Ours and fla's are compared with the float64 reference.
``python -m benchmarks.kda --json benchmarks/results/kda.json``, on a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import Row, cuda_device, error, graphed, print_rows, take_turns, write_json
from benchmarks.trained_gates import TRAINED
from k31fn import device as devices
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.kernels.kda import kda, kda_gated, reference
from k31fn.kernels.kda.recurrence import MIN_LOG_DECAY
from k31fn.kernels.registry import use_impl

__all__ = ["main"]

WIDTH = 128
GATES = ("initial", "trained", "hard", "weak", "alike")
NAMES = ["fused", "fla", "fused, gated", "fla, gated", "plain", "torch.compile"]
PLAIN_AT = {"plain": 8192, "torch.compile": 1024}  # tokens: more would take minutes
DOCUMENTS = 6  # of lengths that no tile ends with
LONG = 2**20  # tokens of the last row, whose graphs would hold their memory beside each other
Function = Callable[..., tuple[Tensor, Tensor]]


def draw(tokens: int, heads: int, gate: str, where: torch.device) -> list[Tensor]:
    """q, k, v, g, beta, ids and a state. ``initial``: decays of a new layer, exp of -0.01 to -0.7
    a token; ``trained``: those and the betas of channels and heads of a trained ``tiny``; ``hard``
    and ``weak``: -5 and -0.01 everywhere; ``alike``: weak, and neighbouring keys of cosine 0.99
    with beta near 1.
    """
    shape = (1, tokens, heads, WIDTH)
    q, k, v, noise = (torch.randn(shape, device=where) for _ in range(4))
    beta = torch.sigmoid(2 * torch.randn(shape[:3], device=where))
    if gate == "alike":
        k = torch.randn(heads, WIDTH, device=where) + 0.1 * k
        beta = torch.full_like(beta, 0.999)
    if gate == "initial":
        base = torch.exp(torch.rand(heads, WIDTH, device=where) * 4.2 - 4.6)
        g = (-base * torch.exp(0.3 * noise)).clamp(min=MIN_LOG_DECAY)
    elif gate == "trained":
        found = json.loads(TRAINED.read_text(encoding="utf-8"))
        g = MIN_LOG_DECAY * torch.sigmoid(_as_trained(found["gate"], noise))
        beta = torch.sigmoid(_as_trained(found["beta"], torch.randn_like(beta)))
    else:
        g = torch.full_like(noise, MIN_LOG_DECAY if gate == "hard" else -0.01)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    ids = torch.ones(1, tokens, dtype=torch.int64, device=where)
    state = 0.3 * torch.randn(1, heads, WIDTH, WIDTH, device=where)
    low = ((q * WIDTH**-0.5).bfloat16(), k.bfloat16(), v.bfloat16())
    return [*low, g, beta, ids, state]


def _as_trained(moments: dict[str, list[float]], noise: Tensor) -> Tensor:
    """Noise with mean and deviation of trained channels, drawn for each channel of this shape."""
    table = torch.tensor([moments["mean"], moments["deviation"]], device=noise.device)
    mean, deviation = table[:, torch.randint(table.shape[1], noise.shape[2:], device=noise.device)]
    return mean + deviation * noise


def by_op(impl: str) -> Function:
    """The op by an implementation."""

    def run(*xs: Tensor) -> tuple[Tensor, Tensor]:
        with use_impl(kda=impl):
            out = kda(*xs)
        return out.o, out.state

    return run


def compiled() -> Function:
    """The reference whose slabs, forward and backward, are compiled by torch; the loop over them is
    Python, since all of a row's would compile for minutes.
    """
    slab = custom_vjp(
        torch.compile(reference._slab_fwd, dynamic=False),
        torch.compile(reference._slab_bwd, dynamic=False),
        name="kda",
    )

    def run(*xs: Any) -> tuple[Tensor, Tensor]:
        with mock.patch.object(reference, "_slab", slab):
            out = reference.kda(*xs)
        return out.o, out.state

    return run


def from_projections(xs: list[Tensor]) -> list[Tensor]:
    """Inputs of the forms that make norms and gates themselves: g and beta give way to what gives
    them, and parameters follow.
    """
    q, k, v, g, beta, ids, state = xs
    z = torch.logit((g / MIN_LOG_DECAY).clamp(1e-6, 1 - 1e-6)).bfloat16()
    raw = torch.logit(beta.clamp(1e-6, 1 - 1e-6)).bfloat16()
    heads = q.shape[2]
    parameters = (q.new_zeros(heads).float(), q.new_zeros(heads, WIDTH).float())
    return [q, k, v, z, raw, ids, state, *parameters]


def gated(impl: str) -> Function:
    """From projections; by ``triton`` norms and gates are inside the kernels."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        ids: Tensor,
        state: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        numbers = (MIN_LOG_DECAY, 1e-6, WIDTH**-0.5)
        with use_impl(kda_gated=impl):
            out = kda_gated(q, k, v, z, beta, A_log, dt_bias, ids, *numbers, state)
        return out.o, out.state

    return run


def peers() -> dict[str, Function]:
    """fla-core's, where it is installed."""
    try:
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}

    def fla(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        del ids  # one document
        out = chunk_kda(
            q, k, v, g, beta, 1.0, state, output_final_state=True, safe_gate=True
        )  # safe: decays of at least -5, which lets it use the matrix units more
        return out[0], out[1]

    def fla_gated(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        ids: Tensor,
        state: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        del ids
        out = chunk_kda(
            q,
            k,
            v,
            z,
            beta,
            WIDTH**-0.5,
            state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=MIN_LOG_DECAY,
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
        )
        return out[0], out[1]

    return {"fla": fla, "fla, gated": fla_gated}


def gradients(f: Function, xs: list[Tensor], cts: list[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all but ids."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in xs]
    out = f(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(out, wanted, [c.to(o.dtype) for c, o in zip(cts, out, strict=True)])
    return [*(o.detach() for o in out), *grads]


def errors(
    heads: int, gate: str, where: torch.device, names: list[str]
) -> dict[str, dict[str, float]]:
    """Ours and fla's at 1024 tokens, of each result and gradient, against float64."""
    xs = draw(1024, heads, gate, where)
    cts = [torch.randn_like(xs[2]), torch.randn_like(xs[6])]
    fused = {"fused": by_op("triton"), "fused, gated": gated("triton"), **peers()}
    found: dict[str, dict[str, float]] = {}
    for kind, exact in (("", by_op("reference")), (", gated", gated("reference"))):
        args = from_projections(xs) if kind else xs
        of_gates = ("dz", "dbeta", "dstate", "dA_log", "ddt_bias")
        results = ("o", "state", "dq", "dk", "dv", *(of_gates if kind else ("dg", *of_gates[1:3])))
        wide = [x.double() if x.is_floating_point() else x for x in args]
        expected = gradients(exact, wide, cts)
        for form in (f"fused{kind}", f"fla{kind}"):
            if form in names and form in fused:
                pairs = zip(results, gradients(fused[form], args, cts), expected, strict=True)
                found[form] = {name: error(a, b) for name, a, b in pairs}
    return found


def peak(work: Callable[[], Any], where: torch.device) -> int:
    """Bytes beyond those that are there before."""
    work()
    torch.cuda.synchronize(where)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    work()
    torch.cuda.synchronize(where)
    return torch.cuda.max_memory_allocated(where) - before


def moved(tokens: int, heads: int) -> tuple[int, int]:
    """Bytes of inputs and outputs, forward and both: bfloat16 but for g."""
    each = tokens * heads * WIDTH
    return 12 * each, 34 * each


def timed(
    shape: str,
    name: str,
    f: Function,
    args: list[Tensor],
    floors: list[float],
    where: torch.device,
    repeats: int,
    *,
    in_graph: bool = True,
) -> Iterator[Row]:
    """Rows of a function as called, and from a graph; of its forward alone where it refuses its
    backward.
    """
    cts = [torch.randn_like(args[2]), torch.randn_like(args[6])]

    def forward() -> Any:
        return f(*(x.detach().requires_grad_() if x.is_floating_point() else x for x in args))

    def both() -> Any:
        return gradients(f, args, cts)

    works = {"forward": forward, "both": both}
    note = ""
    try:
        most = peak(both, where)
    except RuntimeError as e:
        del works["both"]
        most = peak(forward, where)
        note = str(e).split(". ")[0]
    if in_graph:
        works |= {f"graph {kind}": graphed(work, where) for kind, work in list(works.items())}
    times = take_turns({kind: [work] for kind, work in works.items()}, where, repeats)
    for form, prefix in ((name, ""), (f"{name}, graph", "graph "))[: 1 + in_graph]:
        forward_ms = times[f"{prefix}forward"]
        both_ms = times.get(f"{prefix}both", float("nan"))
        yield Row(shape, form, forward_ms, both_ms, floors[0], floors[1], most, note)


def rows_of(
    tokens: int,
    heads: int,
    gate: str,
    where: torch.device,
    repeats: int,
    names: list[str],
    documents: int = 1,
) -> Iterator[Row]:
    """A row for each implementation as called, and from a graph."""
    xs = draw(tokens, heads, gate, where)
    if documents > 1:
        xs[5] = 1 + torch.arange(tokens, device=where)[None] * documents // tokens
    rate = (devices.peak_rates(where) or devices.PeakRates(float("nan"), float("nan"))).bytes
    floors = [1e3 * x / rate for x in moved(tokens, heads)]
    functions = {
        "fused": by_op("triton"),
        "fused, gated": gated("triton"),
        "plain": by_op("reference"),
        "torch.compile": compiled(),
        **peers(),
    }
    shape = f"T{tokens} H{heads} {gate}" + (f", {documents} documents" * (documents > 1))
    for name in names:
        if name in functions:
            slow = name in PLAIN_AT
            yield from timed(
                shape,
                name,
                functions[name],
                from_projections(xs) if name.endswith("gated") else xs,
                floors,
                where,
                3 if slow else repeats,
                in_graph=not slow and tokens < LONG,
            )


def main() -> int:
    """Prints a table. The JSON file is written anew after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--few-heads", type=int, default=12, help="0: no rows with few heads")
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    tokens = [4096, 32768, 1024, 16384, 65536]
    parser.add_argument("--tokens", nargs="*", type=int, default=tokens)
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    torch.manual_seed(0)
    off: dict[str, dict[str, dict[str, float]]] = {}
    rows: list[Row] = []
    first = args.gates[0]
    names = [n for n in args.names if n not in PLAIN_AT]
    ours = [n for n in names if n.startswith("fused")]
    shapes = [(8192, args.heads, gate, names, 1) for gate in args.gates]
    shapes += [(8192, args.heads, first, ours, DOCUMENTS)]
    if args.few_heads:
        shapes += [(8192, args.few_heads, first, ours, 1)]
    shapes += [(n, args.heads, first, names, 1) for n in args.tokens]
    if args.few_heads:
        shapes += [(LONG, args.few_heads, first, [n for n in ours if n == "fused, gated"], 1)]
    # last, and once: their times do not depend on the decays
    shapes += [(PLAIN_AT[n], args.heads, first, [n], 1) for n in args.names if n in PLAIN_AT]
    for length, heads, gate, names, documents in shapes:
        for row in rows_of(length, heads, gate, where, args.repeats, names, documents):
            print_rows([row], *moved(length, heads))
            rows.append(row)
            write_json(args.json, "kda", where, rows, {"errors": off})
        # after the first rows, since fla-core chooses its tiles at its first call
        if gate not in off:
            off[gate] = errors(args.heads, gate, where, args.names)
            for form, some in off[gate].items():
                figures = " ".join(f"{name} {x:.1e}" for name, x in some.items())
                print(gate, form, figures, flush=True)
    write_json(args.json, "kda", where, rows, {"errors": off})
    return 0


if __name__ == "__main__":
    sys.exit(main())
