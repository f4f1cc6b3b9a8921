"""One rank of :func:`k31fn.testing.ranks.spawn_ranks`: reads the folders of jobs from stdin and
runs them.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from k31fn import device as devices
from k31fn.parallel.backends.processes import start_processes
from k31fn.testing.ranks import answer, perform, write_tensors

__all__ = ["main"]


def main() -> None:
    """Runs jobs until stdin closes."""
    torch.set_num_threads(1)  # several ranks share the cores of a machine
    rank = int(os.environ["RANK"])
    device = torch.device(sys.argv[2])
    devices.of_rank(device, rank)
    start_processes(device.type, timeout=float(sys.argv[1]))
    for line in sys.stdin:
        job = Path(line.strip())
        try:
            tensors, value = perform(job)
        except Exception:  # whatever it is: the parent raises it, this process waits for more
            answer(job, rank, {"error": traceback.format_exc()})
        else:
            write_tensors(tensors, job / f"out.{rank}.safetensors")
            answer(job, rank, {"value": value})
    os._exit(0)  # all answers are written; a group that outlives the interpreter may abort it


if __name__ == "__main__":
    main()
