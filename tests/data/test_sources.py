import builtins
import json
import sysconfig
from pathlib import Path

import pytest

from k31fn.data import read, stdlib
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
        (b'{"text": ', r"c\.jsonl:2: not a line of UTF-8 JSON"),
        (b'{"text": "\xff"}', r"c\.jsonl:2: not a line of UTF-8 JSON"),
        (
            b'{"body": "b", "id": 1}',
            r"c\.jsonl:2: no field data.field='text'; the line has \['body', 'id'\]",
        ),
        (b"[1]", r"c\.jsonl:2: no field data.field='text'; the line has list"),
        (b'{"text": 3}', r"c\.jsonl:2: data.field='text' is of type int"),
        (b'{"text": null}', r"c\.jsonl:2: data.field='text' is of type NoneType"),
        (b'{"text": "\\ud800"}', r"c\.jsonl:2: data.field='text' is not valid Unicode"),
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
        with pytest.raises(ValueError, match=rf"data.path: cannot read '.*{name}': No such file"):
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
    with pytest.raises(ValueError, match=r"c\.parquet, row 0: data.field='id' is of type int"):
        texts(tmp_path, field="id")
    with pytest.raises(ValueError, match=r"data\.path: cannot read '.*bad\.parquet'"):
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
    with pytest.raises(ValueError, match=r"data\.path: cannot read '.*data-00001"):
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
