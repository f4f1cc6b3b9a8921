"""``python -m k31fn.hf verify FOLDER``: compares a checkpoint in K3's names with its config, without loading it."""

from __future__ import annotations

import argparse
import sys

from k31fn.hf import verify

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Prints what the folder holds and what is wrong with it; 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m k31fn.hf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="compare a folder with its config.json, from headers alone")
    command.add_argument("folder", help="of safetensors files and config.json")
    folder = parser.parse_args(arguments).folder
    report = verify(folder)
    print(
        f"{folder}: {report.num_weights:,} weights in {report.num_tensors:,} tensors ({report.num_quantised:,} of them "
        f"MXFP4 codes) in {report.num_files} files"
    )
    print(report.problems or "fits its config")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
