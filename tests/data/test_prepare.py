from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k31fn.data import (
    ByteTokenizer,
    Prepared,
    images,
    media,
    open_prepared,
    open_tokenizer,
    records,
)
from k31fn.data.__main__ import _bar, main
from k31fn.data.prepare import Config, PrepareProgress, prepare
from k31fn.data.store import Store, open_store
from tests.data.pictures import coordinates, file, pil, png

TOKENIZER = ByteTokenizer(media=True)
PIXELS = images.Config(max_patches=64, max_side=8)


def texts(store: Store) -> list[bytes]:
    """All documents, without the end tokens that they must have."""
    found = []
    for number in range(store.num_documents):
        tokens = store.read(number).tokens
        assert tokens[-1] == 256
        found.append(bytes(tokens[:-1].tolist()))
    return found


def both(folder: Path) -> list[bytes]:
    return sorted(t for split in ("train", "heldout") for t in texts(open_store(folder / split)))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


LINES = [f"document {i} {'ü' * (i % 7)}" for i in range(60)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "lines.jsonl", [{"text": text} for text in LINES])


# ------------------------------------------------------------------------------------------ sources
@pytest.mark.parametrize("unit", [1, 37, 100, 1000, 10**6])
def test_lines_are_read_once_wherever_the_file_is_cut(
    lines: Path, unit: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "UNIT_BYTES", unit)
    found = [
        r for u in records.units(lines, []) for r in records.read_unit(u, text="text", images="")
    ]
    assert [r.text.decode() for r in found] == LINES
    offsets = [int(r.name.partition("@")[2]) for r in found]
    data = lines.read_bytes()
    assert all(at == 0 or data[at - 1 : at] == b"\n" for at in offsets)
    assert len(set(offsets)) == len(LINES)


def test_a_line_that_is_no_json_is_named_by_its_byte(tmp_path: Path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": \n')
    with pytest.raises(ValueError, match=r"x\.jsonl:3: the line is not JSON"):
        prepare(Config(str(tmp_path / "x.jsonl")), tmp_path / "out")


def test_files_that_are_not_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "d").mkdir()
    for name in ("a.txt", "b.TXT", "c.csv", "d.CSV", "e.jsonl.gz", "README", ".hidden"):
        (tmp_path / "d" / name).write_text(name)
    assert main(["prepare", str(tmp_path / "d"), str(tmp_path / "out"), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 documents" in said
    assert "files of other suffixes, which are not read: 2 .csv, 1 .gz, 1 no suffix\n" in said


def test_bad_lines_among_good_ones(tmp_path: Path):
    """Left out and counted, or the end with the line's number; a NaN is no JSON either."""
    lines = ['{"text": "a"}', '{"text": ', '{"text": "b", "x": NaN}', "[1]", '{"text": 3}', "{}"]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, '{"text": "c"}']))
    skip = images.Config(on_bad="skip")
    found = prepare(Config(str(tmp_path / "x.jsonl"), image=skip), tmp_path / "out")
    assert both(tmp_path / "out") == [b"a", b"c"]
    assert found.skipped == {"record": 5}
    for number, message in (
        (2, "the line is not JSON"),
        (3, "the line: x is NaN, which JSON has not"),
        (4, "the line holds a list, not an object"),
        (5, "the record: the field 'text' is of type int"),
        (6, r"no field 'text'; it has \[\]"),
    ):
        (tmp_path / "y.jsonl").write_text("\n" * (number - 1) + lines[number - 1])
        with pytest.raises(ValueError, match=rf"y\.jsonl:{number}: {message}"):
            prepare(Config(str(tmp_path / "y.jsonl")), tmp_path / f"out{number}")


def test_text_files_share_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "UNIT_BYTES", 10)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("x" * 4 + str(i))
    (tmp_path / ".hidden.txt").write_text("no")
    found = records.units(tmp_path, [".txt"])
    assert [u.files for u in found] == [("0.txt", "1.txt"), ("2.txt", "3.txt"), ("4.txt",)]
    read = [r.text for u in found for r in records.read_unit(u, text="text", images="")]
    assert read == [b"xxxx%d" % i for i in range(5)]


def test_parquet_row_groups(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": LINES}), tmp_path / "x.parquet", row_group_size=25)
    assert len(records.units(tmp_path / "x.parquet", [])) == 3
    prepare(Config(str(tmp_path / "x.parquet")), tmp_path / "out")
    assert both(tmp_path / "out") == sorted(t.encode() for t in LINES)


def test_a_saved_dataset_with_images(tmp_path: Path):
    """The Arrow files that ``Dataset.save_to_disk`` writes, images as bytes beside a path."""
    pa = pytest.importorskip("pyarrow")
    root = tmp_path / "saved"
    root.mkdir()
    table = pa.table(
        {
            "caption": [f"{media.PLACEHOLDER} red", "no image"],
            "image": [[{"bytes": png(28, 28), "path": "a.png"}], []],
        }
    )
    with (
        pa.OSFile(str(root / "data-0.arrow"), "wb") as out,
        pa.ipc.new_stream(out, table.schema) as writer,
    ):
        writer.write_table(table)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (root / "dataset_info.json").write_text("{}")
    cfg = Config(str(root), "bytes+media", text="caption", images="image", heldout_fraction=0.0)
    result = prepare(cfg, tmp_path / "out")
    assert result.counts == {"documents": 2, "tokens": result.counts["tokens"], "images": 1}
    store = open_store(tmp_path / "out" / "train")
    document = store.read(0)
    assert document.grids == [(1, 2, 2)]
    assert (document.patches[0].reshape(4, 3, 196)[:, 0] == 255).all()


# --------------------------------------------------------------------------------------------- text
def test_every_document_is_in_one_store(lines: Path, tmp_path: Path):
    result = prepare(Config(str(lines), heldout_fraction=0.3), tmp_path / "out")
    assert both(tmp_path / "out") == sorted(t.encode() for t in LINES)
    sizes = [open_store(tmp_path / "out" / split).num_documents for split in ("train", "heldout")]
    assert sum(sizes) == 60
    assert 8 < sizes[1] < 30
    assert result.counts["tokens"] == sum(len(t.encode()) + 1 for t in LINES)
    assert not result.skipped


def test_equal_documents_are_held_out_together(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in LINES + LINES[::-1]])
    prepare(Config(str(tmp_path / "a.jsonl"), heldout_fraction=0.5), tmp_path / "out")
    train, held = (
        set(texts(open_store(tmp_path / "out" / split))) for split in ("train", "heldout")
    )
    assert train
    assert held
    assert not train & held


def test_more_processes_write_the_same(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "UNIT_BYTES", 400)
    seen: list[PrepareProgress] = []
    for workers in (1, 2):
        prepare(Config(str(lines)), tmp_path / str(workers), workers=workers, report=seen.append)
    files = [
        sorted(p.relative_to(tmp_path / w) for p in (tmp_path / w).rglob("*")) for w in ("1", "2")
    ]
    assert files[0] == files[1]
    for name in files[0]:
        if (tmp_path / "1" / name).is_file():
            assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), (
                name
            )
    assert seen[-1].done == seen[-1].total > 3
    assert not list((tmp_path / "2").glob(".*"))


# ----------------------------------------------------------------------------------------- resuming
def test_it_goes_on_where_it_was_stopped(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "UNIT_BYTES", 400)
    cfg = Config(str(lines))
    prepare(cfg, tmp_path / "whole")

    def stop(progress: PrepareProgress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(cfg, tmp_path / "out", report=stop)
    with pytest.raises(ValueError, match="preparing it has not finished"):
        open_store(tmp_path / "out" / "train")
    (tmp_path / "out" / ".shard-000007.1234.partial").mkdir()
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("shard-*/counts.json")}
    assert len(made) == 3
    prepare(cfg, tmp_path / "out")
    assert all(p.stat().st_mtime_ns == when for p, when in made.items())
    assert both(tmp_path / "out") == both(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 1000 + str(i)} for i in range(200_000)])
    command = [
        sys.executable,
        "-m",
        "k31fn.data",
        "prepare",
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out"),
    ]
    for delay in (4, 6, 8):
        process = subprocess.Popen(
            [*command, "--workers", "2"], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert main(command[3:]) == 0
    assert (
        sum(open_store(tmp_path / "out" / s).num_documents for s in ("train", "heldout")) == 200_000
    )


def test_other_settings_are_refused(lines: Path, tmp_path: Path):
    prepare(Config(str(lines)), tmp_path / "out")
    prepare(Config(str(lines)), tmp_path / "out")
    with pytest.raises(ValueError, match="was prepared with other settings: heldout_fraction"):
        prepare(Config(str(lines), heldout_fraction=0.5), tmp_path / "out")
    lines.write_text(lines.read_text() + '{"text": "more"}\n')
    with pytest.raises(ValueError, match="was prepared from other files"):
        prepare(Config(str(lines)), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    with pytest.raises(ValueError, match="is not empty and no prepared data"):
        prepare(Config(str(lines)), tmp_path / "mine")


def test_a_source_that_changed_is_refused_by_name(tmp_path: Path):
    """Whatever kind of file: replaced by more, or by other text of the same size, or gone."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def parquet(count: int) -> None:
        pq.write_table(pa.table({"text": [f"{i}" for i in range(count)]}), tmp_path / "a.parquet")

    parquet(3)
    prepare(Config(str(tmp_path / "a.parquet")), tmp_path / "out")
    prepare(Config(str(tmp_path / "a.parquet")), tmp_path / "out")
    parquet(50)
    with pytest.raises(ValueError, match=r"was prepared from other files: '.*a\.parquet' changed"):
        prepare(Config(str(tmp_path / "a.parquet")), tmp_path / "out")
    (tmp_path / "d").mkdir()
    for name in ("b.jsonl", "c.txt"):
        (tmp_path / "d" / name).write_text('{"text": "a"}')
    prepare(Config(str(tmp_path / "d")), tmp_path / "out2")
    (tmp_path / "d" / "c.txt").unlink()
    with pytest.raises(
        ValueError, match=r"was prepared from other files: '.*c\.txt' changed since"
    ):
        prepare(Config(str(tmp_path / "d")), tmp_path / "out2")


@pytest.mark.parametrize("lines", [1, 300_000], ids=["small", "sampled"])
def test_a_source_whose_time_was_put_back_is_refused(lines: int, tmp_path: Path):
    """Size and time are as before. New rights alone are no change, nor is a plan without more than
    size and time, as earlier versions wrote them.
    """
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("alpha\n" * lines)
    before = text.stat()
    prepare(Config(str(text)), out)
    text.chmod(0o600)
    prepare(Config(str(text)), out)
    text.write_text("beta.\n" * lines)
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (text.stat().st_size, text.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(ValueError, match=r"was prepared from other files: '.*a\.txt' changed"):
        prepare(Config(str(text)), out)
    plan = json.loads((out / "plan.json").read_text())
    plan["files"] = {name: stamp[:2] for name, stamp in plan["files"].items()}
    (out / "plan.json").write_text(json.dumps(plan))
    prepare(Config(str(text)), out)


def test_a_folder_of_a_call_that_failed_is_used_again(lines: Path, tmp_path: Path):
    """Nothing of it was prepared: a mistyped option costs no second folder."""
    with pytest.raises(ValueError, match="no field"):
        prepare(Config(str(lines), text="txt"), tmp_path / "out")
    assert not list((tmp_path / "out").glob("shard-*"))
    assert prepare(Config(str(lines)), tmp_path / "out").counts["documents"] == 60
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["config"]["text"] == "text"


@pytest.mark.parametrize(("name", "text"), [("a.txt", ""), ("a.jsonl", '{"text": ""}\n')])
def test_a_source_without_a_document_is_refused(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"a\.\w+' holds no document to learn from: all of it is"):
        prepare(Config(str(tmp_path / name)), tmp_path / "out")
    assert not list(tmp_path.glob("out/*/index.json"))


def test_a_full_disk_leaves_no_half_plan(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(file: Path, *args: Any, **kwargs: Any) -> None:
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["prepare", str(lines), str(tmp_path / "out")]) == 2
    place = tmp_path / "out" / "plan.json"
    assert capsys.readouterr().err == (
        f"k31fn.data: [Errno 28] No space left on device: '{place}'\n"
    )
    assert not list((tmp_path / "out").iterdir())


def test_a_source_that_changes_meanwhile(lines: Path, tmp_path: Path):
    def change(progress: PrepareProgress) -> None:
        if progress.done == progress.total:
            lines.write_text(lines.read_text().replace("document", "DOCUMENT"))

    with pytest.raises(ValueError, match=r"is being prepared from other files: '.*lines\.jsonl'"):
        prepare(Config(str(lines)), tmp_path / "out", report=change)
    with pytest.raises(ValueError, match="preparing it has not finished"):
        open_store(tmp_path / "out" / "train")


def test_an_image_that_changed_is_refused_by_name(tmp_path: Path):
    cfg = Config(str(with_images(tmp_path)), "bytes+media", images="images", image=PIXELS)
    prepare(cfg, tmp_path / "out")
    prepare(cfg, tmp_path / "out")
    (tmp_path / "pictures" / "blue.png").write_bytes(png(30, 60, (0, 255, 0)))
    with pytest.raises(ValueError, match=r"from other files: '.*pictures/blue\.png' changed since"):
        prepare(cfg, tmp_path / "out")


def test_another_tokenizer_of_the_same_name_is_refused(lines: Path, tmp_path: Path):
    order = list(range(256))

    def write() -> None:
        ranks = [base64.b64encode(bytes([b])) + b" %d" % i for i, b in enumerate(order)]
        (tmp_path / "tiktoken.model").write_bytes(b"\n".join(ranks))

    write()
    cfg = Config(str(lines), str(tmp_path / "tiktoken.model"), heldout_fraction=0.0)
    prepare(cfg, tmp_path / "out")
    store = str(tmp_path / "out" / "train")
    data = Prepared((store,), (store,), tokenizer=cfg.tokenizer)
    open_prepared(data, open_tokenizer(cfg.tokenizer), length=64, batch_size=2)
    order[65], order[66] = order[66], order[65]  # A and B: same size, same special tokens
    write()
    with pytest.raises(ValueError, match="was prepared with another tokenizer of that name"):
        prepare(cfg, tmp_path / "out")
    with pytest.raises(ValueError, match="was prepared with another tokenizer of this size"):
        open_prepared(data, open_tokenizer(cfg.tokenizer), length=64, batch_size=2)


def test_a_folder_that_an_earlier_version_prepared(lines: Path, tmp_path: Path):
    """Its plan says less, which is compared as it was."""
    prepare(Config(str(lines)), tmp_path / "out")
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    for name in ("files", "tokenizer"):
        plan.pop(name)
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "out" / "shard-000000" / "images.json").unlink()
    prepare(Config(str(lines)), tmp_path / "out")
    with pytest.raises(ValueError, match="was prepared with other settings: heldout_fraction"):
        prepare(Config(str(lines), heldout_fraction=0.5), tmp_path / "out")


# ------------------------------------------------------------------------------------------- images
def with_images(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "blue.png").write_bytes(png(30, 60, (0, 0, 255)))
    blue, place = "pictures/blue.png", file(pil.fromarray(coordinates(56, 28)), "PNG")
    rows = [
        {
            "text": f"A {media.PLACEHOLDER} and {media.PLACEHOLDER}.",
            "images": [blue, {"bytes": None, "path": blue}],
        },
        {"text": "none", "images": None},
        {
            "text": "x<|media_pad|>y",
            "images": "data:image/png;base64," + base64.b64encode(place).decode(),
        },
    ]
    return write_jsonl(tmp_path / "a.jsonl", rows)


def test_images_are_stored_as_patches(tmp_path: Path):
    cfg = Config(
        str(with_images(tmp_path)),
        "bytes+media",
        images="images",
        heldout_fraction=0.0,
        image=PIXELS,
    )
    result = prepare(cfg, tmp_path / "out")
    assert result.counts["images"] == 3
    store = open_store(tmp_path / "out" / "train")
    assert (store.media_token, store.end_token, store.patch_width) == (260, 256, 588)
    first, second, third = (store.read(i) for i in range(3))
    assert first.grids == [(1, 6, 4)] * 2
    assert TOKENIZER.decode(first.tokens) == "A image 30x60 and image 30x60."
    assert (first.tokens == 260).sum() == 12
    assert [[int(first.tokens[a]), int(first.tokens[b - 1])] for a, b in first.spans] == [
        [257, 259]
    ] * 2
    assert (first.patches[1].reshape(24, 3, 196)[0] == [[0], [0], [255]]).all()
    assert (second.grids, len(second.spans)) == ([], 0)
    assert third.tokens.tolist() == [120, 260, 260, 121, 256]
    assert third.spans.tolist() == [[1, 3]]
    assert third.patches[0].reshape(8, 3, 14, 14)[6, 0, 0].tolist() == list(range(28, 42))
    expected = images.decode(file(pil.fromarray(coordinates(56, 28)), "PNG"), "x", PIXELS)
    assert np.array_equal(third.patches[0], expected.patches)


def test_bad_images_are_refused_by_name_or_counted(tmp_path: Path):
    good, text = png(28, 28), f"{media.PLACEHOLDER}"
    cut = good[:50]
    (tmp_path / "empty.png").write_bytes(b"")
    animated = io.BytesIO()
    pil.new("RGB", (28, 28)).save(
        animated, "GIF", save_all=True, append_images=[pil.new("RGB", (28, 28), (9, 9, 9))]
    )
    urls = [
        "data:image/png;base64," + base64.b64encode(d).decode()
        for d in (good, cut, animated.getvalue())
    ]
    rows = [
        {"text": text, "images": i}
        for i in (*urls, "empty.png", "absent.png", "data:text/plain,x", urls[0])
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    cfg = Config(
        str(path),
        "bytes+media",
        images="images",
        heldout_fraction=0.0,
        image=images.Config(on_bad="skip"),
    )
    result = prepare(cfg, tmp_path / "out")
    assert result.counts["documents"] == 2
    assert result.skipped == {"corrupt": 2, "animated": 1, "empty": 1, "missing": 1}
    with pytest.raises(images.ImageError, match=r"image a\.jsonl@\d+, number 0: cannot be decoded"):
        prepare(Config(str(path), "bytes+media", images="images"), tmp_path / "strict")
    with pytest.raises(images.ImageError, match=r"image a\.jsonl@\d+, number 0: cannot be decoded"):
        prepare(Config(str(path), "bytes+media", images="images"), tmp_path / "strict", workers=2)


def test_images_outside_the_folder_are_not_read(tmp_path: Path):
    (tmp_path / "secret.png").write_bytes(png(28, 28))
    (tmp_path / "in").mkdir()
    path = write_jsonl(
        tmp_path / "in" / "a.jsonl", [{"text": media.PLACEHOLDER, "images": "../secret.png"}]
    )
    with pytest.raises(ValueError, match=r"image '\.\./secret\.png' is outside"):
        prepare(Config(str(path), "bytes+media", images="images"), tmp_path / "out")


def test_a_tokenizer_without_media_tokens(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no <\|media_begin\|>"):
        prepare(Config(str(with_images(tmp_path)), images="images"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------- command and store
def test_the_command(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["prepare", str(lines), str(tmp_path / "out"), "--workers", "1"]) == 0
    out, progress = capsys.readouterr()
    assert "60 documents" in out
    assert "documents left out: none" in out
    assert "1 of 1 shards" in progress
    assert main(["prepare", str(lines), "--workers", "1", str(tmp_path / "out")]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", str(lines)])
    assert capsys.readouterr().err.endswith("the following arguments are required: folder\n")
    assert main(["prepare", str(tmp_path / "absent"), str(tmp_path / "out2")]) == 2
    assert capsys.readouterr().err.startswith(
        f"k31fn.data: source '{tmp_path / 'absent'}' does not exist"
    )


def test_a_field_without_an_image_is_told(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A mistyped name: records may be of text alone, so it is no error."""
    call = ["prepare", str(lines), str(tmp_path / "out"), "--images", "img", "--workers", "1"]
    assert main([*call, "--tokenizer", "bytes+media"]) == 0
    said = "k31fn.data: images='img': no record has an image in this field\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("file/out", [], "folder '{}' cannot be made: Not a directory; give one that can be"),
        ("out", ["--max-length", "-1"], "max_length=-1 must be at least 0"),
        ("out", ["--tokenizer", "nope"], "tokenizer 'nope': neither 'bytes'"),
        ("out", ["--end", "x"], "end='x': the end token of tokenizer 'bytes' has no name"),
        ("out", ["--workers", "-1"], "workers=-1 must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    lines: Path,
    tmp_path: Path,
    folder: str,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "file").touch()
    assert main(["prepare", str(lines), str(tmp_path / folder), *options]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"k31fn.data: {message.format(tmp_path / folder)}")
    assert not (tmp_path / "out").exists()


def test_the_bar_on_a_terminal():
    out = io.StringIO()
    with _bar(out.write, terminal=True) as show:
        for done in (0, 1, 2):
            show(PrepareProgress(done, 2, Counter(tokens=1000 * done)))
    assert out.getvalue().count("\r") == 3
    assert "[###############...............] 1 of 2 shards, 1,000 tokens" in out.getvalue()
    assert out.getvalue().endswith("\n")
    assert out.getvalue().count("\n") == 1


def test_an_error_ends_the_bars_line_if_there_is_one():
    def fail(out: io.StringIO, *shown: int):
        with _bar(out.write, terminal=True) as show:
            for done in shown:
                show(PrepareProgress(done, 2, Counter()))
            raise ValueError("bad")

    for shown, written in (((), ""), ((1,), "\n")):
        out = io.StringIO()
        with pytest.raises(ValueError, match="bad"):
            fail(out, *shown)
        assert out.getvalue()[-1:] == written


def test_damaged_stores_are_refused(lines: Path, tmp_path: Path):
    prepare(Config(str(lines), heldout_fraction=0.0), tmp_path / "out")
    shard = tmp_path / "out" / "shard-000000" / "train"
    whole = (shard / "tokens.npy").read_bytes()
    (shard / "tokens.npy").write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"shard .*train is missing or damaged"):
        open_store(tmp_path / "out" / "train")
    (shard / "tokens.npy").write_bytes(whole)
    np.save(shard / "offsets.npy", np.load(shard / "offsets.npy")[:-1])
    with pytest.raises(
        ValueError,
        match=r"holds \(59, \d+, 0\) documents, tokens and images, not what index\.json says",
    ):
        open_store(tmp_path / "out" / "train")
    (tmp_path / "out" / "train" / "index.json").write_text('{"version": 7}')
    with pytest.raises(ValueError, match="is of version 7, not 1"):
        open_store(tmp_path / "out" / "train")
