"""This process among the others, and what is run."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k31fn import config, data
from k31fn.parallel import Mesh, MeshAxes, axes_of_process
from k31fn.parallel.axis import Axis

__all__ = ["HALVES", "ONE", "RECIPES", "Here", "alone", "axes_of", "dataset_of", "named"]

ROOT = Path(__file__).parents[2]
ONE = "one device"
HALVES = "one device, in halves"


@dataclass(frozen=True)
class Here:
    """This process: its device, all processes (for what they tell each other), its number, and the
    text.
    """

    device: torch.device
    everyone: tuple[Axis, ...]
    rank: int
    size: int
    text: data.Corpus
    options: argparse.Namespace

    def meshes(self, recipe: config.Recipe) -> Iterator[tuple[str, config.Recipe]]:
        """Those of so many ranks that the recipe fits on, by name."""
        for mesh in dict.fromkeys(_meshes(self.size)):
            if self.options.meshes and named(mesh) not in self.options.meshes:
                continue
            try:
                yield named(mesh), dataclasses.replace(recipe, mesh=mesh, micro_batches=mesh.pp)
            except ValueError as error:
                self.say(f"{recipe.name} on {named(mesh)}: {error}")

    def say(self, text: str) -> None:
        """Prints it once, with the time."""
        if self.rank == 0:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

    def attempt(self, name: str, f: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """``f()``, or the error that all processes raise; frees the device's memory before."""
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        try:
            found = f()
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        self.say(f"{name}: {json.dumps({k: v for k, v in found.items() if k != 'steps'})}")
        return found


def named(mesh: Mesh) -> str:
    """``fsdp2 ep2``."""
    return " ".join(f"{k}{v}" for k, v in dataclasses.asdict(mesh).items() if v > 1)


def _meshes(n: int) -> Iterator[Mesh]:
    """Each view alone, and pairs of views."""
    for name in ("dp", "fsdp", "tp", "cp", "pp"):
        yield Mesh(**{name: n})
    for name in ("fsdp", "tp", "cp"):
        yield Mesh(**{name: n}, ep=n)
    if n >= 4:
        for pair in (
            ("dp", "fsdp"),
            ("fsdp", "tp"),
            ("fsdp", "cp"),
            ("cp", "tp"),
            ("pp", "fsdp"),
            ("pp", "tp"),
        ):
            yield Mesh(
                **{pair[0]: n // 2, pair[1]: 2} if pair[0] != "pp" else {"pp": 2, pair[1]: n // 2}
            )
        yield Mesh(fsdp=n, ep=n // 2)
        yield Mesh(pp=2, tp=n // 2, ep=n // 2)


def tiny(options: argparse.Namespace) -> config.Recipe:
    """configs/tiny.py."""
    made = config.load_recipe(ROOT / "configs" / "tiny.py")
    return dataclasses.replace(made, batch_size=8, steps=options.steps)


def wide(options: argparse.Namespace) -> config.Recipe:
    """Two layers of Kimi K3.1 Pro, with fewer experts and a byte vocabulary."""
    pro = config.load(ROOT / "configs" / "k31_pro.py")
    moe = dataclasses.replace(pro.sublayers["moe"], num_experts=options.experts)
    layers = (("kda", "moe"), ("full_attention", "moe"))
    cfg = dataclasses.replace(pro.with_sublayers(moe=moe), vocab_size=264, layers=layers)
    optimizer = config.Optimizer(kind="adamw", peak_lr=1e-4)
    return config.Recipe(
        "wide",
        cfg,
        optimizer=optimizer,
        batch_size=options.rows,
        length=options.length,
        remat="layer",
    )


RECIPES = {"tiny": tiny, "wide": wide}


def dataset_of(recipe: config.Recipe, here: Here) -> data.Dataset:
    """Rows of the text, of the recipe's size."""
    return data.Dataset(here.text, recipe.batch_size, recipe.length, recipe.seed)


def alone(recipe: config.Recipe) -> config.Recipe:
    """The same on one device, in one piece."""
    return dataclasses.replace(recipe, mesh=Mesh(), micro_batches=1)


def axes_of(recipe: config.Recipe) -> MeshAxes:
    """The axes of this process on the recipe's mesh; of one device, none."""
    return axes_of_process(recipe.mesh)[0] if recipe.mesh.world_size > 1 else Mesh().axes()
