"""A whole KDA layer, forward and backward, beside its products and a layer of fla-core's parts.

``python -m benchmarks.kda_layer --json benchmarks/results/kda_layer.json``, on a CUDA device with
fla-core. Gradients are those of all parameters and of the input. Three things in one run, on the
same tensors: the layer; each of its products alone, forward and for both gradients, and the ``kda``
operator alone; and a layer of the same torch products with fla-core's short convolution,
``chunk_kda`` with norms and gates inside, and gated norm. Launches are those that the device saw.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kda import by_op, gradients, moved
from benchmarks.kda import draw as draw_kda
from benchmarks.kda import peak as peak_bytes
from benchmarks.measure import Row, cuda_device, error, graphed, print_rows, take_turns, write_json
from k31fn import device as devices
from k31fn import params, random, tree
from k31fn.kernels.registry import record_impls
from k31fn.layers import kda
from k31fn.segments import Segments, from_lengths, whole

__all__ = ["main"]

HIDDEN, HEADS, WIDTH = 7168, 96, 128
Layer = Callable[[kda.Params[Tensor], Tensor], Tensor]


def ours(cfg: kda.Config, packing: Segments) -> Layer:
    """The layer as a model runs it."""

    def layer(p: kda.Params[Tensor], x: Tensor) -> Tensor:
        return kda.apply(p, x, cfg, segments=packing).y

    return layer


def of_fla(cfg: kda.Config) -> Layer:
    """The same layer of fla-core's parts, for rows of one document."""
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.modules.fused_norm_gate import (  # pyright: ignore[reportMissingImports]
        rms_norm_gated,
    )
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (cfg.num_heads, cfg.head_dim))

    def run(p: kda.Params[Tensor], x: Tensor) -> Tensor:
        pairs = ((p.w_q, p.conv_q), (p.w_k, p.conv_k), (p.w_v, p.conv_v))
        convolved = [
            causal_conv1d(x @ w, taps.weight.to(x.dtype), activation="silu")[0] for w, taps in pairs
        ]
        q, k, v = map(by_head, convolved)
        o = chunk_kda(
            q,
            k,
            v,
            by_head(x @ p.w_fa @ p.w_fb),
            x @ p.w_b,
            cfg.head_dim**-0.5,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=cfg.gate_lower_bound,
            A_log=p.A_log,
            dt_bias=p.dt_bias,
        )[0]
        gate = by_head(x @ p.w_g)
        y = rms_norm_gated(o, gate, p.o_norm, None, activation="sigmoid", eps=cfg.norm_eps)
        return y.flatten(-2) @ p.w_o

    return run


def drawn(cfg: kda.Config, tokens: int, dtype: torch.dtype, where: torch.device) -> Any:
    """Parameters, an input and a cotangent."""
    p = params.init(kda.specs(cfg), random.key(0, device=where), dtype=dtype)
    x, ct = (torch.randn(1, tokens, cfg.hidden_size, device=where).to(dtype) for _ in range(2))
    return p, x, ct


def with_gradients(layer: Layer, p: Any, x: Tensor, ct: Tensor) -> list[Tensor]:
    """The output, and the gradients of all parameters and of the input."""
    leaves, structure = tree.flatten((p, x))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = layer(*tree.unflatten(structure, leaves))
    return [y.detach(), *torch.autograd.grad(y, leaves, ct)]


def errors(where: torch.device) -> dict[str, float]:
    """Of the output and each gradient of a layer of 4 heads, against float64: 700 tokens, of three
    documents and padding.
    """
    cfg = kda.Config(512, 4, WIDTH)
    p, x, ct = drawn(cfg, 700, torch.bfloat16, where)
    packing = from_lengths([[301, 64, 315]], 700, device=where)
    with record_impls() as ran:
        found = with_gradients(ours(cfg, packing), p, x, ct)
    assert all(name != "reference" for _, name in ran), ran
    exact = with_gradients(ours(cfg, packing), *tree.map(lambda a: a.double(), (p, x, ct)))
    names = ["y", *tree.paths(p), "x"]
    return {name: error(a, b) for name, a, b in zip(names, found, exact, strict=True)}


class Product(NamedTuple):
    """One product of the layer: ``a @ b``."""

    name: str
    a: Tensor
    b: Tensor


def products(p: kda.Params[Tensor], x: Tensor, ct: Tensor) -> tuple[list[Product], list[Product]]:
    """Those of the forward, and those of the backward: two for each weight."""
    rows = x[0]
    wide = torch.randn(len(rows), p.w_q.shape[1], device=x.device).to(x.dtype)
    narrow, beta = wide[:, : p.w_fa.shape[1]].contiguous(), wide[:, : p.w_b.shape[1]].contiguous()
    uses = {
        "w_q": (rows, wide),
        "w_k": (rows, wide),
        "w_v": (rows, wide),
        "w_g": (rows, wide),
        "w_fa": (rows, narrow),
        "w_fb": (narrow, wide),
        "w_b": (rows, beta),
        "w_o": (wide, ct[0]),
    }
    forward, backward = [], []
    for name, (given, grad) in uses.items():
        w = getattr(p, name)
        forward.append(Product(name, given, w))
        backward += [
            Product(f"{name}, of its input", grad, w.mT),
            Product(f"{name}, of itself", given.mT, grad),
        ]
    return forward, backward


def product_times(some: list[Product], where: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of each alone, from a graph."""
    works = {q.name: [graphed(lambda q=q: q.a @ q.b, where)] for q in some}
    return take_turns(works, where, repeats)


def kernels(work: Callable[[], Any], where: torch.device) -> dict[str, tuple[int, float]]:
    """What the device ran in one call: launches and milliseconds by name, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        devices.synchronize(where)
    launches: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            # cut before they are counted: many of torch's kernels begin alike
            launches[event.name[:90]] += 1
            times[event.name[:90]] += event.device_time / 1e3
    return {name: (launches[name], round(ms, 4)) for name, ms in times.most_common()}


def floors(
    times: tuple[dict[str, float], dict[str, float]], tokens: int, where: torch.device
) -> list[float]:
    """Forward and both: the products as measured, and the bytes that everything else must move:
    convolutions (6 and 15 tensors of all heads), KDA, and the gated norm (3 and 8).
    """
    rate = (devices.peak_rates(where) or devices.PeakRates(float("nan"), float("nan"))).bytes
    each = 2 * tokens * HEADS * WIDTH
    of_kda = moved(tokens, HEADS)
    forward, backward = (sum(some.values()) for some in times)
    return [
        forward + 1e3 * (9 * each + of_kda[0]) / rate,
        forward + backward + 1e3 * (23 * each + of_kda[1]) / rate,
    ]


def kda_alone(tokens: int, where: torch.device, repeats: int) -> tuple[float, float]:
    """Milliseconds of the operator, forward and both, from a graph."""
    xs = draw_kda(tokens, HEADS, "initial", where)
    cts = [torch.randn_like(xs[2]), torch.randn_like(xs[6])]
    f = by_op("triton")

    def forward() -> Any:
        return f(*(x.detach().requires_grad_() if x.is_floating_point() else x for x in xs))

    works = {
        "forward": [graphed(forward, where)],
        "both": [graphed(lambda: gradients(f, xs, cts), where)],
    }
    times = take_turns(works, where, repeats)
    return times["forward"], times["both"]


def main() -> int:
    """Prints a table, what the device ran, and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    torch.manual_seed(0)
    off = errors(where)
    print(" ".join(f"{name} {x:.1e}" for name, x in off.items()), flush=True)
    assert max(off.values()) < 0.03, off  # bfloat16 through some twenty roundings
    cfg = kda.Config(HIDDEN, HEADS, WIDTH)
    p, x, ct = drawn(cfg, args.tokens, torch.bfloat16, where)
    packing = whole(1, args.tokens, device=where)
    layers = {"fused": ours(cfg, packing)}
    apart: list[float] = []
    if args.peer:
        layers["fla"] = of_fla(cfg)
        results = (with_gradients(f, p, x, ct) for f in layers.values())
        apart = [error(a, b.double()) for a, b in zip(*results, strict=True)]
        print(f"largest difference from fla's layer: {max(apart):.1e}", flush=True)
    times = tuple(product_times(some, where, args.repeats) for some in products(p, x, ct))
    alone = kda_alone(args.tokens, where, args.repeats)
    floor = floors((times[0], times[1]), args.tokens, where)
    sums = [sum(times[0].values()), sum(times[0].values()) + sum(times[1].values())]
    rows: list[Row] = []
    ran: dict[str, Any] = {}
    shape = f"T{args.tokens} H{HEADS} D{HIDDEN}"
    works: dict[str, list[Callable[[], Any]]] = {}
    peaks = {}
    for name, layer in layers.items():
        forward = _forward(layer, p, x)
        both = _both(layer, p, x, ct)
        peaks[name] = peak_bytes(both, where)
        ran[name] = kernels(both, where)
        works |= {
            f"{name}|forward": [forward],
            f"{name}|both": [both],
            f"{name}, graph|forward": [graphed(forward, where)],
            f"{name}, graph|both": [graphed(both, where)],
        }
    medians = take_turns(works, where, args.repeats)
    for name, peak in peaks.items():
        for form in (name, f"{name}, graph"):
            forward, both = (medians[f"{form}|{kind}"] for kind in ("forward", "both"))
            note = f"{sum(n for n, _ in ran[name].values())} launches"
            rows.append(Row(shape, form, forward, both, floor[0], floor[1], peak, note))
    rows.append(Row(shape, "products alone", sums[0], sums[1], floor[0], floor[1], 0))
    rows.append(Row(shape, "kda alone", alone[0], alone[1], floor[0], floor[1], 0))
    print_rows(rows, 0, 0)
    for name, some in ran.items():
        print(f"{name}: what the device ran, forward and backward: launches, ms")
        for kernel, (count, ms) in some.items():
            print(f"  {count:3} {ms:9.4f}  {kernel}")
    by_name = {row.name: row.both for row in rows}
    ratios = {"to products and kda": by_name["fused, graph"] / (sums[1] + alone[1])}
    if args.peer:
        ratios |= {
            "fla to fused": by_name["fla, graph"] / by_name["fused, graph"],
            "fla to fused, as called": by_name["fla"] / by_name["fused"],
        }
    print(", ".join(f"{name} {x:.3f}" for name, x in ratios.items()))
    extra = {"errors": off, "from fla": max(apart, default=None), "ratios": ratios, "kernels": ran}
    write_json(args.json, "KDA layer", where, rows, {**extra, "products": times[0] | times[1]})
    return 0


def _forward(layer: Layer, p: Any, x: Tensor) -> Callable[[], Any]:
    leaves, structure = tree.flatten((p, x))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return lambda: layer(*tree.unflatten(structure, leaves))


def _both(layer: Layer, p: Any, x: Tensor, ct: Tensor) -> Callable[[], Any]:
    return lambda: with_gradients(layer, p, x, ct)


if __name__ == "__main__":
    sys.exit(main())
