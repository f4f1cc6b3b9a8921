"""Images given to ``k31fn.sample``: the rows that training makes of them, and a caption of a model
never trained.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="Pillow (the extra `vision`) is not installed")
import PIL.Image

from k31fn import config, data, random, sample, trainer, tree
from k31fn.data import images
from k31fn.data.media import PLACEHOLDER
from k31fn.data.prepare import Config, prepare

CONFIGS = Path(__file__).parents[1] / "configs"
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 x 90 pixels: larger than the stores' limit of 8 patches, and no multiple of a cell."""
    pixels = (random.bits(random.key(0), (90, 60, 3)) % 256).to(torch.uint8).numpy()
    file = tmp_path_factory.mktemp("picture") / "some.png"
    PIL.Image.fromarray(pixels).save(file)
    return file


def recipe(folder: Path, **changes: Any) -> config.Recipe:
    tiny = config.load_recipe(CONFIGS / "tiny_vision.py")
    stores = (str(folder / "train"),)
    return dataclasses.replace(
        tiny, data=dataclasses.replace(tiny.data, train=stores, heldout=stores), **changes
    )


@pytest.fixture(scope="module")
def stores(picture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document, the picture and what is said of it."""
    folder = tmp_path_factory.mktemp("stores")
    content = io.BytesIO(picture.read_bytes()).getvalue()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    (folder / "all.jsonl").write_text(
        json.dumps({"text": f"see {PLACEHOLDER}12\n", "images": [url]}) + "\n"
    )
    cfg = images.Config(max_patches=8)
    prepare(
        Config(
            str(folder / "all.jsonl"),
            "bytes+media",
            images="images",
            heldout_fraction=0.0,
            image=cfg,
        ),
        folder / "out",
    )
    return folder / "out"


def test_a_prompt_is_the_row_that_training_sees(picture: Path, stores: Path) -> None:
    made = recipe(stores)
    assert isinstance(made.data, data.Prepared)
    rows = data.open_prepared(
        made.data, data.open_tokenizer("bytes+media"), length=128, batch_size=1
    ).batch_at(0)
    tokens, seen = sample._look([picture], f"see {PLACEHOLDER}12\n", made)
    count, patches = tokens.shape[1], seen.pixels.shape[1]
    assert torch.equal(tokens[0], rows.tokens[0, :count])
    assert int(rows.tokens[0, count]) == data.open_tokenizer("bytes+media").end_token
    assert torch.equal(seen.pixels[0], rows.images.pixels[0, :patches])
    assert not rows.images.pixels[0, patches:].any()
    assert torch.equal(seen.slots[0], rows.images.slots[0, :count])
    for a, b in zip(tree.leaves(seen.patches), tree.leaves(rows.images.patches), strict=True):
        assert torch.equal(a[0], b[0, :patches])


def test_without_its_store_as_many_patches_as_a_row(picture: Path, tmp_path: Path) -> None:
    tokens, seen = sample._look([picture], "x", recipe(tmp_path))
    assert seen.pixels.shape[1] == 8 * 6  # 90 x 60 pixels, padded to 112 x 84 and not shrunk
    assert int((seen.slots >= 0).sum()) == 12
    assert tokens[0, -1] == ord("x")
    assert sample._look([picture, picture], "x", recipe(tmp_path))[1].pixels.shape[1] == 96


def test_the_command(
    picture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caption is that of the whole forward at each token, and another picture's is another."""
    made = recipe(tmp_path)
    state = trainer.init_state(trainer.lay_out(made), CPU)
    monkeypatch.setattr(sample, "load", lambda run, *, where: (made, state.params, state.balance))
    monkeypatch.setattr(sample.folder, "resolve", lambda run: run)
    command = [
        "RUN",
        "--image",
        str(picture),
        "--prompt",
        "",
        "--tokens",
        "6",
        "--seed",
        "3",
        "--device",
        "cpu",
    ]
    assert sample.main(command) == 0
    said = capsys.readouterr().out
    tokens, seen = sample._look([picture], "", made)
    drawn = sample.generate(
        state.params,
        made.model,
        state.balance,
        tokens,
        num_tokens=6,
        key=random.key(3),
        temperature=0.8,
        top_p=0.95,
        end_token=256,
        vocab_size=data.open_tokenizer("bytes+media").vocab_size,
        images=seen,
    )
    assert said == bytes(t for t in drawn[0].tolist() if t < 256).decode("utf-8", "replace") + "\n"
    assert sample.main([*command, "--chat"]) == 2
    assert "--image with --chat" in capsys.readouterr().err
    (tmp_path / "no.png").write_bytes(b"text")
    assert sample.main(["RUN", "--image", str(tmp_path / "no.png")]) == 2
    assert "cannot be decoded" in capsys.readouterr().err
    assert sample.main(["RUN", "--image", str(picture), "--prompt", PLACEHOLDER * 2]) == 2
    assert "more <|kimi_image_placeholder|> than its 1 images" in capsys.readouterr().err
    monkeypatch.setattr(
        sample, "load", lambda run, *, where: (config.load_recipe(CONFIGS / "tiny.py"), (), ())
    )
    assert sample.main(command) == 2
    assert "has no vision" in capsys.readouterr().err
