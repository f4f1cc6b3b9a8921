"""A training step, whole: tokens per second, and where its time goes.

``python -m benchmarks.step configs/h200_4l_e32.py``, with any field of the recipe after it:
``--model.moe.num-experts 8 --length 4096``. Steps run launched kernel by kernel (``eager``) and
captured as one graph (``captured``, :func:`k31fn.jit`), from the same state; a number of every leaf
of the state after them, made of all its bits, tells whether they are equal.

MFU: the operations of :mod:`k31fn.model.flops` (three times the forward's products; what is
recomputed does not count), times tokens per second, over 989 TFLOP/s, an H200's dense bfloat16 rate
by its data sheet. Parts are sums of the times of kernels (:mod:`benchmarks.step_parts`);
``elementwise`` is what torch launches itself besides products, in whatever part; ``idle``, from the
first kernel of a step to its last, is where none runs. Peaks are of tensors, and of what torch's
allocator holds, which a graph's memory is a part of. Initial values are drawn on the device by
torch, for speed: they are not those of a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import told
from benchmarks.step_parts import matched, profiled, summary
from k31fn import config, model, params, random, trainer, tree
from k31fn import device as devices
from k31fn.kernels import choice
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.model.flops import flops_per_token
from k31fn.params import Normal, ParamSpec, TruncatedNormal
from k31fn.trainer.console import View
from k31fn.trainer.current_phase import JitMode, begin_phase
from k31fn.trainer.phases import learning_rate
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.warmup import warm_up

__all__ = ["main"]

_PEAK_FLOPS = 989e12
_MODES: dict[str, JitMode] = {"eager": "off", "captured": "auto"}
_CHUNK = 1 << 26  # elements of which a number is made at a time


class Stepper:
    """A run's steps in one mode: on the batches of its text, or on one of random ids again and
    again.

    Attributes:
        notes: what was said about capturing.
        init_s: seconds in which the state was made.
    """

    def __init__(self, recipe: config.Recipe, device: torch.device, mode: JitMode, text: bool):
        self.notes: list[str] = []
        self._recipe = recipe
        self._device = device
        layout = trainer.lay_out(recipe)
        began = time.perf_counter()
        self._state: Any = _draw_state(layout, device)
        devices.synchronize(device)
        self.init_s = time.perf_counter() - began
        self._phase = begin_phase(layout, 0, device, mode, self.notes.append)
        self._text = trainer.load_corpus(recipe).dataset if text else None
        self._batches = [] if text else _random_batches(recipe, device)
        self._done = 0

    def step(self) -> Tensor:
        """One more; its metrics."""
        lr = devices.number(learning_rate(self._recipe, self._done), self._device)
        if self._text is not None:
            rows = self._text.batch_at(self._done)
            self._batches = trainer.make_batches(self._recipe, rows, self._device)
        self._state, metrics = self._phase.step(self._state, self._batches, lr)
        self._done += 1
        return metrics.flat()

    def timed(self) -> tuple[float, Tensor]:
        """Milliseconds of a step that is waited for, and its metrics."""
        began = time.perf_counter()
        metrics = self.step()
        devices.synchronize(self._device)
        return 1e3 * (time.perf_counter() - began), metrics

    def digests(self) -> list[int]:
        """A number of each leaf of the state, of all its bits and their places."""
        return [_digest(x) for x in tree.leaves(self._state)]


def _draw_state(layout: trainer.RankLayout, device: torch.device) -> trainer.TrainState:
    """The state before the first step, its normal numbers by torch's generator."""
    recipe = layout.recipe
    generator = torch.Generator(device).manual_seed(recipe.seed)
    key = random.key(recipe.seed, device=device)
    dtype = recipe.precision.param

    def leaf(path: str, spec: ParamSpec) -> Tensor:
        if not isinstance(spec.init, Normal | TruncatedNormal):
            return params.draw(path, spec, key, dtype=dtype)
        like = params.abstract(spec, dtype=dtype)
        x = torch.empty(spec.shape, dtype=like.dtype, device=device)
        return x.normal_(0, spec.init.std, generator=generator)

    weights = tree.map_with_path(leaf, layout.specs)
    return trainer.first_state(layout, weights, model.init_balance(recipe.model, device=device))


def _random_batches(recipe: config.Recipe, device: torch.device) -> list[model.Batch]:
    """The micro-batches of a step on random ids."""
    size = (recipe.batch_size, recipe.length)
    ids = torch.randint(recipe.model.vocab_size, size, generator=torch.Generator().manual_seed(0))
    whole = model.make_batch(ids, vocab_size=recipe.model.vocab_size)
    counts = {"num_labels": whole.num_labels, "num_queries": whole.num_queries}
    batches = []
    for part in ids.split(recipe.batch_size // recipe.micro_batches):
        batch = model.make_batch(part, vocab_size=recipe.model.vocab_size)
        batch = dataclasses.replace(batch, **counts)
        batches.append(tree.map(lambda x: x.to(device), batch))
    return batches


def _digest(x: Tensor) -> int:
    """A number of the bits of a tensor, each element's by its place."""
    words = x.detach().contiguous().view(-1).view(torch.uint8)
    size = x.element_size()
    total = 0
    for first in range(0, len(words), _CHUNK * size):
        bits = words[first : first + _CHUNK * size].view(_WORDS[size]).to(torch.int64)
        places = torch.arange(len(bits), device=x.device)
        # odd factors, so that no bit is lost; sums wrap around
        total += int(bits.mul_(places.mul_(0x9E3779B1).add_(first).mul_(2).add_(1)).sum())
    return total % (1 << 64)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def measure(
    recipe: config.Recipe, device: torch.device, name: str, options: argparse.Namespace
) -> tuple[dict[str, Any], list[Any], Stepper]:
    """The times and memory of a mode; the bits of its metrics and state; and its steps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    stepper = Stepper(recipe, device, _MODES[name], options.text)
    held = devices.memory_allocated(device)
    devices.reset_peak_memory(device)
    times: list[float] = []
    bits: list[Any] = []
    with record_impls() as impls:
        for _ in range(options.steps):
            ms, metrics = stepper.timed()
            times.append(ms)
            bits.append(metrics.tolist())
    bits.append(stepper.digests())
    began = time.perf_counter()
    for _ in range(options.row):
        stepper.step()
    devices.synchronize(device)
    in_a_row = 1e3 * (time.perf_counter() - began) / options.row
    tokens = recipe.batch_size * recipe.length
    rate = 1e3 * tokens / in_a_row
    flops = flops_per_token(recipe.model, recipe.length, "all")
    found: dict[str, Any] = {
        "tokens_per_second": rate,
        "in_a_row_ms": in_a_row,
        "step_ms": statistics.median(times[3:] or times),
        "steps_ms": times,
        "init_s": stepper.init_s,
        "state_bytes": held,
        "peak_bytes": devices.peak_memory(device),
        "notes": stepper.notes,
        "losses": [metrics[0] for metrics in bits[:-1]],
        "references": sorted(op for op, impl in impls if impl == "reference"),
    }
    if device.type == "cuda":
        found["mfu"] = rate * flops / _PEAK_FLOPS
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found, bits, stepper


def run(
    recipe: config.Recipe, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What is known of a recipe after each thing that was measured."""
    found: dict[str, Any] = {
        "recipe": recipe.name,
        "experts": model.experts(recipe.model).num_experts,
        "tokens": recipe.batch_size * recipe.length,
        "parameters": params.count(model.specs(recipe.model)),
    }
    bits: dict[str, list[Any]] = {}
    launched = None
    for name in options.modes:
        found[name], bits[name], stepper = measure(recipe, device, name, options)
        if len(bits) == len(_MODES):
            found["equal"] = bits["eager"] == bits["captured"]
        yield found
        if device.type == "cuda" and options.parts:
            if name == "eager":
                launched = profiled(stepper.step, scoped=True)
            kernels = profiled(stepper.step, scoped=False)
            found[name]["profile"] = summary(matched(kernels, launched or []))
            yield found
        del stepper  # its state, before the next one's


def told_mode(name: str, found: dict[str, Any]) -> list[str]:
    """A mode's numbers, as lines."""
    utilisation = f"MFU {found['mfu']:.1%}" if "mfu" in found else "no MFU"
    lines = [
        f"{name}: {found['tokens_per_second']:,.0f} tokens/s, {utilisation}; "
        f"{found['in_a_row_ms']:.1f} ms a step in a row, {found['step_ms']:.1f} waited for; first "
        f"{found['steps_ms'][0]:.0f}; peak {found['peak_bytes'] / 2**30:.1f} GiB (state "
        f"{found['state_bytes'] / 2**30:.1f}, held {found.get('reserved_bytes', 0) / 2**30:.1f}); "
        f"loss {found['losses'][-1]:.4f}; state made in {found['init_s']:.1f} s"
    ]
    lines += [f"  {note}" for note in found["notes"]]
    if found["references"]:
        lines.append(f"  by their references: {', '.join(found['references'])}")
    profile = found.get("profile")
    if profile:
        parts = [f"{part} {ms:.1f}" for part, (ms, _) in profile["parts"].items()]
        lines.append(f"  {profile['total_ms']:.1f} ms: {', '.join(parts)}")
    return lines


def _write(path: Path, rows: Sequence[dict[str, Any]], device: torch.device) -> None:
    about = {"hardware": devices.name(device), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def _options() -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a recipe; fields of it may follow")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES))
    parser.add_argument("--count", type=int, default=8, dest="steps", help="steps, compared")
    parser.add_argument("--row", type=int, default=5, help="steps in a row, timed together")
    parser.add_argument("--text", action="store_true", help="the recipe's text, not random ids")
    parser.add_argument("--no-parts", action="store_false", dest="parts", help="no profiles")
    parser.add_argument("--warmup", action="store_true", help="compile the kernels before")
    parser.add_argument(
        "--kernels", default="", help="as of train.py: head_cross_entropy:reference"
    )
    parser.add_argument("--json", type=Path)
    options, fields = parser.parse_known_args()
    if options.steps < 1 or options.row < 1:
        parser.error(f"--count {options.steps}, --row {options.row}: at least 1 each")
    return parser, options, fields


def main() -> int:
    """Returns 1 if any bit differs between the modes."""
    parser, options, fields = _options()
    device = told(parser, lambda: devices.parse(options.device))
    recipe = told(parser, lambda: config.load_recipe(options.config))
    recipe = told(parser, lambda: config.override(recipe, fields, prog=parser.prog))
    kernels = told(parser, lambda: choice.parse(options.kernels))
    found: dict[str, Any] = {}
    with use_impl(**kernels):
        if options.warmup:
            warm_up(recipe, device, View(), ranks=Ranks(), compiles=True)
        said: dict[str, list[str]] = {}
        for found in run(recipe, device, options):
            if options.json:
                _write(options.json, [found], device)
            for name in options.modes:
                lines = told_mode(name, found[name]) if name in found else []
                for line in lines[len(said.get(name, [])) :]:
                    print(line, flush=True)
                said[name] = lines
    if "equal" in found:
        print(f"bits of {options.steps} steps: {'equal' if found['equal'] else 'DIFFERENT'}")
    return int(not found.get("equal", True))


if __name__ == "__main__":
    raise SystemExit(main())
