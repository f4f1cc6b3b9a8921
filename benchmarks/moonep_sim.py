"""What MoonEP does to a skewed router, simulated:
``python -m benchmarks.moonep_sim docs/moonep.png --json benchmarks/results/moonep_sim.json``.

Routes are drawn for every rank, with skews from uniform to a router that has collapsed, and go
through the plan that training uses (:mod:`k31fn.parallel.moonep.plan`). Counted, not computed from
a formula: the busiest rank's rows over the mean, replicas, and the rows and weights that travel.

Times are a model of one layer's routed experts at K3.1's width, forward and backward, from rates
that are arguments: products at their rate or weights at that of memory, whichever is slower, on the
busiest rank; then what the busiest rank sends or receives, at the rate of its link. Nothing hides
anything, and launches and waits cost nothing.

* plain: a copy goes to the owner of its expert.
* fixed: MoonEP with shapes that no count decides, as ``moe.placement="moonep"`` runs: every token
  to every rank, and slots from every rank, as few as these routes need.
* all slots: the same with as many slots as a rank owns experts, which no routes exceed.
* exact: MoonEP that sends each token once to each rank that computes a copy of it, and each replica
  once, as copies through the memory of peers could.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k31fn.kernels.experts import sort_by_expert
from k31fn.parallel.moonep.plan import make_plan, places_of

__all__ = ["RANKS", "SKEWS", "Layer", "Outcome", "draw", "main", "markdown", "simulate"]

RANKS = (8, 16, 32, 64, 128, 256, 512)
_PLACEMENTS = ("plain", "fixed", "all slots", "exact")
_SAMPLED = 32  # tokens of each rank that are drawn; each stands for an equal share of all


class Layer(NamedTuple):
    """Sizes of a layer and rates of its devices.

    Attributes:
        tokens: of a rank.
        top_k: experts of a token.
        latent: features of a row.
        inner: inner width of an expert.
        flops: products a second.
        memory: bytes a second of a device's memory.
        node: ranks that the fast link joins.
        links: bytes a second each way of a rank, inside a node and between nodes.
    """

    tokens: int = 8192
    top_k: int = 16
    latent: int = 3584
    inner: int = 3072
    flops: float = 700e12
    memory: float = 4.3e12
    node: int = 8
    links: tuple[float, float] = (400e9, 50e9)

    @property
    def expert_bytes(self) -> int:
        """Of one expert's three matrices, in bfloat16."""
        return 3 * self.latent * self.inner * 2

    def link(self, num_ranks: int) -> float:
        """The rate of the slower link that so many ranks need."""
        return self.links[num_ranks > self.node]


class Outcome(NamedTuple):
    """What a skew does on so many ranks; rows and experts are the busiest rank's.

    Attributes:
        skew: its name.
        ranks: how many.
        experts: of the layer.
        imbalance: rows over the mean, plain EP.
        replicas: experts copied, over all ranks.
        slots: experts that a rank needs besides its own.
        sent: replicas that a home sends.
        violations: of the plan.
        milliseconds: by placement.
        gigabytes: that a rank sends or receives, by placement.
    """

    skew: str
    ranks: int
    experts: int
    imbalance: float
    replicas: int
    slots: int
    sent: int
    violations: int
    milliseconds: dict[str, float]
    gigabytes: dict[str, float]


def _zipf(exponent: float) -> Callable[[int, torch.Generator], Tensor]:
    def weights(num_experts: int, generator: torch.Generator) -> Tensor:
        order = torch.randperm(num_experts, generator=generator)
        return -exponent * torch.log1p(order.double())

    return weights


def _hot(num_hot: int) -> Callable[[int, torch.Generator], Tensor]:
    def weights(num_experts: int, generator: torch.Generator) -> Tensor:
        del generator
        return 1e3 * (torch.arange(num_experts) < num_hot).double()

    return weights


SKEWS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "uniform": _zipf(0.0),
    "zipf 0.5": _zipf(0.5),
    "zipf 1": _zipf(1.0),
    "zipf 1.5": _zipf(1.5),
    "one hot expert": _hot(1),
    "collapsed": _hot(16),
}
"""Log-weights of the experts: a token draws its experts by them, each once."""


def simulate(skew: str, num_ranks: int, layer: Layer, seed: int = 0) -> Outcome:
    """Draws routes, plans them, and counts."""
    # 896 experts where the ranks divide them, else as few more as they do divide.
    num_experts = -(-896 // num_ranks) * num_ranks
    num_own = num_experts // num_ranks
    generator = torch.Generator().manual_seed(seed)
    weights = SKEWS[skew](num_experts, generator)
    routes = _draw(weights, num_ranks, layer.top_k, generator)  # [R tokens K]
    owners = routes // num_own
    expert = routes.flatten(0, 1)
    copies = sort_by_expert(expert, num_experts)
    ranks = torch.arange(num_ranks)[:, None]
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int64)
    counts = counts.scatter_add(1, routes.flatten(1), torch.ones_like(routes.flatten(1)))
    num_rows = _SAMPLED * layer.top_k
    plan = make_plan(counts, num_rows, num_own)
    number = copies.inverse - (copies.sizes.cumsum(0) - copies.sizes)[expert]
    targets = places_of(plan, expert, number)[0].view_as(routes)

    share = layer.tokens / _SAMPLED
    plain_rows = torch.zeros(num_ranks, dtype=torch.int64)
    plain_rows = plain_rows.scatter_add(0, owners.flatten(), torch.ones_like(owners.flatten()))
    filled = plan.slots >= 0
    homes = (plan.slots // num_own)[filled]
    sent = torch.bincount(homes, minlength=num_ranks)
    slots = int(filled.sum(1).max())
    copied = max(slots, int(sent.max()))
    others = num_ranks - 1
    row = 2 * layer.latent  # bytes
    travelling = {
        "plain": share * row * _busiest(owners, ranks, once=False) * 4,
        "fixed": layer.tokens * row * others * 4 + 2 * others * slots * layer.expert_bytes,
        "all slots": layer.tokens * row * others * 4 + 2 * others * num_own * layer.expert_bytes,
        "exact": share * row * _busiest(targets, ranks, once=True) * 4
        + 2 * copied * layer.expert_bytes,
    }
    busy = int(plain_rows.argmax())
    own = (counts.sum(0).unflatten(0, (num_ranks, -1)) > 0).sum(1)
    balanced = int((plan.sizes > 0).sum(1).max())
    computing = {
        "plain": _compute(layer, share * int(plain_rows[busy]), int(own[busy])),
        "fixed": _compute(layer, share * num_rows, balanced),
    }
    computing["exact"] = computing["all slots"] = computing["fixed"]
    seconds = {k: computing[k] + travelling[k] / layer.link(num_ranks) for k in travelling}
    return Outcome(
        skew,
        num_ranks,
        num_experts,
        float(plain_rows.max()) / num_rows,
        int(filled.sum()),
        slots,
        int(sent.max()),
        int(plan.violations.sum()),
        {k: round(1e3 * v, 3) for k, v in seconds.items()},
        {k: round(v / 1e9, 4) for k, v in travelling.items()},
    )


def _draw(weights: Tensor, num_ranks: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Experts of each rank's tokens, drawn without repetition: the largest of Gumbel noise."""
    routes: list[Tensor] = []
    for _ in range(num_ranks):
        noise = torch.rand(_SAMPLED, len(weights), generator=generator).clamp(min=1e-30)
        routes.append((weights - (-noise.log()).log()).topk(top_k, dim=1).indices)
    return torch.stack(routes)


def _busiest(targets: Tensor, ranks: Tensor, *, once: bool) -> int:
    """Rows of the rank that sends or receives most to or from others; ``once``: a token to a rank
    once.
    """
    num_ranks = len(ranks)
    if once:
        targets = targets.sort(dim=2).values
        again = torch.zeros_like(targets, dtype=torch.bool)
        again[:, :, 1:] = targets[:, :, 1:] == targets[:, :, :-1]
        targets = torch.where(again, ranks[:, :, None], targets)  # to itself: it does not travel
    pair = (ranks[:, :, None] * num_ranks + targets).flatten()
    rows = torch.bincount(pair, minlength=num_ranks**2).view(num_ranks, num_ranks)
    rows = rows.masked_fill(torch.eye(num_ranks, dtype=torch.bool), 0)
    return max(int(rows.sum(0).max()), int(rows.sum(1).max()))


def _compute(layer: Layer, rows: float, experts: int) -> float:
    """Seconds of forward and backward of so many rows, by weights of so many experts."""
    products = 3 * 3 * 2 * layer.latent * layer.inner * rows
    # Read forward and backward, and a gradient as large is written.
    moved = 3 * experts * layer.expert_bytes
    return max(products / layer.flops, moved / layer.memory)


def markdown(found: Sequence[Outcome]) -> str:
    """A table with a row per skew and number of ranks; times in milliseconds."""
    lines = [
        "| skew | ranks | busiest / mean | replicas | slots | plain | fixed | all slots | exact |",
        "|" + "---|" * 9,
    ]
    for o in found:
        times = " | ".join(f"{o.milliseconds[k]:.1f}" for k in _PLACEMENTS)
        lines.append(
            f"| {o.skew} | {o.ranks} | {o.imbalance:.2f} | {o.replicas} | {o.slots} | {times} |"
        )
    return "\n".join(lines)


def draw(found: Sequence[Outcome], out: Path) -> None:
    """Imbalance, replicas and times by the number of ranks, a line per skew."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    panels: list[tuple[str, Callable[[Outcome], float], str]] = [
        ("busiest rank's rows over the mean (MoonEP: 1)", lambda o: o.imbalance, "log"),
        ("replicas per rank", lambda o: o.replicas / o.ranks, "linear"),
        ("time of plain EP over MoonEP, fixed shapes", _gain("fixed"), "log"),
        ("time of plain EP over MoonEP, exact copies", _gain("exact"), "log"),
    ]
    for panel, (title, value, scale) in zip(axes.flat, panels, strict=True):
        for skew in dict.fromkeys(o.skew for o in found):
            rows = [o for o in found if o.skew == skew]
            panel.plot([o.ranks for o in rows], [value(o) for o in rows], "o-", ms=3, label=skew)
        panel.set(title=title, xscale="log", yscale=scale, xlabel="ranks of ep")
        panel.set_xticks(RANKS, [str(n) for n in RANKS], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        if "time" in title:
            panel.axhline(1, color="black", lw=0.8)
    axes[0, 0].legend(fontsize=8)
    temporary = out.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=90)
    temporary.replace(out)
    plt.close(figure)


def _gain(placement: str) -> Callable[[Outcome], float]:
    return lambda o: o.milliseconds["plain"] / o.milliseconds[placement]


def main() -> None:
    """Simulates, prints and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the picture, docs/moonep.png")
    parser.add_argument("--json", type=Path, help="all numbers")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, default=Layer().tokens, help="of a rank")
    parser.add_argument(
        "--links", type=float, nargs=2, default=(400, 50), help="GB/s in a node, and between nodes"
    )
    args = parser.parse_args()
    for name in ("ranks", "links"):
        if min(getattr(args, name)) <= (name == "ranks"):
            parser.error(f"--{name} {getattr(args, name)}: at least 2 ranks, and links above 0")
    layer = Layer(tokens=args.tokens, links=(args.links[0] * 1e9, args.links[1] * 1e9))
    found: list[Outcome] = []
    for skew in SKEWS:
        found += [simulate(skew, n, layer) for n in args.ranks]
    print(markdown(found))
    if args.json:
        rows: list[Any] = [o._asdict() for o in found]
        args.json.write_text(json.dumps({"layer": layer._asdict(), "rows": rows}, indent=1) + "\n")
    draw(found, args.out)


if __name__ == "__main__":
    main()
