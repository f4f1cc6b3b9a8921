"""How much memory reading takes: two processes, each its half of a folder of 2 GB."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from k31fn import model, params
from k31fn.hf_format.file_writer import create, lay_out
from k31fn.hf_format.leaves import read_leaves
from k31fn.hf_format.rank_part import ALONE
from k31fn.hf_format.table import entries
from k31fn.layers import attn_res, kda, latent_moe, mla, mlp
from k31fn.parallel import AxisRules, Mesh, partition
from k31fn.parallel.partition import tiles
from tests import small

D = 2048
CFG = model.Config(
    vocab_size=65536,
    hidden_size=D,
    sublayers=model.Sublayers(
        kda=kda.Config(D, num_heads=16, head_dim=128),
        full_attention=mla.Config(D, 16, 512, 256, 128, 64, 128),
        dense=mlp.Config(D, 8192),
        moe=latent_moe.Config(
            D, latent_size=1024, expert_size=1024, shared_size=2048, num_experts=64, top_k=4
        ),
    ),
    layers=small.k3_layers(4, (3,)),
    residual=attn_res.Config(block_size=4),
)
MESH = Mesh(fsdp=2)


def resident() -> int:
    """Anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def read_half(folder: str, rank: str) -> dict[str, int]:
    """Reads the rank's part; what that added to the process at most, and what it keeps."""
    specs = model.specs(CFG)
    tile = tiles(specs, partition(specs, AxisRules(), MESH), MESH, MESH.coordinate(int(rank)))
    table, part = entries(CFG), dataclasses.replace(ALONE, tile=tile)
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    leaves = read_leaves(table, Path(folder), part=part)
    done.set()
    thread.join()
    return {"peak": max(peak, resident()) - before, "kept": sum(leaf.nbytes for leaf in leaves)}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_holds_its_shard_and_one_tensor(tmp_path: Path):
    table = entries(CFG)
    tensors = {
        name: (e.stored_shape, torch.float32 if e.row.wide else torch.bfloat16)
        for e in table
        for name in e.names
    }
    create(tmp_path / "big", lay_out(tensors, 500_000_000))
    size = sum(p.stat().st_size for p in (tmp_path / "big").iterdir())
    assert size > 2e9
    script = (
        "import sys; from tests.hf_format import test_memory as t; "
        "print(t.json.dumps(t.read_half(sys.argv[1], sys.argv[2])))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "big")]
    here = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, cwd=here)
        for rank in range(2)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0
        found = json.loads(out)
        largest = max(shape[0] * shape[1] * 2 for shape, _ in tensors.values() if len(shape) == 2)
        assert 0.45 * size < found["kept"] < 0.55 * size
        assert found["peak"] <= 1.1 * (found["kept"] + largest)
    assert params.count(model.specs(CFG)) * 2 == pytest.approx(size, rel=0.01)
