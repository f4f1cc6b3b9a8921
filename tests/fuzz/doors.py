"""The doors through which files and words of others come in: a good input each, what of it is
damaged, and the command that reads it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from k31fn import config, metrics, trainer
from k31fn.checkpoint import Checkpointer, step_folders
from k31fn.config.overrides import fields_of
from k31fn.data import prepare
from k31fn.trainer import folder as folders
from tests.fuzz import mutations
from tests.trainer import runs

Damage = Callable[[bytes, random.Random], bytes]
_BASE64 = "data:image/png;base64,"
GOLDEN = Path(__file__).parents[1] / "golden" / "k3_text_tiny"


@dataclasses.dataclass
class Door:
    """A command and its input.

    Attributes:
        name: of the door.
        module: whose ``main`` is the command.
        made: the good input, made once.
        damaged: patterns of files in it and what is done to them; empty: the words are damaged.
        words: the arguments, for the folder of the input and that of the output.
        fields: of the words that are damaged.
    """

    name: str
    module: str
    made: Callable[[Path], None]
    damaged: dict[str, Damage]
    words: Callable[[Path, Path], list[str]]
    fields: list[str] = dataclasses.field(default_factory=list)

    def spoil(self, good: Path, into: Path, draw: random.Random) -> list[str]:
        """A copy of the good input with one thing wrong; gives the damaged words."""
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(good, into, symlinks=True)
        if not self.damaged:
            return mutations.arguments(self.fields, draw)
        pattern = draw.choice(list(self.damaged))
        file = draw.choice(sorted(into.glob(pattern)))
        file.write_bytes(self.damaged[pattern](file.read_bytes(), draw))
        return []


def _recipe() -> config.Recipe:
    return runs.recipe("text", steps=2, eval_every=2, checkpoint_every=1)


def _run(folder: Path) -> None:
    recipe = _recipe()
    (folder / "run").mkdir()
    folders.write(folder / "run" / "config.json", json.dumps(config.to_dict(recipe)))
    for step in range(5):
        record = {"step": step, "train/loss": 3.0 - step / 10, "grad_norm": 1.0}
        metrics.append(folder / "run" / "metrics.jsonl", record)


def _run_with_checkpoints(folder: Path) -> None:
    _run(folder)
    layout = trainer.lay_out(_recipe())
    with Checkpointer(folder / "run" / "checkpoints") as checkpoints:
        for step in (1, 2):
            state = trainer.init_state(layout, torch.device("cpu"))
            checkpoints.save(step, state, {"text": "", "base": ""})


def _manifest(data: bytes, draw: random.Random) -> bytes:
    """Changed as JSON; half of the time its checksum is right, so that the content is looked at."""
    changed = mutations.json_text(data, draw)
    with contextlib.suppress(ValueError, RecursionError):  # text that is nearly JSON
        manifest = json.loads(changed)
        if isinstance(manifest, dict) and draw.random() < 0.5:
            manifest.pop("sha256", None)
            return step_folders._dump({**manifest, "sha256": step_folders._digest(manifest)})
    return changed


def _foreign(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)


def _foreign_in_shards(folder: Path) -> None:
    _foreign(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    size = int.from_bytes((folder / "a.safetensors").read_bytes()[:8], "little")
    header = json.loads((folder / "a.safetensors").read_bytes()[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    total = (folder / "a.safetensors").stat().st_size - 8 - size
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _lines(folder: Path) -> None:
    rows = [{"text": f"document {i} of some", "n": i, "more": {"a": [1, 2]}} for i in range(30)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _conversations(folder: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    rows = []
    for i in range(20):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ]
        rows.append({"messages": messages})
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"text": f"document {i} of some", "n": i} for i in range(30)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")


def _store(folder: Path) -> None:
    _lines(folder)
    prepare.prepare(prepare.Config(str(folder / "a.jsonl"), heldout_fraction=0.2), folder / "store")


def _images(folder: Path) -> None:
    from PIL import Image

    rows = []
    for i, kind in enumerate(("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF") * 2):
        out = io.BytesIO()
        Image.new("RGB", (40, 30 + i), (i, 2, 3)).save(out, kind)
        (folder / f"{i}.{kind.lower()}").write_bytes(out.getvalue())
        text = f"<|kimi_image_placeholder|> number {i}"
        rows.append({"text": text, "image": _BASE64 + base64.b64encode(out.getvalue()).decode()})
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _image_row(data: bytes, draw: random.Random) -> bytes:
    """The bytes of one picture, or its row."""
    rows = data.splitlines()
    at = draw.randrange(len(rows))
    row = json.loads(rows[at])
    picture = base64.b64decode(row["image"].removeprefix(_BASE64))
    picture = mutations.some_bytes(picture, draw)
    row["image"] = _BASE64 + base64.b64encode(picture).decode()
    rows[at] = json.dumps(row).encode()
    return b"\n".join(rows) + b"\n"


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"]
    trained = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["hello hello world"], trained)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {"256": {"content": "<|end|>", "special": True}}
    beside = {"eos_token": "<|end|>", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    _lines(folder)


def _ranks(folder: Path) -> None:
    tokens = [*(bytes([b]) for b in range(256)), b"he", b"ll", b"hell", b"hello"]
    file = folder / "tiktoken.model"
    file.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    added = {
        str(260 + i): {"content": n, "special": True} for i, n in enumerate(("[EOS]", "[BOS]"))
    }
    beside = {"eos_token": "[EOS]", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    _lines(folder)


def _config_file(folder: Path) -> None:
    runs.write_text(folder / "text")
    runs.write_config(folder / "small.py", runs.recipe(folder / "text"))


def _prepare(*options: str) -> Callable[[Path, Path], list[str]]:
    def words(given: Path, out: Path) -> list[str]:
        source, *rest = [o.replace("GIVEN", str(given)) for o in options]
        return ["prepare", source, str(out), *rest, "--workers", "1"]

    return words


def all_doors() -> list[Door]:
    """Each with its command."""
    fields = _fields(_recipe())
    options = ["resume", "device", "threads", "kernels", "profile", "timeout"]
    options += ["max-minutes", "warmup-processes", "recipe"]
    commands = "k31fn.data.__main__"
    nested = mutations.json_text
    verify = "k31fn.hf.__main__"
    return [
        Door(
            "a run's config.json",
            "k31fn.inspect",
            _run,
            {"run/config.json": nested},
            lambda given, out: [str(given / "run" / "config.json")],
        ),
        Door(
            "a run's metrics",
            "k31fn.plot",
            _run,
            {"run/metrics.jsonl": mutations.lines},
            lambda given, out: [str(given / "run"), "--out", str(out / "loss.png")],
        ),
        Door(
            "a checkpoint's manifest",
            "k31fn.sample",
            _run_with_checkpoints,
            {"run/checkpoints/2/manifest.json": _manifest},
            lambda given, out: [str(given / "run"), "--tokens", "1", "--device", "cpu"],
        ),
        Door(
            "a foreign config.json",
            verify,
            _foreign,
            {"config.json": nested},
            lambda given, out: ["verify", str(given)],
        ),
        Door(
            "a foreign index and headers",
            verify,
            _foreign_in_shards,
            {"model.safetensors.index.json": nested, "a.safetensors": mutations.safetensors},
            lambda given, out: ["verify", str(given)],
        ),
        Door(
            "rows of jsonl",
            commands,
            _lines,
            {"a.jsonl": mutations.lines},
            _prepare("GIVEN/a.jsonl"),
        ),
        Door(
            "conversations",
            commands,
            _conversations,
            {"a.jsonl": mutations.lines},
            _prepare("GIVEN/a.jsonl", "--chat", "--tokenizer", "bytes+chat"),
        ),
        Door(
            "rows of parquet",
            commands,
            _parquet,
            {"a.parquet": mutations.some_bytes},
            _prepare("GIVEN/a.parquet"),
        ),
        Door(
            "a prepared store",
            commands,
            _store,
            {
                "store/*/index.json": nested,
                "store/*/*/*.npy": mutations.some_bytes,
            },
            lambda given, out: ["verify", str(given / "store")],
        ),
        Door(
            "images",
            commands,
            _images,
            {"a.jsonl": _image_row},
            _prepare("GIVEN/a.jsonl", "--images", "image", "--tokenizer", "bytes+media"),
        ),
        Door(
            "tokenizer.json",
            commands,
            _tokenizer,
            {"tokenizer.json": nested, "tokenizer_config.json": nested},
            _prepare("GIVEN/a.jsonl", "--tokenizer", "GIVEN/tokenizer.json"),
        ),
        Door(
            "a ranks file",
            commands,
            _ranks,
            {"tiktoken.model": mutations.some_bytes, "tokenizer_config.json": nested},
            _prepare("GIVEN/a.jsonl", "--tokenizer", "GIVEN/tiktoken.model"),
        ),
        Door(
            "options of sample",
            "k31fn.sample",
            _run_with_checkpoints,
            {},
            lambda given, out: [str(given / "run"), "--tokens", "1", "--device", "cpu"],
            ["count", "temperature", "top-p", "seed", "threads", "prompt", "image", "recipe"],
        ),
        Door(
            "the command line",
            "k31fn.trainer.cli",
            _config_file,
            {},
            lambda given, out: [str(given / "small.py"), "--runs", str(out)],
            [*fields, *options, *options],
        ),
    ]


def _fields(config: Any, at: str = "") -> list[str]:
    """Names on the command line of all fields inside of a config."""
    names: list[str] = []
    for name, value in fields_of(config).items():
        path = f"{at}{name.replace('_', '-')}"
        inside = _fields(value, f"{path}.")
        names += inside or [path]
    return names
