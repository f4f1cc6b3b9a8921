"""``python -m k31fn.data prepare SOURCE FOLDER``: text and images to memory-mapped shards that
training reads. ``verify FOLDER`` compares all of a prepared folder with its checksums.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from k31fn import regular_files
from k31fn.commands import outlives_output, parse_arguments
from k31fn.data import images
from k31fn.data.prepare import Config, PrepareProgress, prepare
from k31fn.data.verify import verify

__all__ = ["main"]


@outlives_output()
def main(arguments: list[str] | None = None) -> int:
    """Prepares a source, or verifies what is prepared; returns the exit status.

    0: all of it is there. 1: something is damaged. 2: a wrong call, or a source that cannot be
    prepared.
    """
    parser = argparse.ArgumentParser(prog="python -m k31fn.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "prepare",
        help="tokenise text and cut images; call it again to go on",
        usage="python -m k31fn.data prepare SOURCE FOLDER [--OPTION VALUE ...]",
    )
    default = images.Config()
    command.add_argument(
        "source",
        help="text, .jsonl or .parquet files, a folder of them, or a saved HF dataset",
    )
    command.add_argument("folder", help="where the stores train and heldout go")
    command.add_argument(
        "--tokenizer", default="bytes", help="bytes, bytes+media, or a tokenizer's file or folder"
    )
    command.add_argument("--end", default="", help="name of the token that ends a document")
    command.add_argument("--text", default="text", help="field that holds the text")
    command.add_argument(
        "--images", default="", help="field that holds the images; none if left out"
    )
    what = (
        "field that holds messages (messages if left out): the records are conversations, learnt "
        "are the answers"
    )
    command.add_argument("--chat", nargs="?", const="messages", default="", help=what)
    command.add_argument(
        "--max-length", type=int, default=0, help="tokens of a conversation; cut between messages"
    )
    command.add_argument(
        "--heldout", type=float, default=0.05, help="fraction of documents to hold out"
    )
    command.add_argument(
        "--max-patches", type=int, default=default.max_patches, help="of one image"
    )
    command.add_argument(
        "--max-side", type=int, default=default.max_side, help="patches along a side"
    )
    command.add_argument(
        "--on-bad",
        choices=("refuse", "skip"),
        default="refuse",
        help="what a bad image, conversation or line does: end it, or be left out and counted",
    )
    command.add_argument(
        "--verify",
        action="store_true",
        help="then compare all of the folder with its checksums",
    )
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    command = commands.add_parser("verify", help="compare what is prepared with its checksums")
    command.add_argument("folder", help="what was prepared, or one store of it")
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads")
    command.set_defaults(verify=True)
    args = parse_arguments(parser, arguments)
    try:
        if args.workers < 1:
            raise ValueError(f"workers={args.workers} must be at least 1")
        if args.command == "prepare":
            _prepare(args)
        return _verify(args) if args.verify else 0
    except (ValueError, ImportError, OSError) as e:
        print(f"k31fn.data: {regular_files.shown(e, args.folder)}", file=sys.stderr)
        return 2


def _prepare(args: argparse.Namespace) -> None:
    cfg = _config(args)
    # On stderr, so that what was prepared can be piped on.
    with _bar(sys.stderr.write, terminal=sys.stderr.isatty()) as report:
        result = prepare(cfg, args.folder, workers=args.workers, report=report)
    skipped = ", ".join(f"{n} {reason}" for reason, n in result.skipped.items()) or "none"
    totals = "{documents:,} documents, {tokens:,} tokens, {images:,} images"
    print(f"{totals.format_map(result.counts)} in {args.folder}; documents left out: {skipped}")
    if args.images and not result.counts["images"]:
        print(
            f"k31fn.data: images={args.images!r}: no record has an image in this field",
            file=sys.stderr,
        )
    if result.others:
        files = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(result.others.items()))
        print(f"files of other suffixes, which are not read: {files}")
    for name, count in result.unread.items():
        print(
            f"left out: the field {name!r} of {count:,} conversations; what it declares belongs "
            "into a system message"
        )
    if args.chat:
        print(
            "learnt: {learnt:,} tokens; {shortened:,} conversations shortened, "
            "{dropped:,} messages dropped".format_map(result.counts)
        )


def _verify(args: argparse.Namespace) -> int:
    found = verify(args.folder, workers=args.workers)
    for problem in found.problems:
        print(regular_files.shown(problem))
    if found.unchecked:
        print(f"{found.unchecked} shards of an earlier version have no checksums: unchecked")
    whole = "damaged" if found.problems else "as it was written"
    print(f"{args.folder}: {found.num_bytes:,} bytes, {whole}")
    return 1 if found.problems else 0


def _config(args: argparse.Namespace) -> Config:
    return Config(
        args.source,
        args.tokenizer,
        args.end,
        args.text,
        args.images,
        args.chat,
        args.max_length,
        heldout_fraction=args.heldout,
        image=images.Config(
            max_patches=args.max_patches, max_side=args.max_side, on_bad=args.on_bad
        ),
    )


@contextlib.contextmanager
def _bar(
    write: Callable[[str], object], *, terminal: bool
) -> Iterator[Callable[[PrepareProgress], None]]:
    """Reports progress to a terminal as a bar, whose line ends with the block, elsewhere as a line
    per tenth.
    """
    began = time.monotonic()
    shown = -1  # how far the last line said it was, in parts of the bar or in tenths

    def show(progress: PrepareProgress) -> None:
        nonlocal shown
        done = progress.done
        total = max(progress.total, 1)
        seconds = time.monotonic() - began
        # Shards that an earlier call left count as done at second 0, so this is too low after one.
        left = f", about {seconds / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = (
            f"{done} of {total} shards, {progress.counts['tokens']:,} tokens, {seconds:.0f} s{left}"
        )
        if terminal:
            shown = filled = 30 * done // total
            # Back to the start of the line, and what was there before is erased.
            write(f"\r\033[K[{'#' * filled}{'.' * (30 - filled)}] {line}")
        elif 10 * done // total > shown:
            shown = 10 * done // total
            write(line + "\n")

    try:
        yield show
    finally:
        if terminal and shown >= 0:
            write("\n")


if __name__ == "__main__":
    sys.exit(main())
