"""Read mosaics of handwritten digits: a task of images and text that needs no download.

    python -m examples.digits prepare build/digits    # images and captions, and the stores that
    training reads python train.py configs/tiny_vision.py python -m examples.digits score
    runs/tiny_vision  # captions of scans that training has never seen

scikit-learn's 1,797 scans of 8 x 8 pixels are enlarged to 28 x 28, one merged feature each, and set
into grids of 1 to 6 scans. The caption of a mosaic is its digits in reading order. Some documents
have two mosaics. Every fifth scan is held out: held-out mosaics are made of these alone, and the
others of none of them.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from k31fn import data, random, sample
from k31fn.data import image_packing, media, prepare, store
from k31fn.layers.patches import cell_order
from k31fn.trainer import folder

__all__ = [
    "Caption",
    "accuracy",
    "captions",
    "documents",
    "draw",
    "main",
    "picture",
    "score",
    "write",
]

SIDE, MOST = 28, 6  # pixels of a scan, scans of a mosaic
GRIDS = [(h, w) for h in range(1, MOST + 1) for w in range(1, MOST + 1) if h * w <= MOST]
SIZES = {"train": 6000, "heldout": 400}  # documents
NEWLINE = 10


# ---------------------------------------------------------------------------------------- documents
def documents(split: str, count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Records of one or two mosaics of this split's scans, as ``python -m k31fn.data prepare``
    takes them.
    """
    from PIL import Image

    # optional: the extra `vision`
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    scans, names = load_digits(return_X_y=True)
    own = np.flatnonzero((np.arange(len(scans)) % 5 == 0) == (split == "heldout"))
    small = [Image.fromarray((255 / 16 * scans[i]).astype(np.uint8).reshape(8, 8)) for i in own]
    large = np.stack([np.asarray(s.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for s in small])
    rng = np.random.default_rng([seed, split == "heldout"])
    for _ in range(count):
        images, text = [], ""
        for _ in range(1 + int(rng.random() < 0.25)):
            h, w = GRIDS[rng.integers(len(GRIDS))]
            chosen = rng.integers(len(own), size=h * w)
            mosaic = (
                large[chosen]
                .reshape(h, w, SIDE, SIDE)
                .transpose(0, 2, 1, 3)
                .reshape(h * SIDE, w * SIDE)
            )
            images.append(_url(Image.fromarray(mosaic)))
            text += media.PLACEHOLDER + "".join(str(names[own[i]]) for i in chosen) + "\n"
        yield {"text": text, "images": images}


def _url(image: object) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")  # pyright: ignore[reportAttributeAccessIssue]
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def write(root: Path) -> None:
    """The records of both splits, and their stores in ``root/SPLIT/train``; what is there already
    is kept.
    """
    for split, count in SIZES.items():
        root.mkdir(parents=True, exist_ok=True)
        source = root / f"{split}.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in documents(split, count)))
        result = prepare.prepare(
            prepare.Config(str(source), "bytes+media", images="images", heldout_fraction=0.0),
            root / split,
        )
        print(f"{split}: " + ", ".join(f"{n:,} {what}" for what, n in result.counts.items()))


# ----------------------------------------------------------------------------------------- captions
class Caption(NamedTuple):
    """What a mosaic shows and what the model said, and the row that it was shown."""

    truth: str
    said: str
    row: image_packing.Row


def captions(run: Path, *, shuffle: bool = False, where: str = "cpu") -> list[Caption]:
    """The model's caption of every held-out mosaic, the most likely token each time.

    A second mosaic is read after the first and its true caption. With ``shuffle`` the patches of
    each mosaic change places among each other.
    """
    recipe, weights, state = sample.load(run, where=torch.device(where))
    assert isinstance(recipe.data, data.Prepared)
    tokenizer, rng = data.open_tokenizer(recipe.data.tokenizer), np.random.default_rng(0)
    groups: dict[int, list[tuple[str, image_packing.Row]]] = defaultdict(list)
    (name,) = recipe.data.heldout
    heldout = data.open_store(name)
    for number in range(heldout.num_documents):
        for truth, row in _prompts(heldout.read(number), tokenizer):
            mixed = [p[rng.permutation(len(p))] for p in row.patches] if shuffle else row.patches
            groups[len(row.pieces[0])].append((truth, row._replace(patches=mixed)))
    found = []
    for length, group in sorted(groups.items()):  # rows of one length decode together
        rows = [row for _, row in group]
        shape = image_packing.Shape(length, max(sum(map(len, row.patches)) for row in rows))
        batch = image_packing.collate(rows, shape, heldout)
        said = sample.generate(
            weights,
            recipe.model,
            state,
            batch.tokens,
            num_tokens=MOST + 2,
            key=random.key(0),
            temperature=0.0,
            end_token=NEWLINE,
            vocab_size=tokenizer.vocab_size,
            images=batch.images,
        )
        found += [
            Caption(truth, _first_line(tokenizer.decode(line)), row)
            for (truth, row), line in zip(group, said, strict=True)
        ]
    return found


def _prompts(
    document: store.StoredDocument, tokenizer: data.Tokenizer
) -> Iterator[tuple[str, image_packing.Row]]:
    for i, (_, stop) in enumerate(document.spans.tolist()):
        truth = _first_line(tokenizer.decode(document.tokens[stop:]))
        tokens, seen = document.tokens[:stop], slice(i + 1)
        yield (
            truth,
            image_packing.Row(
                [tokens],
                [np.ones(stop, bool)],
                list(document.grids[seen]),
                list(document.patches[seen]),
            ),
        )


def _first_line(text: str) -> str:
    """Up to the first line end; what a terminal or a font may not show becomes ``?``."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text.split("\n")[0])


def accuracy(found: list[Caption]) -> tuple[float, float]:
    """Of digits, each in its place, and of whole captions."""
    right = sum(a == b for c in found for a, b in zip(c.truth, c.said, strict=False))
    return right / sum(len(c.truth) for c in found), sum(c.truth == c.said for c in found) / len(
        found
    )


def draw(found: list[Caption], out: Path) -> None:
    """Some mosaics with what the model said below them; what is wrong in red, with the truth."""
    from matplotlib.figure import Figure

    shown = sorted(found, key=lambda c: (len(c.truth), c.truth))[:: max(1, len(found) // 18)][:18]
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    for axes, caption in zip(figure.subplots(3, 6).flat, shown, strict=False):
        axes.imshow(picture(caption.row), cmap="gray", vmin=0, vmax=255)
        right = caption.said == caption.truth
        text = caption.said if right else f"{caption.said} ({caption.truth})"
        axes.set_xlabel(text, color="black" if right else "crimson", fontsize=11)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(out, dpi=110)


def picture(row: image_packing.Row) -> np.ndarray:
    """The last mosaic of a row, put together again from its patches."""
    (_, h, w), patches = row.grids[-1], row.patches[-1]
    side = int((patches.shape[1] // 3) ** 0.5)
    whole = np.empty((h * w, side, side), np.uint8)
    whole[cell_order((1, h, w))] = patches.reshape(h * w, 3, side, side)[:, 0]
    return whole.reshape(h, w, side, side).transpose(0, 2, 1, 3).reshape(h * side, w * side)


def score(run: Path) -> None:
    """Prints how many digits and captions are right, and writes ``RUN/captions.txt`` and
    ``RUN/captions.png``.
    """
    found, mixed = captions(run), captions(run, shuffle=True)
    lines = [f"{c.truth} {c.said}" for c in found]
    folder.write(run / "captions.txt", "\n".join(lines) + "\n")
    draw(found, run / "captions.png")
    digits, whole = accuracy(found)
    print(
        f"{len(found)} mosaics of scans never seen: {digits:.1%} of digits right, {whole:.1%} of "
        "captions"
    )
    print(f"with the patches of each mosaic shuffled: {accuracy(mixed)[0]:.1%} of digits")
    print(f"captions: {run / 'captions.txt'}, {run / 'captions.png'}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description="Mosaics of handwritten digits."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="make the data").add_argument("folder", type=Path)
    commands.add_parser("score", help="caption the held-out mosaics").add_argument("run", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "prepare":
            write(given.folder)
        else:
            score(folder.resolve(given.run))
    except (ValueError, ImportError) as error:
        print(f"examples.digits: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
