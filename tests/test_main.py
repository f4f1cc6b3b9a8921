"""The command ``k31fn``."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from k31fn import __main__ as command

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k31fn", *arguments], capture_output=True, text=True, cwd=ROOT
    )


def test_it_lists_its_commands_and_recipes(capsys):
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in command._COMMANDS)
    assert ", tiny, " in said
    assert command.main(["trian"]) == 2
    assert "no command 'trian'; do you mean 'train'?" in capsys.readouterr().err


def test_every_command_is_a_module_that_runs():
    for module, _ in command._COMMANDS.values():
        path = ROOT / module.replace(".", "/")
        is_module = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert is_module or module == "k31fn.trainer"


def test_a_recipe_is_found_by_its_name(tmp_path, monkeypatch):
    assert command._config("tiny") == str(ROOT / "configs" / "tiny.py")
    assert command._config("mine.py") == "mine.py"
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command._config("tiny") == "tiny"  # what is there is meant
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"] == {"configs": "k31fn/configs"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "tiny", "--stps", "3"), "stps"),
        (("inspect", "tiny"), "parameters"),
    ],
)
def test_a_command_gets_its_arguments(arguments, message):
    done = run(*arguments)
    assert message in done.stdout + done.stderr
    assert done.returncode == (2 if "train" in arguments else 0)
