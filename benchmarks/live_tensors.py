"""What lives between forward and backward under each recomputation scheme, as a picture:
``python -m benchmarks.live_tensors docs/recompute.png``.

A run of 16 layers of two sublayers, joined to the residual state by AttnRes, in bfloat16 on the
CPU. A sublayer is two products with a SiLU between them. What a layer makes, and what autograd
saves while it runs, is noted with its layer and part. After the forward the storages that still
live are counted; nothing of the picture is computed from a formula. What lives besides is the row
*rest*: all live bytes less those that were noted. A block that AttnRes opens is part of all later
states, so ``cross_layer`` keeps it too.
"""

from __future__ import annotations

import argparse
import functools
import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from k31fn import params, random, tree
from k31fn.autodiff import keep, vjp
from k31fn.layers import attn_res, norm
from k31fn.model.layers import Remat, run_steps
from k31fn.testing import live_bytes

__all__ = ["PARTS", "LiveTensors", "draw", "live_tensors", "main"]

LAYERS, TOKENS, WIDTH, BLOCK = 16, 64, 256, 4
PARTS = (
    "input of the layer",
    "inside of mixes and norms",
    "inside of the branches",
    "output of the branches",
)
_CALLER = -1  # in the place of a layer
_RESIDUAL = attn_res.Config()


class LiveTensors(NamedTuple):
    """What lives between forward and backward under a scheme, in units of one hidden state.

    Attributes:
        scheme: a value of :data:`k31fn.model.Remat`.
        layers: by layer and part.
        rest: all that lives besides.
    """

    scheme: str
    layers: dict[tuple[int, str], float]
    rest: float

    def totals(self) -> dict[str, float]:
        """By part, of all layers."""
        totals: dict[str, float] = {}
        for part in PARTS:
            totals[part] = sum(self.layers.get((i, part), 0.0) for i in range(LAYERS))
        return totals


class _Notes:
    """Which storages were made in which layer and part; does not keep them alive."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, str, weakref.ref[Any]]] = []
        self._noted: dict[int, weakref.ref[Any]] = {}

    def note(self, layer: int, part: str, *tensors: Tensor) -> None:
        """Notes these, but for those that were noted before, as what a layer passes on."""
        for t in tensors:
            storage = t.untyped_storage()
            # By id, with a reference: the id of a storage that is gone may be used again.
            before = self._noted.get(id(storage))
            if before is None or before() is not storage:
                ref = weakref.ref(storage)
                self._noted[id(storage)] = ref
                self._entries.append((layer, part, ref))

    def alive(self) -> Counter[tuple[int, str]]:
        """Bytes of what still lives."""
        nbytes: Counter[tuple[int, str]] = Counter()
        for layer, part, ref in self._entries:
            storage = ref()
            if storage is not None:
                nbytes[layer, part] += storage.nbytes()
        return nbytes


def _branch(notes: _Notes, layer: int, w: Any, x: Tensor) -> tuple[Tensor, Any]:
    # Each is noted before the next operation saves it, which would note it as another part.
    up = x @ w["up"]
    notes.note(layer, "inside of the branches", up)
    hidden = F.silu(up)
    notes.note(layer, "inside of the branches", hidden)
    y = hidden @ w["down"]
    notes.note(layer, "output of the branches", y)
    return y, ()


def _layer(
    notes: _Notes, layer: int, p: Any, carry: Any, shared: Any, per_layer: Any
) -> tuple[Any, Any]:
    del shared, per_layer
    notes.note(layer, "input of the layer", *tree.leaves(carry))
    opens = layer % BLOCK == 0
    for name in ("attention", "ffn"):

        def sublayer(h: Tensor, name: str = name) -> tuple[Tensor, Any]:
            x = norm.apply(p["norm"], h, norm.Config(WIDTH))
            notes.note(layer, "inside of mixes and norms", h, x)
            return keep(name, functools.partial(_branch, notes, layer))(p["branch"], x)

        def saved(t: Tensor) -> Tensor:
            notes.note(layer, "inside of mixes and norms", t)
            return t

        opens_block = opens and name == "attention"
        with saved_tensors_hooks(saved, lambda t: t):
            carry, _ = attn_res.connect(
                p["mix"], carry, _RESIDUAL, sublayer, opens_block=opens_block
            )
    return carry, ()


def _without_branch(p: Any) -> Any:
    return {**p, "branch": ()}


def live_tensors(scheme: Remat) -> LiveTensors:
    """Runs the forward under a scheme and counts what it leaves for the backward."""
    matrix = params.ParamSpec((WIDTH, WIDTH), ("", ""), params.Normal(0.02))
    spec = {
        "mix": attn_res.specs(_RESIDUAL, WIDTH),
        "norm": norm.specs(norm.Config(WIDTH)),
        "branch": {"up": matrix, "down": matrix},
    }
    weights = [params.init(spec, random.key(0), dtype=torch.bfloat16)] * LAYERS
    x = random.normal(random.key(1), (1, TOKENS, WIDTH)).to(torch.bfloat16)
    notes = _Notes()
    # Those of the caller, which autograd saves too.
    notes.note(_CALLER, "weights", *tree.leaves(weights))
    steps = [functools.partial(_layer, notes, i) for i in range(LAYERS)]

    def run(weights: Any, x: Tensor) -> Any:
        # A state like any between layers, not the argument itself, which lives anyway.
        carry = tree.map(lambda t: t * 1, attn_res.start(x, _RESIDUAL))
        per_layer = [()] * LAYERS
        carry, _ = run_steps(
            steps, weights, (), carry, (), per_layer, remat=scheme, light=_without_branch
        )
        return carry

    gc.collect()
    with live_bytes() as live:
        out, pull = vjp(run, weights, x)
        # What is new in the result is the caller's: it is not kept for the backward.
        notes.note(_CALLER, "result", *tree.leaves(out))
        alive = notes.alive()
        total = live.current - alive[_CALLER, "result"]
    shares: dict[tuple[int, str], float] = {}
    for (layer, part), nbytes in alive.items():
        if layer != _CALLER:
            shares[layer, part] = nbytes / x.nbytes
    rest = total / x.nbytes - sum(shares.values())
    del out, pull
    return LiveTensors(scheme, shares, rest)


def draw(rows: list[LiveTensors], out: Path) -> None:
    """A panel for each scheme: a bar for each layer, of its parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    panels = figure.subplots(1, len(rows), sharey=True)
    for axes, row in zip(panels, rows, strict=True):
        left = [0.0] * LAYERS
        for color, part in enumerate(PARTS):
            widths = [row.layers.get((i, part), 0.0) for i in range(LAYERS)]
            axes.barh(range(1, LAYERS + 1), widths, left=left, color=f"C{color}", label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.barh([0], [row.rest], color="0.6", label="rest, of all layers")
        axes.set_title(f"{row.scheme}: {sum(left) + row.rest:.1f}", fontsize=10, loc="left")
        axes.set_xlabel("hidden states (B x S x D)", fontsize=8)
        axes.tick_params(labelsize=8)
    # The same scale in all panels: they are to be compared.
    largest = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(0, 1.02 * largest)
    numbers = range(1, LAYERS + 1, 3)
    panels[0].set_ylabel("layer", fontsize=8)
    panels[0].set_yticks([0, *numbers], ["rest", *map(str, numbers)])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(out, dpi=130)


def main() -> None:
    """Measures and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the picture, docs/recompute.png")
    args = parser.parse_args()
    rows = [live_tensors(scheme) for scheme in get_args(Remat)]
    for row in rows:
        totals = row.totals()
        parts = ", ".join(f"{part} {totals[part]:.1f}" for part in PARTS)
        print(f"{row.scheme}: {parts}, rest {row.rest:.1f}")
    draw(rows, args.out)


if __name__ == "__main__":
    main()
