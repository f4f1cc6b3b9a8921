"""Routed experts and a whole LatentMoE layer, beside the library's products on the same tensors.

``python -m benchmarks.experts --json benchmarks/results/experts.json``, on a CUDA device. In one
run, at the width of K3.1 Pro, in bfloat16: for several numbers of experts the library's grouped
products alone (three forward, six backward) and ``expert_mlp`` on the same rows, weights and sizes;
``dispatch`` and ``combine``, in bytes of rows and tokens once each; and the layer beside all its
products alone. The floors of experts and layer are these products as measured, one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kda import peak as peak_bytes
from benchmarks.kda_layer import kernels
from benchmarks.measure import (
    Row,
    cuda_device,
    error,
    graphed,
    print_rows,
    take_turns,
    write_json,
)
from k31fn import device as devices
from k31fn import tree
from k31fn.kernels.expert_mlp import expert_mlp
from k31fn.kernels.experts import combine, dispatch
from k31fn.kernels.experts.reference import ExpertOrder, sort_by_expert
from k31fn.kernels.experts.triton.copies import scatter
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.kernels.situ.triton import activation, activation_grads
from k31fn.layers import latent_moe

__all__ = ["main"]

Work = Callable[[], Any]
BOUNDS = (4.0, 25.0)
PARTS = ("expert_mlp", "dispatch", "combine", "permute", "situ_glu", "rms_norm")
"""Operators whose references make the form in plain torch; its products are the library's."""


class Sizes(NamedTuple):
    """Of a layer; those of K3.1 Pro but for the experts."""

    tokens: int = 8192
    hidden: int = 7168
    latent: int = 3584
    inner: int = 3072
    shared: int = 6144
    choices: int = 16


def routed(sizes: Sizes, experts: int, where: torch.device) -> ExpertOrder:
    """Every set of experts as likely."""
    idx = torch.rand(sizes.tokens, experts, device=where).topk(sizes.choices).indices
    return sort_by_expert(idx, experts)


def drawn(sizes: Sizes, experts: int, where: torch.device) -> list[Tensor]:
    """Tokens, weights, and the matrices of the experts."""
    tokens, _, latent, inner, _, choices = sizes

    def normal(*shape: int) -> Tensor:
        # In bfloat16 at once: in float32 896 experts would take 118 GB.
        scale = 1.0 if len(shape) == 2 else shape[1] ** -0.5
        return torch.empty(shape, device=where, dtype=torch.bfloat16).normal_(0, scale)

    weights = torch.rand(tokens, choices, device=where) / choices
    matrices = [normal(experts, latent, inner) for _ in range(2)]
    return [normal(tokens, latent), weights, *matrices, normal(experts, inner, latent)]


def products(xs: list[Tensor], route: ExpertOrder, ct: Tensor) -> tuple[list[Work], list[Work]]:
    """The library's grouped products on the operator's own tensors: those of the forward, and those
    of the backward.
    """
    x, weights, w_gate, w_up, w_down = xs
    order, inverse, sizes = route
    ends = sizes.cumsum(0, dtype=torch.int32)

    def product(a: Tensor, b: Tensor) -> Work:
        return lambda: F.grouped_mm(a, b, offs=ends)

    rows = scatter(x, inverse, order.shape[0], weights)
    forward = [product(rows, w_gate), product(rows, w_up)]
    gate, up = (work() for work in forward)
    hidden = activation(gate, up, weights, order, BOUNDS)
    forward.append(product(hidden, w_down))
    d_out = scatter(ct, inverse, order.shape[0], weights)
    d_hidden = F.grouped_mm(d_out, w_down.mT, offs=ends)
    d_gate, d_up, _, _ = activation_grads(gate, up, weights, order, d_hidden, BOUNDS)
    backward = [
        product(d_out, w_down.mT),
        product(hidden.mT, d_out),
        product(d_gate, w_gate.mT),
        product(d_up, w_up.mT),
        product(rows.mT, d_gate),
        product(rows.mT, d_up),
    ]
    return forward, backward


def one_by_one(works: list[Work]) -> Work:
    """All of them, each result given up before the next."""

    def work() -> None:
        for each in works:
            each()

    return work


def both(f: Callable[..., Tensor], xs: Any, ct: Tensor) -> Work:
    """The value of ``f`` of a tree, and the gradients of its leaves."""
    leaves, structure = tree.flatten(xs)

    def work() -> list[Tensor]:
        given = [leaf.detach().requires_grad_() for leaf in leaves]
        y = f(*tree.unflatten(structure, given))
        return [y.detach(), *torch.autograd.grad(y, given, ct)]

    return work


def forward(f: Callable[..., Tensor], xs: Any) -> Work:
    """The value of ``f``, for a backward that does not come."""
    leaves, structure = tree.flatten(xs)
    return lambda: f(*tree.unflatten(structure, [x.detach().requires_grad_() for x in leaves]))


def in_plain_torch(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``f`` by references around the library's products."""

    def plain(*args: Any) -> Tensor:
        with use_impl(**dict.fromkeys(PARTS, "reference")):
            return f(*args)

    return plain


def errors(where: torch.device) -> dict[str, float]:
    """Of the value and each gradient, 700 tokens of 64 narrow experts, against float64."""
    small = Sizes(tokens=700, latent=512, inner=384)
    xs = drawn(small, 64, where)
    route = routed(small, 64, where)
    ct = torch.randn_like(xs[0])
    with record_impls() as ran:
        ours = both(lambda *a: expert_mlp(*a, *route), xs, ct)()
    assert dict(ran) == {("expert_mlp", "fused"): 1}, ran
    wide = [x.double() for x in xs]
    exact = both(lambda *a: expert_mlp(*a, *route), wide, ct.double())()
    names = ("y", "x", "weights", "w_gate", "w_up", "w_down")
    return {name: error(a, b) for name, a, b in zip(names, ours, exact, strict=True)}


def beside_products(
    shape: str,
    alone: tuple[list[Work], list[Work]],
    forms: dict[str, tuple[Work, Work]],
    where: torch.device,
    repeats: int,
    graphs: bool,
) -> list[Row]:
    """Rows of the products, and of the forms, in turns; the products' times stand as floors.

    Args:
        shape: what the rows are called.
        alone: products of the forward and of the backward.
        forms: forward, and both, by name.
        where: the device.
        repeats: timed calls of each.
        graphs: whether the fused form and the products are also replayed from graphs.
    """
    peaks = {name: peak_bytes(two, where) for name, (_, two) in forms.items()}
    forms = {"products alone": (one_by_one(alone[0]), one_by_one([*alone[0], *alone[1]])), **forms}
    if graphs:
        for name in ("products alone", "fused"):
            one, two = forms[name]
            forms[f"{name}, graph"] = (graphed(one, where), graphed(two, where))
    # Products are faster on a chip that is cool, after waiting or work that memory bounds: so all
    # are timed after the same products.
    heat = one_by_one([*alone[0], *alone[1]])
    works: dict[str, list[Work]] = {}
    for name, (one, two) in forms.items():
        works |= {f"{name}|heat 1": [heat], f"{name}|forward": [one]}
        works |= {f"{name}|heat 2": [heat], f"{name}|both": [two]}
    times = take_turns(works, where, repeats)
    rows: list[Row] = []
    for name in forms:
        of = "products alone, graph" if name.endswith("graph") else "products alone"
        found = (times[f"{name}|forward"], times[f"{name}|both"])
        floor = (times[f"{of}|forward"], times[f"{of}|both"])
        rows.append(Row(shape, name, *found, *floor, peaks.get(name.removesuffix(", graph"), 0)))
    print_rows(rows, 0, 0)
    return rows


def of_experts(sizes: Sizes, experts: int, where: torch.device, repeats: int) -> list[Row]:
    """The products alone, the operator, and (where it fits) the same in plain torch."""
    xs = drawn(sizes, experts, where)
    route = routed(sizes, experts, where)
    ct = torch.randn_like(xs[0])

    def fused(*a: Any) -> Tensor:
        return expert_mlp(*a, *route)

    few = experts <= 112
    forms = {"fused": (forward(fused, xs), both(fused, xs, ct))}
    if few:
        plain = in_plain_torch(fused)
        forms["eager"] = (forward(plain, xs), both(plain, xs, ct))
    shape = f"E{experts} T{sizes.tokens}"
    # Graphs of 896 experts would hold two sets of gradients of 59 GB.
    return beside_products(shape, products(xs, route, ct), forms, where, repeats, few)


def of_rows(sizes: Sizes, where: torch.device, repeats: int) -> list[Row]:
    """``dispatch`` and ``combine``, both ways, with their floors in bytes."""
    route = routed(sizes, 64, where)
    order, inverse, _ = route
    x = torch.randn(sizes.tokens, sizes.latent, device=where).bfloat16()
    rows = dispatch(x, order, inverse)
    weights = torch.rand(inverse.shape, device=where)
    each = x.nbytes + rows.nbytes
    rate = (devices.peak_rates(where) or devices.PeakRates(float("nan"), float("nan"))).bytes
    found: list[Row] = []
    forms = {
        # A backward of `combine` reads rows and writes rows.
        "dispatch": (lambda x: dispatch(x, order, inverse), (x,), rows, (each, 2 * each)),
        "combine": (
            lambda r, w: combine(r, w, order, inverse),
            (rows, weights),
            x,
            (each, 2 * each + rows.nbytes),
        ),
    }
    for name, (f, xs, ct, moved) in forms.items():
        two = {"fused": f, "eager": in_plain_torch(f)}
        works: dict[str, list[Work]] = {}
        for form, g in two.items():
            one, pair = forward(g, xs), both(g, xs, ct)
            works |= {f"{form}|forward": [one], f"{form}|both": [pair]}
            works[f"{form}, graph|forward"] = [graphed(one, where)]
            works[f"{form}, graph|both"] = [graphed(pair, where)]
        times = take_turns(works, where, repeats)
        floor = (1e3 * moved[0] / rate, 1e3 * moved[1] / rate)
        shape = f"{name} T{sizes.tokens} G{sizes.choices}"
        some: list[Row] = []
        for form in ("fused", "fused, graph", "eager", "eager, graph"):
            ms = (times[f"{form}|forward"], times[f"{form}|both"])
            some.append(Row(shape, form, *ms, *floor, 0))
        print_rows(some, *moved)
        found += some
    return found


def of_layer(sizes: Sizes, where: torch.device, repeats: int) -> list[Row]:
    """A layer of 64 experts, beside all its products alone."""
    tokens, hidden, latent, inner, shared, choices = sizes
    cfg = latent_moe.Config(hidden, latent, inner, shared, 64, choices)

    def normal(spec: Any) -> Tensor:
        scale = 1.0 if len(spec.shape) == 1 else spec.shape[-2] ** -0.5
        return torch.empty(spec.shape, device=where, dtype=torch.bfloat16).normal_(0, scale)

    p = tree.map(normal, latent_moe.specs(cfg))
    x = torch.randn(1, tokens, hidden, device=where).bfloat16()
    ct = torch.randn_like(x)
    bias = torch.zeros(64, device=where)

    def layer(p: Any, x: Tensor) -> Tensor:
        return latent_moe.apply(p, x, cfg, bias=bias).y

    plain = in_plain_torch(layer)
    forms = {
        "fused": (forward(layer, (p, x)), both(layer, (p, x), ct)),
        "eager": (forward(plain, (p, x)), both(plain, (p, x), ct)),
    }
    route = routed(sizes, 64, where)
    routing = torch.rand(tokens, choices, device=where) / choices
    experts = (p.experts.w_gate, p.experts.w_up, p.experts.w_down)
    narrow = x[0, :, :latent].contiguous()
    first, second = products([narrow, routing, *experts], route, ct[0, :, :latent].contiguous())
    dense_first, dense_second = _dense(p, x[0], latent, shared)
    alone = ([*first, *dense_first], [*second, *dense_second])
    rows = beside_products(f"LatentMoE E64 T{tokens}", alone, forms, where, repeats, True)
    print("LatentMoE, forward and backward: what the device ran: launches, ms")
    for kernel, (count, ms) in list(kernels(forms["fused"][1], where).items())[:40]:
        print(f"  {count:3} {ms:9.4f}  {kernel}", flush=True)
    return rows


def _dense(p: Any, x: Tensor, latent: int, shared: int) -> tuple[list[Work], list[Work]]:
    """The products that are not the experts', forward and backward; the router's in float32."""
    narrow = x[:, :latent].contiguous()
    inside = torch.randn(len(x), shared, device=x.device).to(x.dtype)
    scores = torch.randn(len(x), p.router.weight.shape[1], device=x.device)
    uses = [
        (x.float(), p.router.weight.float(), scores),
        (x, p.latent_down, narrow),
        (narrow, p.latent_up, x),
        (x, p.shared.w_gate, inside),
        (x, p.shared.w_up, inside),
        (inside, p.shared.w_down, x),
    ]
    first: list[Work] = []
    second: list[Work] = []
    for given, w, grad in uses:
        first.append(lambda a=given, b=w: a @ b)
        second += [lambda a=grad, b=w: a @ b.mT, lambda a=given, b=grad: a.mT @ b]
    return first, second


def main() -> int:
    """Prints tables and the ratios to the products alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 896])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    torch.manual_seed(0)
    off = errors(where)
    print(" ".join(f"{name} {x:.1e}" for name, x in off.items()), flush=True)
    assert max(off.values()) < 0.01, off  # bfloat16: a chain of five roundings
    sizes = Sizes(tokens=args.tokens)
    rows = of_rows(sizes, where, args.repeats)
    rows += of_layer(sizes, where, args.repeats)
    for experts in args.experts:
        rows += of_experts(sizes, experts, where, args.repeats)
    ratios: dict[str, tuple[float, float]] = {}
    for row in rows:
        # From a graph where there is one, which comes after the form as called.
        if row.name.startswith("fused"):
            ratios[row.shape] = (row.forward / row.forward_floor, row.both / row.both_floor)
    for shape, (one, two) in ratios.items():
        print(f"{shape}: forward {one:.3f}, both {two:.3f} times the floor")
    write_json(args.json, "experts", where, rows, {"errors": off, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
