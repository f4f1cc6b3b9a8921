"""Functions of ranks that send to each other; spawned processes import them from here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k31fn.parallel import Mesh, MeshAxes, axes_of_process, record_collectives
from k31fn.parallel.collectives import own_index
from k31fn.parallel.point_to_point import recv, send


def ping_pong(axes: MeshAxes) -> list[Tensor]:
    """Both ranks send [1 2], [3] (times ten on rank 1) before either waits for anything."""
    me = own_index(axes.pp)
    other, factor = 1 - me, 10.0 if me else 1.0
    sent = [send(torch.tensor(values) * factor, axes.pp, other) for values in ([1.0, 2.0], [3.0])]
    arriving = [recv((n,), axes.pp, other, dtype=torch.float32, device="cpu") for n in (2, 1)]
    received = [wait() for wait in arriving]
    for wait in sent:
        wait()
    return received


def ping_pong_on_rank() -> tuple[list[Tensor], dict[str, Any]]:
    axes, _ = axes_of_process(Mesh(pp=2))
    with record_collectives() as record:
        received = ping_pong(axes)
    return received, {"events": [f"{e.what} {e.kind}" for e in record.events]}
