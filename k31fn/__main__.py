"""The command ``k31fn``: one name for the commands of the package, ``k31fn train tiny``."""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

# By name: the module that ``python -m`` runs, and what it does.
_COMMANDS = {
    "train": ("k31fn.trainer", "trains a recipe, or goes on with a run"),
    "sample": ("k31fn.sample", "writes text with a trained model"),
    "plot": ("k31fn.plot", "a table and a picture of runs"),
    "inspect": ("k31fn.inspect", "layers, parameters and bytes of a config, without allocating"),
    "hf": ("k31fn.hf", "weights from and to Hugging Face's format"),
    "data": ("k31fn.data", "prepares and shows training data"),
    "kernels": ("k31fn.kernels", "operators, and what runs them on this machine"),
    "pair": ("k31fn.pair", "two runs of a recipe side by side"),
}
_TAKES_CONFIG = {"train", "inspect", "pair"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the named command with the other arguments; returns the exit status, 2 for a wrong
    name.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help"):
        print(_usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name not in _COMMANDS:
        nearest = "".join(difflib.get_close_matches(name, _COMMANDS, 1))
        hint = f"; do you mean {nearest!r}?" if nearest else ""
        print(f"k31fn: no command {name!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    if name in _TAKES_CONFIG:
        rest = [_config(word) for word in rest[:1]] + rest[1:]
    if name == "train":
        # As train.py does, before torch starts its threads.
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
        from k31fn.trainer.cli import main as train

        return train(rest)
    # As ``python -m`` runs it: each of them reads its arguments there and ends with its status.
    sys.argv = [f"k31fn {name}", *rest]
    runpy.run_module(_COMMANDS[name][0], run_name="__main__")
    return 0


def _usage() -> str:
    rows = "\n".join(f"  {name:<8} {what}" for name, (_, what) in _COMMANDS.items())
    names = ", ".join(sorted(_config_files()))
    return (
        f"usage: k31fn COMMAND [ARGUMENT ...]\n\n{rows}\n\nk31fn COMMAND --help says more. CONFIG "
        f"is a file or one of: {names}"
    )


def _config_files() -> dict[str, Path]:
    """The recipes that come with the package: in it where it was installed from a wheel, beside it
    in a clone.
    """
    here = Path(__file__).resolve().parent
    files: dict[str, Path] = {}
    for folder in (here.parent / "configs", here / "configs"):
        files.update({path.stem: path for path in folder.glob("[a-z]*.py")})
    return files


def _config(word: str) -> str:
    """The path of a recipe that is given by its name; any other word as it is."""
    known = _config_files()
    return str(known[word]) if word in known and not Path(word).exists() else word


if __name__ == "__main__":
    sys.exit(main())
