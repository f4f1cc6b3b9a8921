"""What a checkpoint costs: ``python benchmarks/checkpoint.py``.

A state of 1 GB (bfloat16 weights and float32 moments, as of a model of some hundred layers) is saved by
:class:`k31fn.checkpoint.Checkpointer` on one rank and, each rank a thread with a writer of its own, on several; and by
orbax alone, called in this process on the same arrays without checksums and without its files being flushed beyond what
it does itself. They take turns in one folder, so a disk that is shared with others slows all; medians. "Blocked" is how
long ``save`` keeps training waiting, "total" from there until the step is complete on disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31fn.checkpoint import Checkpointer, Held, Layout
from k31fn.parallel import Mesh, P, each_rank

BLOCKED_S, TIMES_ORBAX = 0.5, 1.3
SAVES = 2


def make_state(megabytes: int) -> dict[str, Tensor]:
    """Half in bfloat16, half in float32, in 64 matrices."""
    rows = megabytes * (1 << 20) // (32 * 2048 * 6) // 8 * 8  # 32 pairs of 2 and 4 bytes an element
    state: dict[str, Tensor] = {}
    for i in range(32):
        x = torch.randn(rows, 2048)
        state |= {f"layers.{i}.w": x.to(torch.bfloat16), f"layers.{i}.mu": x}
    return state | {"step": torch.tensor(7)}


def with_orbax(state: dict[str, Tensor], folder: Path, saves: int) -> list[float]:
    """Seconds of each save by orbax itself; the step before is there until then, as in a run that goes on."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ml_dtypes
        import orbax.checkpoint as ocp

    def as_numpy(x: Tensor) -> Any:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    arrays = {name: as_numpy(x) for name, x in state.items()}
    times = []
    for step in range(saves):
        began = time.perf_counter()
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder / str(step), args=ocp.args.PyTreeSave(arrays))
        times.append(time.perf_counter() - began)
        shutil.rmtree(folder / str(step - 1), ignore_errors=True)
    return times


def with_ranks(state: dict[str, Tensor], folder: Path, ranks: int, saves: int) -> list[tuple[float, float]]:
    """Of each save, seconds that the slowest rank was blocked and seconds in all; rows are split over the ranks."""
    mesh = Mesh(fsdp=ranks)
    held = {name: Held(P("fsdp")) for name, x in state.items() if x.ndim}
    layout = Layout({name: x.to("meta") for name, x in state.items()}, held, mesh)

    def go(axes: Any, rank: int) -> list[tuple[float, float]]:
        mine = {name: x.chunk(ranks)[rank] if x.ndim else x for name, x in state.items()}
        times = []
        with Checkpointer(folder, keep=1, axes=axes) as checkpoints:
            checkpoints.prepare(mine, layout)
            time.sleep(8)  # the first steps of training
            for step in range(1, saves + 1):
                began = time.perf_counter()
                checkpoints.save(step, mine, layout=layout)
                blocked = time.perf_counter() - began
                checkpoints.wait()
                times.append((blocked, time.perf_counter() - began))
                time.sleep(1)
        return times

    found = each_rank(go, mesh, lambda c: (c.get("fsdp", 0),))
    return [(max(t[0] for t in each), max(t[1] for t in each)) for each in zip(*found, strict=True)]


def main() -> int:
    """Prints the table; 1 if a limit is missed on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder if not given")
    given = parser.parse_args()
    state = make_state(given.megabytes)
    size = sum(x.nbytes for x in state.values())
    blocked, total, orbax = defaultdict(list), defaultdict(list), defaultdict(list)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        where = Path(folder)
        for _ in range(given.rounds):
            for i, t in enumerate(with_orbax(state, where / "orbax", SAVES)):
                orbax[i].append(t)
            shutil.rmtree(where / "orbax")
            for n in given.ranks:
                for i, (b, t) in enumerate(with_ranks(state, where / "ours", n, SAVES)):
                    blocked[n, i].append(b)
                    total[n, i].append(t)
                shutil.rmtree(where / "ours")
    alone = [statistics.median(orbax[i]) for i in range(SAVES)]
    print(f"{size / 1e9:.2f} GB; orbax alone, first and next save: {', '.join(f'{x:.2f}' for x in alone)} s")
    for n, i in blocked:
        b, t = statistics.median(blocked[n, i]), statistics.median(total[n, i])
        which = "next save" if i else "first save"
        print(f"{n} ranks, {which}: blocked {b:.2f} s, total {t:.2f} s = {t / alone[i]:.2f} x orbax")
    missed = statistics.median(blocked[1, 1]) > BLOCKED_S or statistics.median(total[1, 1]) > TIMES_ORBAX * alone[1]
    print(f"limits: blocked {BLOCKED_S} s, total {TIMES_ORBAX} x orbax: {'missed' if missed else 'kept'} on one rank")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
