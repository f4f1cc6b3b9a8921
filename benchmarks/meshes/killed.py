"""Kills a rank of a run in the middle, shows what is reported and when, and goes on with the run on
one device.

``python -m benchmarks.meshes.killed --ranks 2 --victim 1 --after 12 configs/tiny.py --mesh.fsdp 2
...``: arguments from the config on are those of train.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from k31fn import metrics

ROOT = Path(__file__).parents[2]


def rank_of(process: Path) -> int:
    """The rank in the environment that torchrun gave it; -1: none."""
    with contextlib.suppress(OSError):
        for entry in (process / "environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return -1


def children(pid: int) -> list[int]:
    """Children of a process that run now."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def steps_of(run: Path) -> int:
    """Whose numbers are written down."""
    file = run / "metrics.jsonl"
    return sum("train/loss" in record for record in metrics.read(file)) if file.exists() else 0


def kill(arguments: list[str], runs: Path, *, ranks: int, victim: int, after: int) -> Path:
    """Starts a run, kills a rank once so many steps are done, and prints what came of it; the run's
    folder.
    """
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]
    with tempfile.TemporaryFile("w+") as log:
        command = [*launch, "train.py", *arguments, "--runs", str(runs)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and not any(
            steps_of(run) >= after for run in runs.glob("*/*")
        ):
            time.sleep(0.02)
        (run,) = runs.glob("*/*")
        victims = [pid for pid in children(process.pid) if rank_of(Path(f"/proc/{pid}")) == victim]
        began = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        print(f"rank {victim} killed with {steps_of(run)} steps written down", flush=True)
        others = [pid for pid in children(process.pid) if pid not in victims]
        while any(Path(f"/proc/{pid}").exists() for pid in others):
            time.sleep(0.02)
        print(
            f"the others had ended after {time.monotonic() - began:.1f} s, torchrun with status "
            f"{process.wait()}"
        )
        log.seek(0)
        lines = log.read().splitlines()
    said = [line for line in lines if line.startswith("train.py:")]
    print(
        "\n".join(said) or "train.py reported nothing; the last lines:\n" + "\n".join(lines[-40:]),
        flush=True,
    )
    return run


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument(
        "--after", type=int, default=12, help="steps whose numbers are written down"
    )
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run = kill(
            arguments, Path(folder), ranks=options.ranks, victim=options.victim, after=options.after
        )
        alone = []
        for view in ("pp", "dp", "fsdp", "cp", "tp", "ep"):
            alone += [f"--mesh.{view}", "1"]
        again = subprocess.run(
            [sys.executable, "train.py", str(run / "config.json"), *alone],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        losses = [
            record["train/loss"]
            for record in metrics.read(run / "metrics.jsonl")
            if "train/loss" in record
        ]
        lines = [line for line in again.stdout.splitlines() if "goes on after" in line]
        print(
            f"on one device: status {again.returncode}; {'; '.join(lines)}; {len(losses)} steps, "
            f"loss {losses[-1]:.4f}"
        )
        print(again.stderr, end="")


if __name__ == "__main__":
    main()
