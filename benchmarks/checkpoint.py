"""What a checkpoint costs: ``python -m benchmarks.checkpoint``.

A state of 1 GB (bfloat16 weights and float32 moments, as of a model of some hundred layers) is
saved by :class:`k31fn.checkpoint.Checkpointer`, on one rank and, each rank a thread with a writer
of its own, on several. "Blocked" is how long ``save`` keeps training waiting, "on disk" from there
until the step is complete, with its checksums and everything flushed; deleting the step before
comes after that and is not counted. Beside it, in the same run and in turns, in one folder, since a
disk that is shared with others slows all:

- orbax alone as it comes, called in this process on the same arrays: it copies them, compresses and
  writes them;
- the same, not compressed;
- the same with all settings of our writer: neither compressed nor copied, in files of 128 MB; what
  it writes, without checksums and without the copy that lets training go on;
- each of these with a flush of its files besides: what orbax does not flush itself, durability
  costs;
- the same number of bytes written to one file and flushed: what the disk allows.

Orbax alone keeps training waiting all the time. Before each of these stand four idle seconds, as
steps of training do: a virtual machine may have given free memory back by then, and new pages of
the page cache then cost several times as much, whoever asks for them. Medians of all rounds, least
and most.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k31fn.checkpoint import Checkpointer, Holders, StateLayout, step_folders
from k31fn.parallel import Mesh, P, each_rank

BLOCKED_S, TIMES_ORBAX = 0.5, 1.3
SAVES, PAUSE_S = 2, 4.0
DEFAULTS, PLAIN, OURS = ORBAX = (
    "orbax as it comes",
    "orbax, not compressed",
    "orbax, settings of our writer",
)


def make_state(megabytes: int) -> dict[str, Tensor]:
    """Half in bfloat16, half in float32, in 64 matrices."""
    rows = megabytes * (1 << 20) // (32 * 2048 * 6) // 8 * 8  # 32 pairs of 2 and 4 bytes an element
    state: dict[str, Tensor] = {}
    for i in range(32):
        x = torch.randn(rows, 2048)
        state |= {f"layers.{i}.w": x.to(torch.bfloat16), f"layers.{i}.mu": x}
    return state | {"step": torch.tensor(7)}


def with_orbax(state: dict[str, Tensor], folder: Path, which: str) -> list[tuple[float, float]]:
    """Seconds of each save by orbax itself, without and with a flush of its files.

    The step before is there until then, as in a run that goes on.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ml_dtypes
        import orbax.checkpoint as ocp

        from k31fn.checkpoint import orbax_arrays as writer

    def as_numpy(x: Tensor) -> Any:
        return (
            x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            if x.dtype == torch.bfloat16
            else x.numpy()
        )

    arrays = {name: as_numpy(x) for name, x in state.items()}

    def save(path: Path) -> None:
        if which == OURS:
            writer.write(path, arrays)
        else:
            how: Any = {} if which == DEFAULTS else {"use_zarr3": True, "use_compression": False}
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
                checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))

    times = []
    for step in range(SAVES):
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        save(folder / str(step))
        saved = time.perf_counter() - began
        step_folders.flush_tree(folder / str(step))
        times.append((saved, time.perf_counter() - began))
        shutil.rmtree(folder / str(step - 1), ignore_errors=True)
    shutil.rmtree(folder)
    return times


def plain(state: dict[str, Tensor], file: Path) -> float:
    """Seconds of writing the bytes to one file and flushing it."""
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    with file.open("wb", buffering=0) as opened:
        for x in state.values():
            rest = x.reshape(-1).view(torch.uint8).numpy().data
            while rest:
                rest = rest[opened.write(rest) :]
        os.fsync(opened.fileno())
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds


def _complete(step: Path, began: float, found: list[float]) -> None:
    while not step.exists():
        time.sleep(0.005)
    found.append(time.perf_counter() - began)


def with_ranks(state: dict[str, Tensor], folder: Path, ranks: int) -> list[tuple[float, float]]:
    """Times of each save: seconds that the slowest rank was blocked and until it was on
    disk; rows are split over them.
    """
    mesh = Mesh(fsdp=ranks)
    held = {name: Holders(P("fsdp")) for name, x in state.items() if x.ndim}
    layout = StateLayout({name: x.to("meta") for name, x in state.items()}, held, mesh)

    def go(axes: Any, rank: int) -> list[tuple[float, float]]:
        mine = {name: x.chunk(ranks)[rank] if x.ndim else x for name, x in state.items()}
        times = []
        with Checkpointer(folder, keep=1, axes=axes) as checkpoints:
            checkpoints.prepare(mine, layout)
            time.sleep(PAUSE_S)
            for step in range(1, SAVES + 1):
                time.sleep(PAUSE_S)
                began = time.perf_counter()
                found = []
                there = folder / str(step)
                looks = threading.Thread(target=_complete, args=(there, began, found), daemon=True)
                looks.start()
                checkpoints.save(step, mine, layout=layout)
                blocked = time.perf_counter() - began
                checkpoints.wait()
                looks.join()
                times.append((blocked, found[0]))
        return times

    found = each_rank(go, mesh, lambda c: (c.get("fsdp", 0),))
    shutil.rmtree(folder)
    return [(max(t[0] for t in each), max(t[1] for t in each)) for each in zip(*found, strict=True)]


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> int:
    """Prints the table; 1 if one rank misses a limit, against orbax as it comes or that without
    compression.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; a temporary folder if not given"
    )
    given = parser.parse_args()
    state = make_state(given.megabytes)
    times: dict[tuple[Any, int, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        where = Path(folder)
        for _ in range(given.rounds):
            times["plain", 0, ""].append(plain(state, where / "plain"))
            for which in ORBAX:
                for i, (alone, flushed) in enumerate(with_orbax(state, where / "orbax", which)):
                    times[which, i, "alone"].append(alone)
                    times[which, i, "flushed"].append(flushed)
            for n in given.ranks:
                for i, (blocked, total) in enumerate(with_ranks(state, where / "ours", n)):
                    times[n, i, "blocked"].append(blocked)
                    times[n, i, "total"].append(total)
    return _report(sum(x.nbytes for x in state.values()), given.ranks, times)


def _report(size: int, ranks: list[int], times: dict[tuple[Any, int, str], list[float]]) -> int:
    middle = {key: statistics.median(seconds) for key, seconds in times.items()}
    print(
        f"{size / 1e9:.2f} GB; medians of {len(times['plain', 0, ''])} rounds, and from least to "
        "most"
    )
    print(f"one file written and flushed: {_spread(times['plain', 0, ''])}")
    for i in range(SAVES):
        print("next save" if i else "first save")
        for which in ORBAX:
            flushed = middle[which, i, "flushed"]
            print(f"  {which}: {_spread(times[which, i, 'alone'])}; with a flush {flushed:.2f} s")
        for n in ranks:
            total = middle[n, i, "total"]
            ratios = [f"{total / middle[which, i, 'alone']:.2f} x {which}" for which in ORBAX]
            print(
                f"  {n} ranks: blocked {_spread(times[n, i, 'blocked'])}, on disk "
                f"{_spread(times[n, i, 'total'])}"
            )
            print(f"    = {'; '.join(ratios)}")
    missed = []
    for i in range(SAVES):
        missed += ["blocked"] * (middle[1, i, "blocked"] > BLOCKED_S)
        missed += [
            w
            for w in (DEFAULTS, PLAIN)
            if middle[1, i, "total"] > TIMES_ORBAX * middle[w, i, "alone"]
        ]
    said = f"missed: {'; '.join(missed)}" if missed else "kept"
    print(f"limits on one rank: blocked {BLOCKED_S} s, on disk after {TIMES_ORBAX} x orbax: {said}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
