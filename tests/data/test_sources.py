import builtins
import json
import os
import sysconfig
from pathlib import Path

import pytest

from k31fn.data import ByteTokenizer, Config, load, read, records, sources, stdlib
from k31fn.data.prepare import Config as PrepareConfig
from k31fn.data.prepare import prepare
from k31fn.data.sources import Document

SUFFIXES = (".txt", ".jsonl", ".parquet")


def texts(path, suffixes=SUFFIXES, field="text") -> list[Document]:
    return list(read(path, suffixes=suffixes, field=field))


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_stdlib():
    documents = texts("stdlib")
    names = [d.name for d in documents]
    assert names == sorted(set(names))
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py", "this.py"} <= set(names)
    assert documents == list(stdlib())
    root = Path(sysconfig.get_path("stdlib"))
    assert all(d.data == (root / d.name).read_bytes() for d in documents[::50])
    # Everything else under the folder is left out for one of the stated reasons.
    folders = [
        p for p in root.iterdir() if p.is_dir() and not p.name.endswith("-packages")
    ]  # those are no library
    files = [*root.glob("*.py"), *(f for p in folders for f in p.rglob("*.py"))]
    every = {f.relative_to(root).as_posix() for f in files if f.stat().st_size}
    parts = {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
    for name in every - set(names):
        rest = name in ("html/entities.py", "stringprep.py") or name.startswith(
            ("_sysconfigdata", "config-")
        )
        assert rest or parts & set(name.split("/")) or "customize" in name, name
    assert not any(parts & set(n.split("/")) for n in names)
    assert sum(len(d.data) for d in documents) > 3_000_000


def test_no_stdlib(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match=r"data\.path='stdlib': no source files"):
        texts("stdlib")


def test_folder(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.txt", b"\xff not UTF-8 \x00")
    write(tmp_path / "a" / "z.md", "other suffix")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / ".git" / "c.txt", "hidden")
    write(tmp_path / "a" / ".d.txt", "hidden")
    write(tmp_path / "r.jsonl", '{"text": "one"}\n\n{"text": ""}\n{"text": "three"}\n')
    assert texts(tmp_path) == [
        ("a/z.txt", b"\xff not UTF-8 \x00"),
        ("b.txt", b"second"),
        ("r.jsonl:1", b"one"),
        ("r.jsonl:4", b"three"),
    ]
    assert texts(str(tmp_path), suffixes=[".md"]) == [("a/z.md", b"other suffix")]


def test_text_file_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {i} {'x' * (i % 90)}\n" for i in range(2000))
    sections = texts(write(tmp_path / "book.txt", text))
    assert b"".join(s.data for s in sections).decode() == text
    assert [s.name for s in sections] == [f"book.txt#{i}" for i in range(len(sections))]
    assert all(s.data.endswith(b"\n") and 16384 <= len(s.data) < 16384 + 100 for s in sections[:-1])
    whole = texts(write(tmp_path / "one.txt", "x" * 50000))  # no line end to cut at
    assert [len(s.data) for s in whole] == [50000]
    # A file in a folder is a document: it is not cut.
    assert [d.name for d in texts(tmp_path)] == ["book.txt", "one.txt"]


def test_jsonl_field(tmp_path):
    file = write(
        tmp_path / "c.jsonl",
        json.dumps({"body": "ü☃"}) + "\n" + json.dumps({"body": "b", "text": 3}),
    )
    assert [d.data.decode() for d in texts(file, field="body")] == ["ü☃", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"c\.jsonl:2 is not JSON: "),
        (b'{"text": "\xff"}', r"c\.jsonl:2 is not JSON in UTF-8: "),
        (
            b'{"body": "b", "id": 1}',
            r"c\.jsonl:2: no field data.field='text'; the line has \['body', 'id'\]",
        ),
        (b"[1]", r"c\.jsonl:2: no field data.field='text'; the line has list"),
        (b'{"text": 3}', r"c\.jsonl:2: the field 'text' is of type int"),
        (b'{"text": null}', r"c\.jsonl:2: the field 'text' is of type NoneType"),
        (b'{"text": "\\ud800"}', r"c\.jsonl:2: the field 'text' is not valid Unicode"),
    ],
)
def test_bad_jsonl(tmp_path, line, message):
    file = write(tmp_path / "c.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        texts(file)


def test_bad_paths(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path='/no/such' does not exist"):
        texts("/no/such")
    with pytest.raises(
        ValueError, match=r"files \.bin are not read; if it is text, add '\.bin' to data.suffixes"
    ):
        texts(write(tmp_path / "x.bin", "x"))
    (tmp_path / "broken").mkdir()
    for name in ("link.txt", "link.jsonl"):
        (tmp_path / "broken" / name).symlink_to(tmp_path / "gone")
        with pytest.raises(ValueError, match=rf"^cannot read '.*{name}': No such file"):
            texts(tmp_path / "broken", suffixes=[name])
    (tmp_path / "dict" / "train").mkdir(parents=True)
    write(tmp_path / "dict" / "dataset_dict.json", '{"splits": ["train"]}')
    with pytest.raises(ValueError, match=r"holds the splits \['train'\]; give the folder of one"):
        texts(tmp_path / "dict")


def test_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs pyarrow; pip install 'k31fn\[data\]'"):
        texts(write(tmp_path / "a.parquet", "x"))


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="extra `data` not installed")
    import pyarrow.parquet as pq

    table = pa.table(
        {"id": [1, 2, 3], "text": ["one", "", "three ☃"], "raw": [b"\xff", b"b", b"c"]}
    )
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    assert texts(tmp_path / "c.parquet") == [
        ("c.parquet:0", b"one"),
        ("c.parquet:2", "three ☃".encode()),
    ]
    assert [d.data for d in texts(tmp_path, field="raw")] == [b"\xff", b"b", b"c"]
    with pytest.raises(
        ValueError, match=r"c\.parquet: no column data.field='body'; it has \['id', 'raw', 'text'\]"
    ):
        texts(tmp_path, field="body")
    with pytest.raises(ValueError, match=r"c\.parquet, row 0: the field 'id' is of type int"):
        texts(tmp_path, field="id")
    with pytest.raises(ValueError, match=r"^cannot read '.*bad\.parquet'"):
        texts(write(tmp_path / "bad.parquet", "not parquet"))


def arrow_folder(root: Path, parts: list[list[str]]) -> Path:
    """What ``Dataset.save_to_disk`` writes, as far as it concerns a reader."""
    import pyarrow as pa

    root.mkdir()
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        table = pa.table({"text": part, "id": list(range(len(part)))})
        with (
            pa.OSFile(str(root / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=2)
    write(
        root / "state.json",
        json.dumps({"_data_files": [{"filename": n} for n in names], "_split": "train"}),
    )
    write(root / "dataset_info.json", "{}")
    return root


def test_saved_dataset(tmp_path):
    pytest.importorskip("pyarrow", reason="extra `data` not installed")
    root = arrow_folder(tmp_path / "d", [["a", "b", "c"], ["", "e"]])
    assert [(d.name.rpartition(":")[2], d.data) for d in texts(root)] == [
        ("0", b"a"),
        ("1", b"b"),
        ("2", b"c"),
        ("1", b"e"),
    ]
    with pytest.raises(ValueError, match=r"no column data\.field='body'"):
        texts(root, field="body")
    (root / "data-00001-of-00002.arrow").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"^cannot read '.*data-00001"):
        texts(root)
    write(root / "state.json", "{}")
    with pytest.raises(ValueError, match="does not list the files of a dataset"):
        texts(root)


def test_saved_dataset_of_the_real_library(tmp_path):
    datasets = pytest.importorskip("datasets", reason="HF datasets not installed")
    whole = datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(10)]})
    whole.select([7, 1, 2, 9]).shuffle(seed=1).save_to_disk(
        tmp_path / "d", num_shards=2
    )  # an index over the rows
    expected = [row["text"] for row in datasets.load_from_disk(tmp_path / "d")]
    assert [d.data.decode() for d in texts(tmp_path / "d")] == expected


# ------------------------------------------------------------------------- what a folder may hold
def test_suffixes_in_capitals(tmp_path):
    """A folder from elsewhere: 30 .TXT, 20 .txt, one .JsonL."""
    for i in range(50):
        write(tmp_path / "d" / f"{i}.{'TXT' if i < 30 else 'txt'}", f"document {i}")
    write(tmp_path / "d" / "r.JsonL", '{"text": "one"}\n{"text": "two"}\n')
    found = texts(tmp_path / "d")
    assert len(found) == 52
    assert found[-1] == ("r.JsonL:2", b"two")
    assert len(texts(tmp_path / "d", suffixes=[".TXT"])) == 50
    assert texts(write(tmp_path / "A.TXT", "x")) == [("A.TXT#0", b"x")]
    units = records.units(tmp_path / "d", SUFFIXES)
    assert [unit.kind for unit in units] == ["text", "jsonl"]
    assert len(units[0].files) == 50


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is a named pipe, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_named_at_once(tmp_path, name, make, why):
    """Alone and in a folder, for training on it and for preparing it."""
    if name == "a.parquet":
        pytest.importorskip("pyarrow", reason="extra `data` not installed")
    make(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        if not path.exists():
            why = "does not exist"  # as a link to itself does not
        for door in (texts, lambda p: records.units(p, SUFFIXES)):
            with pytest.raises(ValueError, match=why):
                door(path)


def test_links_to_files_are_followed_and_to_folders_not(tmp_path):
    write(tmp_path / "elsewhere" / "a.txt", "a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    (tmp_path / "d" / "c").symlink_to(tmp_path / "elsewhere")
    assert texts(tmp_path / "d") == [("b.txt", b"a")]


def test_a_name_that_is_not_utf_8(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    write(tmp_path / "d" / name, "text")
    write(tmp_path / "d" / "b.txt", "more text")
    assert [d.data for d in texts(tmp_path / "d")] == [b"more text", b"text"]
    splits = load(Config(path=str(tmp_path / "d"), heldout_fraction=0.5), ByteTokenizer())
    assert sum(len(part.tokens) for part in (splits.train, splits.heldout)) == 4 + 9 + 2
    units = records.units(tmp_path / "d", SUFFIXES)
    found = records.read_unit(units[0], text="text", images="")
    assert [record.text for record in found] == [b"more text", b"text"]
    for _ in range(2):  # its plan holds the name, and knows it again
        made = prepare(PrepareConfig(str(tmp_path / "d")), tmp_path / "out")
        assert made.counts["documents"] == 2
    pytest.importorskip("pyarrow", reason="extra `data` not installed")
    bad = write(tmp_path / os.fsdecode(b"caf\xe9.parquet"), "x")
    with pytest.raises(ValueError, match=r"the name '.*caf\\udce9\.parquet' is not UTF-8; rename"):
        texts(bad)


def test_deep_json_in_a_field_that_is_not_read(tmp_path):
    deep = '{"text": "b", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    file = write(tmp_path / "c.jsonl", '{"text": "a"}\n' + deep + "\n")
    with pytest.raises(ValueError, match=r"c\.jsonl:2: objects and lists are nested more than 100"):
        texts(file)


def test_a_line_without_an_end_is_not_read_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MOST_LINE", 100)
    file = write(tmp_path / "c.jsonl", '{"text": "a"}\n' + '{"text": "' + "b" * 200 + '"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl:2: a line of more than 100 bytes"):
        texts(file)
    (unit,) = records.units(file, SUFFIXES)
    with pytest.raises(ValueError, match=r"c\.jsonl, byte 14: a line of more than 100 bytes"):
        list(records.read_unit(unit, text="text", images=""))


@pytest.mark.parametrize("files", ["../b.arrow", "/etc/passwd"])
def test_a_saved_dataset_lists_its_own_files_only(tmp_path, files):
    write(tmp_path / "b.arrow", "x")
    write(tmp_path / "d" / "state.json", json.dumps({"_data_files": [{"filename": files}]}))
    write(tmp_path / "d" / "dataset_info.json", "{}")
    pytest.importorskip("pyarrow", reason="extra `data` not installed")
    for door in (texts, lambda path: records.units(path, SUFFIXES)):
        with pytest.raises(ValueError, match=r"state\.json' does not list the files .* is outside"):
            door(tmp_path / "d")


def test_empty_files_are_called_empty(tmp_path):
    for name in ("a.jsonl", "a.txt"):
        file = write(tmp_path / name, "")
        with pytest.raises(ValueError, match=rf"{name}' is empty"):
            load(Config(path=str(file)), ByteTokenizer())
    with pytest.raises(ValueError, match=r"holds no record: 'a\.jsonl' is empty"):
        records.units(tmp_path / "a.jsonl", SUFFIXES)
    for name in ("a.jsonl.gz", "a.csv", "a"):
        with pytest.raises(
            ValueError, match=r"a(\.[a-z.]+)?': files .* are not read; if it is text"
        ):
            records.units(write(tmp_path / name, "x"), SUFFIXES)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has no file with a suffix of"):
        records.units(tmp_path / "none", SUFFIXES)


def test_a_path_of_nothing_and_the_home_folder(tmp_path, monkeypatch):
    """An empty path would be the folder that one is in, and --data.path=~/x a folder named ~."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "home" / "x" / "a.txt", "a")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for door in (texts, lambda path: records.units(path, SUFFIXES)):
        with pytest.raises(ValueError, match="='' names nothing; give a path"):
            door("")
        assert len(list(door("~/x"))) == 1
