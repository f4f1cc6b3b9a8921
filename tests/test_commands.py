"""Commands whose output vanishes or has few letters, and errors of a user's own code."""

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k31fn import commands
from k31fn.commands import outlives_output, print_own_traceback

REPOSITORY = Path(__file__).parents[1]

CHATTY = """
import sys
sys.path.insert(0, {root!r})
from k31fn.commands import outlives_output

@outlives_output("main: standard output is gone")
def main():
    for i in range(20000):
        print("line", i, flush=i < 2)
    open({done!r}, "w").write("all")
    return 3

sys.exit(main())
"""


def chatty(tmp_path):
    script = tmp_path / "chatty.py"
    script.write_text(CHATTY.format(root=str(REPOSITORY), done=str(tmp_path / "done")))
    return [sys.executable, str(script)]


def test_a_reader_that_leaves_changes_nothing(tmp_path):
    """Also at the interpreter's end, which flushes what is left: no status 120, no complaint."""
    with subprocess.Popen(
        chatty(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 3
    assert said == "main: standard output is gone (Broken pipe)\n"
    assert (tmp_path / "done").read_text() == "all"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_behind_the_output_changes_nothing(tmp_path, both):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            chatty(tmp_path), stdout=full, stderr=full if both else subprocess.PIPE, text=True
        )
    assert done.returncode == 3
    assert both or done.stderr == "main: standard output is gone (No space left on device)\n"
    assert (tmp_path / "done").read_text() == "all"


def test_letters_that_the_output_does_not_have_are_replaced(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1"))
    name = os.fsdecode(b"caf\xe9\xff.txt")

    @outlives_output()
    def main():
        print("café 漢", name)

    main()
    assert raw.getvalue() == "café ? caf??.txt\n".encode("latin-1")


def test_a_command_that_calls_a_command_has_one_output(capsys):
    @outlives_output()
    def inner():
        seen.append(sys.stdout)
        print("inner")

    @outlives_output()
    def outer():
        seen.append(sys.stdout)
        inner()

    seen = []
    before = sys.stdout
    outer()
    assert seen[0] is seen[1]
    assert seen[0] is not before
    assert sys.stdout is before
    assert capsys.readouterr().out == "inner\n"


class TestTraceback:
    def said(self, action, capsys):
        with pytest.raises(ValueError, match=r".") as caught:
            action()
        print_own_traceback(caught.value)
        return capsys.readouterr().err

    def test_of_code_of_the_user_s(self, capsys):
        def own_layer():
            raise ValueError("my shapes")

        err = self.said(own_layer, capsys)
        assert "Traceback" in err
        assert "own_layer" in err
        assert err.endswith("ValueError: my shapes\n")

    def test_of_what_it_called_of_the_standard_library(self, capsys):
        assert "_decoder.py" not in __file__
        import json

        assert "Traceback" in self.said(lambda: json.loads("{"), capsys)

    def test_not_of_the_library_s_own(self, capsys):
        from k31fn.layers import mlp

        assert self.said(lambda: mlp.Config(0, 1), capsys) == ""

    def test_not_where_the_library_lies_among_packages(self, capsys, monkeypatch):
        from k31fn.layers import mlp

        monkeypatch.setattr(commands, "_is_installed", lambda file: True)
        assert self.said(lambda: mlp.Config(0, 1), capsys) == ""


def test_two_dashes_are_no_value(capsys: pytest.CaptureFixture[str]):
    """Of which argparse of Python 3.11 makes an empty list."""
    parser = argparse.ArgumentParser("x")
    parser.add_argument("--count", type=int)
    assert commands.parse_arguments(parser, ["--count=3"]).count == 3
    with pytest.raises(SystemExit, match="2"):
        commands.parse_arguments(parser, ["--count=--"])
    assert capsys.readouterr().err.endswith("x: error: --count=--: '--' is no value\n")
