"""FP8 beside bfloat16: ``python -m benchmarks.fp8 [--steps 60] [--json FILE]`` on a CUDA device,
some minutes.

First the encoder of operands alone, of a matrix as it lies and of its transpose, against the bytes
that must move. Then products of the sizes of K3.1, with 8192 tokens: time of the forward and of all
three products, as they are launched and replayed from a CUDA graph, and how far the result is from
float32's. Last the loss of a small K3.1, trained alike with exact products and with FP8 ones.
``--device cpu --small`` runs all of it on references, to see that it runs; ``--tune`` only times
the encoder's tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import Work, error, graphed, take_turns
from benchmarks.op import variants
from configs import tiny
from k31fn import config, data, model, trainer
from k31fn import device as devices
from k31fn.autodiff import value_and_grad
from k31fn.kernels.fp8_encode import Groups, fp8_encode
from k31fn.kernels.registry import use_impl
from k31fn.kernels.scaled_matmul import scaled_matmul
from k31fn.layers import dsa, indexer, kda, latent_moe, mla, mlp
from k31fn.precision import Products

__all__ = ["TUNED", "curve", "encoders", "main", "products"]

TOKENS = 8192
SIZES = (
    (7168, 12288),
    (12288, 7168),
    (7168, 3584),
    (7168, 33792),
)  # of KDA, its output, the latent, a dense MLP
KINDS: tuple[Products, ...] = ("exact", "fp8_rows", "fp8_blocks")
SCALINGS: tuple[Groups, ...] = ("rows", "blocks", "tiles")
BYTES_A_MS = 4.3e9  # of one H200
TUNED = (
    {"warps": (4, 8), "per_core": (16, 64)},
    {"warps": (4, 8), "rows": (32, 64)},
    {"warps": (4, 8, 16), "columns": (32, 64)},
    {"warps": (8, 16)},
    {"warps": (4, 8), "rows": (64, 128), "columns": (32, 64)},
)
"""Values that the tuner may choose, per kernel of the encoder's table."""
_TUNED_ON: tuple[tuple[Groups, bool], ...] = (
    ("rows", False),
    ("blocks", False),
    ("blocks", True),
    ("tiles", True),
    ("rows", True),
)


def _product(kind: Products) -> Callable[[Tensor, Tensor], Tensor]:
    if kind == "exact":
        return torch.matmul
    return lambda x, w: scaled_matmul(x, w, kind.removeprefix("fp8_"), True)


def _replayed(works: dict[str, list[Work]], where: torch.device) -> dict[str, list[Work]]:
    """The same from CUDA graphs, each of all sets of inputs; elsewhere the works themselves."""
    if where.type != "cuda":
        return works
    return {
        name: [graphed(lambda some=some: [work() for work in some], where)]
        for name, some in works.items()
    }


def _compiled(x: Tensor, scaling: Groups) -> dict[str, Callable[..., Any]]:
    """The reference as torch compiles it, if it does."""
    torch.compiler.reset()  # or it compiles no more after some shapes
    compiled = torch.compile(fp8_encode.reference, dynamic=False)
    try:
        compiled(x, scaling)
    except Exception as refused:
        print(f"torch.compile of {list(x.shape)} {scaling}: {str(refused).splitlines()[0][:100]}")
        return {}
    return {"compiled": compiled}


def encoders(shapes: Any, where: torch.device) -> list[dict[str, Any]]:
    """A row per shape, order of memory and scaling: milliseconds of each encoder, and of the bytes
    alone.
    """
    rows: list[dict[str, Any]] = []
    sets = 2  # more than the cache holds; a graph runs all of them
    for (lines, width), transposed in ((shape, t) for shape in shapes for t in (False, True)):
        drawn = [torch.randn(lines, width, device=where).bfloat16() for _ in range(sets)]
        xs = [x.mT if transposed else x for x in drawn]
        for scaling in SCALINGS:
            forms: dict[str, Callable[..., Any]] = {
                "default": fp8_encode,
                "reference": fp8_encode.reference,
            }
            if where.type == "cuda" and (lines, width) == shapes[0]:  # it takes seconds
                forms |= _compiled(xs[0], scaling)
            works: dict[str, list[Work]] = {
                n: [functools.partial(f, x, scaling) for x in xs] for n, f in forms.items()
            }
            runs = sets if where.type == "cuda" else 1
            times = {
                name: t / runs for name, t in take_turns(_replayed(works, where), where, 20).items()
            }
            codes, scales = fp8_encode(xs[0], scaling)
            moved = xs[0].nbytes + codes.nbytes + scales.nbytes
            rows.append(
                {
                    "size": list(xs[0].shape),
                    "transposed": transposed,
                    "scaling": scaling,
                    "floor_ms": moved / BYTES_A_MS,
                    "ms": times,
                    "terabytes_a_second": moved / times["default"] / 1e9,
                }
            )
            peers = "".join(
                f"   {name} {t:8.4f} ms" for name, t in times.items() if name != "default"
            )
            print(
                f"encode {xs[0].shape[0]} x "
                f"{xs[0].shape[1]:<6}{'transposed' if transposed else '':<11}{scaling:<7}"
                f"{times['default']:8.4f} ms {rows[-1]['terabytes_a_second']:5.2f} TB/s "
                f"{rows[-1]['floor_ms'] / times['default']:5.0%}{peers}",
                flush=True,
            )
    return rows


def tune(lines: int, width: int, where: torch.device) -> None:
    """Prints the times of all tiles of :data:`TUNED`, the best of each kernel first."""
    kernels = importlib.import_module(fp8_encode.implementations["triton"].kernels)
    drawn = [torch.randn(lines, width, device=where).bfloat16() for _ in range(2)]
    found: dict[int, list[tuple[float, str]]] = {}
    for position, tile, tiles in variants(kernels, where.type, TUNED):
        scaling, transposed = _TUNED_ON[position]
        works: list[Work] = [
            functools.partial(fp8_encode, x.mT if transposed else x, scaling) for x in drawn
        ]
        try:
            with (
                mock.patch.dict(kernels._TILES, {where.type: tiles}),
                use_impl(fp8_encode="triton"),
            ):
                took = take_turns(_replayed({"": works}, where), where, 20)[""] / 2
        except (
            Exception
        ) as refused:  # too many registers or too much shared memory: not a candidate
            print(f"{tile}: {type(refused).__name__}: {str(refused).splitlines()[0][:80]}")
            continue
        found.setdefault(position, []).append((took, str(tile)))
    for position, some in found.items():
        scaling, transposed = _TUNED_ON[position]
        print(
            f"{scaling}{' transposed' if transposed else ''}, the table has "
            f"{kernels._TILES[where.type][position]}"
        )
        for took, tile in sorted(some):
            print(f"  {took:.4f} ms {tile}", flush=True)


def products(tokens: int, sizes: Any, where: torch.device) -> list[dict[str, Any]]:
    """A row per size and kind; kinds that cannot run say why."""
    rows: list[dict[str, Any]] = []
    for features, columns in sizes:
        x, ct = (torch.randn(tokens, n, device=where).bfloat16() for n in (features, columns))
        w = (torch.randn(features, columns, device=where) / features**0.5).bfloat16()
        want = x.float() @ w.float()
        forward, both, errors = {}, {}, {}
        for kind in KINDS:
            f = _product(kind)
            grad = value_and_grad(
                lambda x, w, f=f, ct=ct: (f(x, w) * ct).sum(dtype=torch.float32), (0, 1)
            )
            try:
                errors[kind] = error(f(x, w), want)
            except ValueError as refused:
                print(f"{features} x {columns} {kind}: {refused}")
                continue
            forward[kind], both[kind] = (
                [lambda f=f, x=x, w=w: f(x, w)],
                [lambda g=grad, x=x, w=w: g(x, w)],
            )
        works = (forward, both, _replayed(forward, where), _replayed(both, where))
        names = ("forward_ms", "both_ms", "forward_graph_ms", "both_graph_ms")
        times = {name: take_turns(some, where, 10) for name, some in zip(names, works, strict=True)}
        for kind in forward:
            took = {name: some[kind] for name, some in times.items()}
            rows.append(
                {"size": [tokens, features, columns], "kind": kind, **took, "error": errors[kind]}
            )
            shown = " ".join(f"{t:8.3f}" for t in took.values())
            print(
                f"{tokens} x {features} x {columns:<6} {kind:<12}{shown} ms   error "
                f"{errors[kind]:.4f}",
                flush=True,
            )
    return rows


def recipe(kind: Products, steps: int, small: bool) -> config.Recipe:
    """A K3.1 whose products are all of sizes that 128 divides, or configs/tiny.py's."""
    base = tiny.train()
    if not small:
        width = 1024
        attention = mla.Config(
            width,
            8,
            q_lora_rank=256,
            kv_lora_rank=128,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=128,
        )
        moe = latent_moe.Config(
            width, latent_size=512, expert_size=256, shared_size=512, num_experts=16, top_k=4
        )
        sublayers = model.Sublayers(
            kda=kda.Config(width, num_heads=8, head_dim=128),
            full_attention=dsa.Config(
                attention, indexer.Config(width, 256, num_heads=8, head_dim=64), topk=128
            ),
            dense=mlp.Config(width, 2048),
            moe=moe,
        )
        cfg = dataclasses.replace(base.model, hidden_size=width, sublayers=sublayers)
        base = dataclasses.replace(base, model=cfg, batch_size=8, length=512)
    o = dataclasses.replace(base.optimizer, kind="adamw", peak_lr=1e-3)
    return dataclasses.replace(
        base,
        compute="bfloat16",
        products=kind,
        remat="layer",
        steps=steps,
        optimizer=o,
        data=data.Config(path="stdlib"),
    )


def curve(made: config.Recipe, where: torch.device) -> tuple[list[float], float]:
    """Losses of all steps, and seconds of a step (without the first)."""
    state = trainer.init_state(trainer.lay_out(made), where)
    step = trainer.make_step(trainer.lay_out(made))
    dataset, losses = trainer.load_corpus(made).dataset, []
    started = time.perf_counter()
    for i in range(made.steps):
        batches = trainer.make_batches(made, trainer.rows_at(dataset, i), where)
        state, numbers = step(state, batches, made.optimizer.peak_lr * min(1.0, (i + 1) / 10))
        losses.append(float(numbers.loss))
        if i == 0:
            devices.synchronize(where)
            started = time.perf_counter()
    devices.synchronize(where)
    return losses, (time.perf_counter() - started) / max(1, made.steps - 1)


def draw(curves: dict[str, Any], out: Path) -> None:
    """The losses, and how far those with FP8 products are above the others, both as means of ten
    steps.
    """
    from matplotlib.figure import Figure

    def smooth(xs: list[float]) -> list[float]:
        return [sum(xs[i - 9 : i + 1]) / 10 for i in range(9, len(xs))]

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    exact = smooth(curves["exact"]["losses"])
    for i, (kind, found) in enumerate(curves.items()):
        mean = smooth(found["losses"])
        left.plot(range(10, 10 + len(mean)), mean, color=f"C{i}", linewidth=1, label=kind)
        if kind != "exact":
            above = [a - b for a, b in zip(mean, exact, strict=True)]
            right.plot(
                range(10, 10 + len(mean)),
                above,
                color=f"C{i}",
                linewidth=1,
                label=f"{kind} - exact",
            )
    for axes, text in ((left, "loss, nats per byte"), (right, "difference, nats per byte")):
        axes.set_title(f"{text}, mean of 10 steps", fontsize=9, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(out, dpi=130)


def main() -> None:
    """Prints all tables; writes the file after each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--device", default="", help="by default the best of this machine")
    parser.add_argument("--small", action="store_true", help="small products and configs/tiny.py")
    parser.add_argument(
        "--tune", action="store_true", help="times the encoder's tiles, and nothing else"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--plot", type=Path, help="draw the losses here, at least 10 steps")
    given = parser.parse_args()
    where = devices.parse(given.device) if given.device else devices.default()
    if where.type == "cpu" and not given.small:
        parser.error("on the cpu only --small: the products of K3.1 take minutes each there")
    found: dict[str, Any] = {
        "hardware": devices.name(where),
        "versions": {"torch": torch.__version__},
    }

    def keep(**more: Any) -> None:
        found.update(more)
        if given.json:
            given.json.write_text(json.dumps(found, indent=2) + "\n")

    if given.tune:
        tune(TOKENS, SIZES[0][0], where)
        return
    lines_and_width = (
        ((256, 384),) if given.small else ((TOKENS, SIZES[0][0]), (TOKENS, SIZES[0][1]))
    )
    keep(encoders=encoders(lines_and_width, where))
    keep(
        products=products(256, ((256, 384),), where)
        if given.small
        else products(TOKENS, SIZES, where)
    )
    curves: dict[str, Any] = {}
    for kind in KINDS:
        try:
            losses, seconds = curve(recipe(kind, given.steps, given.small), where)
        except ValueError as refused:
            print(f"{kind}: {refused}")
            continue
        curves[kind] = {"losses": losses, "seconds_per_step": seconds}
        keep(curves=curves)
        shown = " ".join(f"{x:.4f}" for x in losses[:: max(1, given.steps // 8)])
        last = losses[-max(1, given.steps // 6) :]
        print(
            f"{kind:<12}{seconds:7.3f} s a step   mean of the last {len(last)}: "
            f"{sum(last) / len(last):.4f}   {shown}"
        )
    if given.plot:
        draw(curves, given.plot)


if __name__ == "__main__":
    main()
