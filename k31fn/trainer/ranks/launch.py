"""The processes of a run, as ``torchrun`` starts them."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from k31fn.parallel.backends.processes import (
    axes_of_process,
    progress_of,
    start_processes,
    stop_processes,
)
from k31fn.parallel.mesh import Mesh
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.ranks.watchdog import Watchdog

__all__ = ["Process", "join"]

_MARGIN_S = 60.0  # by which the backend waits longer than the watch, whose report is the better one


@dataclass(frozen=True)
class Process:
    """This process among those of the run; by default the only one.

    Attributes:
        rank: its number.
        local_rank: its number on this machine.
        world_size: how many there are.
        local_world_size: how many of them are on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def of_environment(cls) -> Process:
        """As ``torchrun``, or whoever set the same variables, says."""
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        # who sets only the first two has one machine
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(rank, local_rank, world_size, local_world_size)

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """What all processes print alike in this block, one of each machine prints."""
        with contextlib.ExitStack() as stack:
            if self.local_rank:  # of each machine, as each has a log of its own
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield

    def check(self, mesh: Mesh, args: Sequence[str]) -> None:
        """Refuses a mesh of another number of ranks.

        Raises:
            ValueError: names both, what would fit, and the command that starts as many.
        """
        try:
            mesh.check_world(self.world_size)
        except ValueError as error:
            raise ValueError(
                f"{error}; or start as many: {self.command(mesh.world_size)} {shlex.join(args)}"
            ) from None

    def command(self, world_size: int | None = None) -> str:
        """What starts ``train.py`` on as many processes as now, or on ``world_size`` of them."""
        n = world_size or self.world_size
        if n == 1:
            # short where it can be: .venv/bin/python rather than the path from the root
            python = os.path.relpath(sys.executable)
            if python.startswith(os.pardir):
                python = sys.executable
            return shlex.join([python, "train.py"])
        # how another number would spread over machines is not known: then it is said for one
        nodes = self.world_size // self.local_world_size if n == self.world_size else 1
        several = f"--nnodes={nodes} " if nodes > 1 else ""
        return f"torchrun {several}--nproc_per_node={n // nodes} train.py"


@contextlib.contextmanager
def join(mesh: Mesh, device: torch.device, timeout: float) -> Iterator[Ranks]:
    """Joins the other processes as the ranks of ``mesh``.

    Args:
        mesh: of as many ranks as there are processes.
        device: of this one; its kind decides the backend.
        timeout: seconds that a rank waits for the others.
    """
    store = start_processes(device.type, timeout=timeout + _MARGIN_S)
    axes, _ = axes_of_process(mesh)
    watch = Watchdog(
        store, dist.get_rank(), mesh, progress_of(axes), timeout=timeout, device=device
    )
    try:
        yield Ranks(axes, watch)
    except BaseException:
        if device.type == "cpu":  # elsewhere leaving may wait for ranks that never come
            stop_processes(axes)
        raise
    stop_processes(axes)
