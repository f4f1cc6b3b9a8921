"""Only regular files are opened, none beyond its bound, and a name in a file leads out of no
folder.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from k31fn import regular_files


def test_a_regular_file_and_a_link_to_one(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for name in ("a", "b"):
        assert regular_files.check(tmp_path / name) == 3
        assert regular_files.read(tmp_path / name, most=3) == b"abc"
        with pytest.raises(ValueError, match=rf"{name}': it has more than 2 bytes"):
            regular_files.read(tmp_path / name, most=2)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        # By a short name: a socket's path has at most a hundred bytes.
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (make_pipe, "it is a named pipe, not a regular file"),
        (make_socket, "it is a socket, not a regular file"),
        (Path.mkdir, "it is a folder, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to(path.parent / "gone"), "No such file"),
        (lambda path: None, "No such file"),
    ],
)
@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_named_at_once(tmp_path: Path, make, why: str):
    path = tmp_path / "x"
    make(path)
    for door in (regular_files.check, regular_files.open_file):
        with pytest.raises(ValueError, match=rf"cannot read '.*/x': {why}"):
            door(path)


def test_a_file_that_says_it_is_empty_has_a_bound():
    """Some files of the system do."""
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no /proc")
    assert os.stat(path).st_size == 0
    assert b"Pid:" in regular_files.read(path, most=1 << 20)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        regular_files.read(path, most=10)


def test_a_name_in_a_file_stays_inside(tmp_path: Path):
    inner = tmp_path / "in"
    inner.mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "inside").write_text("not in it: its name only begins like it")
    (inner / "a").write_text("a")
    (inner / "out").symlink_to(tmp_path / "secret")
    (inner / "loop").symlink_to(inner / "loop")
    (tmp_path / "again").symlink_to(inner)
    for folder in (inner, tmp_path / "again"):  # a folder may be behind a link itself
        for part in ("a", "./a", "b/../a"):
            assert regular_files.contained(folder, part) == inner / "a"
        for part in ("../secret", str(tmp_path / "secret"), "out", "../inside", "/dev/zero"):
            with pytest.raises(ValueError, match=rf"^{re.escape(repr(part))} is outside '.*/in'"):
                regular_files.contained(folder, part)
    assert regular_files.contained(inner, "../secret", within=tmp_path) == tmp_path / "secret"
    with pytest.raises(ValueError, match="no name of a file"):
        regular_files.contained(inner, "a\0b")
    with pytest.raises(ValueError, match="symbolic links"):
        regular_files.read(regular_files.contained(inner, "loop"), most=9)


def test_a_path_that_a_person_typed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/of")
    assert regular_files.path("~/x", "runs") == Path("/home/of/x")
    assert regular_files.path("a/~", "runs") == Path("a/~")
    assert regular_files.path(".", "runs") == Path(".")
    with pytest.raises(ValueError, match=r"^runs='' names nothing"):
        regular_files.path("", "runs")
    with pytest.raises(ValueError, match=r"^runs='~nobody-of-this-name/x': there is no such home"):
        regular_files.path("~nobody-of-this-name/x", "runs")


def test_a_message_gives_a_terminal_no_orders():
    assert regular_files.shown("a\x1b[2Jb\r\u202ec\udcff ü\n  d") == (
        "a\\x1b[2Jb\\r\\u202ec\\udcff ü\n  d"
    )


def test_a_line_without_an_end_is_cut_in_its_middle():
    long = regular_files.shown("x=" + "\0" * 5000 + "; use 3\nsecond")
    first, second = long.split("\n")
    assert second == "second"
    assert first.startswith("x=\\x00")
    assert first.endswith("; use 3")
    assert len(first) < 1500
