"""Questions and answers about Python's standard library, from its own docstrings: conversations
without a download.

    python -m examples.docstrings build/docstrings    # conversations, and the stores that training
    reads python train.py configs/tiny_sft.py               # or from a model of text: --init
    runs/tiny python -m k31fn.sample runs/tiny_sft --chat --prompt "What does queue.Queue.get do?"

A conversation asks what a public function or class does; the answer is the first sentence of its
docstring. If it takes arguments, a second question asks for them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from k31fn import data
from k31fn.data import prepare

__all__ = ["conversations", "main", "write"]

LENGTH = 320  # tokens of a conversation, at most
_NOT_ABOUT = ("self", "cls")


def conversations() -> Iterator[dict[str, object]]:
    """Records with ``messages``, as ``python -m k31fn.data prepare SOURCE FOLDER --chat`` takes
    them.
    """
    for document in data.stdlib():
        path = PurePosixPath(document.name).with_suffix("")
        module = ".".join(path.parent.parts if path.name == "__init__" else path.parts)
        if module.startswith("_"):
            continue
        try:
            found = ast.parse(document.data)
        except SyntaxError:  # a file for another version of Python
            continue
        for name, node in _public(found, module):
            sentence = re.split(r"(?<=[.!?])\s", " ".join((ast.get_docstring(node) or "").split()))[
                0
            ]
            if len(sentence) > 10:
                yield {"messages": _messages(name, node, sentence)}


def _public(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Functions and classes by name, without those that are private or inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield f"{prefix}.{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _public(child, f"{prefix}.{child.name}")


def _messages(
    name: str, node: ast.FunctionDef | ast.ClassDef, sentence: str
) -> list[dict[str, str]]:
    kind = "do" if isinstance(node, ast.FunctionDef) else "stand for"
    asked = [(f"What does {name} {kind}?", sentence)]
    if isinstance(node, ast.FunctionDef):
        arguments = [
            a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        if arguments := [a for a in arguments if a not in _NOT_ABOUT]:
            asked.append(("Which arguments does it take?", ", ".join(arguments)))
    return [
        {"role": role, "content": text}
        for question, answer in asked
        for role, text in (("user", question), ("assistant", answer))
    ]


def write(root: Path) -> None:
    """The records in ``root/docstrings.jsonl``, and their stores in ``root/prepared``."""
    root.mkdir(parents=True, exist_ok=True)
    source = root / "docstrings.jsonl"
    source.write_text(
        "".join(json.dumps(record) + "\n" for record in conversations()), encoding="utf-8"
    )
    result = prepare.prepare(
        prepare.Config(str(source), "bytes+chat", chat="messages", max_length=LENGTH),
        root / "prepared",
    )
    print(
        ", ".join(f"{n:,} {what}" for what, n in result.counts.items()),
        f"left out: {dict(result.skipped)}",
    )


def main(argv: list[str] | None = None) -> int:
    """Writes the conversations; returns the exit status."""
    parser = argparse.ArgumentParser("python -m examples.docstrings", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the prepared stores go")
    write(parser.parse_args(argv).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
