"""Runs of a small model on a little text, for tests of the trainer."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from k31fn import config, data, metrics, random
from tests import small

REPOSITORY = Path(__file__).parents[2]


def write_text(folder: Path) -> Path:
    """300 files of 10 to 60 bytes, some 15 of them held out: most rows hold several documents."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["def", "return", "self", "for", "in", "x", "y", "=", "(", ")", ":", "\n    ", "\n"]
    picks = (random.bits(random.key(0), (300, 20)) % len(words)).tolist()
    for i, row in enumerate(picks):
        (folder / f"{i}.txt").write_text(" ".join(words[p] for p in row[: 4 + i % 16]))
    return folder


def recipe(text: Path | str, **changes: Any) -> config.Recipe:
    """A KDA layer with a dense MLP, and a DSA layer with experts; a checkpoint every 3 steps, all
    kept.
    """
    base = config.Recipe(
        name="small",
        model=small.config(vocab_size=257, num_layers=2, full_attention_layers=(1,)),
        data=data.Config(path=str(text)),
        optimizer=config.Optimizer(kind="muon", peak_lr=0.02, warmup_steps=3),
        steps=10,
        batch_size=4,
        length=24,
        eval_every=4,
        eval_bytes=100,
        heldout_bytes=200,
        checkpoint_every=3,
        keep=10,
    )
    return dataclasses.replace(base, **changes)


def write_config(path: Path, made: config.Recipe) -> str:
    """A config file whose ``train()`` gives the recipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(config.to_dict(made)))
    path.write_text(
        "from pathlib import Path\nfrom k31fn import config\n\n\ndef train():\n"
        "    return config.load_recipe(Path(__file__).with_suffix('.json'))\n"
    )
    return str(path)


def only_run(runs: Path, name: str = "small") -> Path:
    (folder,) = (runs / name).iterdir()
    return folder


def saved(run: Path, step: int, part: str = "") -> dict[str, str]:
    """SHA-256 of each tensor of a checkpoint whose path starts with ``part``: equal on one mesh if
    and only if the bits are; of a split tensor those of its parts, in their order.
    """
    tensors = json.loads((run / "checkpoints" / str(step) / "manifest.json").read_text())["tensors"]
    found = {
        name: sorted((s["start"], s["sha256"]) for s in t["shards"]) for name, t in tensors.items()
    }
    return {
        name: " ".join(digest for _, digests in shards for digest in digests)
        for name, shards in found.items()
        if name.startswith(part)
    }


def records(run: Path) -> list[dict[str, Any]]:
    """What a run wrote down, without what follows from times."""
    dropped = {"tokens_per_second", "mfu"}
    return [
        {k: v for k, v in r.items() if k not in dropped}
        for r in metrics.read(run / "metrics.jsonl")
    ]


def saved_digest(x: Tensor) -> str:
    """What :func:`saved` gives for a tensor of these bits."""
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()
