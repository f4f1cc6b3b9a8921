"""Counts of how densely code is written, and the rules of plain lines.

A stranger reads a line once if it does one thing. What is counted, per package and in the whole:

- comments per 100 lines of code. A line of code holds something besides a comment or docstring.
  Headers (``# -----``) and comments to a tool (``noqa``, ``type:``, ``pyright:``, ``fmt:``) do not
  count, and a trailing comment counts as one.
- comprehensions, comprehensions inside or with several ``for``, and walruses per 1,000 statements.
- public names per 1,000 lines: functions and classes at the top level without an underscore.
  Functions under ``@triton.jit`` do not count: they are device code, which the module's own Python
  launches, and nobody imports one as an API.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

__all__ = ["AIMS", "Aim", "Counts", "count", "is_docstring", "plain_lines"]

SHORT_COMPREHENSION = 60
"""Characters up to which a comprehension may have two ``for``."""

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TOOL_COMMENT = re.compile(r"#\s*(noqa|type:|pyright:|fmt:)")
_HEADER = re.compile(r"#\s*[-=]{5,}")


class Counts(NamedTuple):
    """What a file or a package has of each thing; they add up with :meth:`plus`."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    statements: int = 0
    comprehensions: int = 0
    nested: int = 0
    walruses: int = 0
    public: int = 0

    def plus(self, other: Counts) -> Counts:
        """The counts of both."""
        return Counts(*map(sum, zip(self, other, strict=True)))

    def rates(self) -> dict[str, float]:
        """Each count that has an aim, per 100 lines of code, 1,000 statements or 1,000 lines."""
        thousand = max(1, self.statements) / 1000
        return {
            "comments": 100 * self.comments / max(1, self.code),
            "comprehensions": self.comprehensions / thousand,
            "nested": self.nested / thousand,
            "walruses": self.walruses / thousand,
            "public": 1000 * self.public / max(1, self.lines),
        }


class Aim(NamedTuple):
    """A bound of a rate.

    Attributes:
        rate: a key of :meth:`Counts.rates`.
        bound: the value that is still right.
        least: whether the bound is the least value; else it is the largest.
        unit: what the rate is of.
    """

    rate: str
    bound: float
    least: bool
    unit: str

    def holds(self, value: float) -> bool:
        """Whether a rate is within the bound."""
        return value >= self.bound if self.least else value <= self.bound


AIMS = (
    Aim("comments", 6.0, True, "per 100 lines of code"),
    Aim("comprehensions", 35.0, False, "per 1,000 statements"),
    Aim("nested", 1.0, False, "per 1,000 statements"),
    Aim("walruses", 0.5, False, "per 1,000 statements"),
    Aim("public", 20.0, False, "per 1,000 lines"),
)


def count(source: str) -> Counts:
    """The counts of one file."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    code, comments = _code_and_comments(source, tree)
    return Counts(
        files=1,
        lines=len(source.splitlines()),
        code=code,
        comments=comments,
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        comprehensions=sum(isinstance(node, _COMPREHENSIONS) for node in nodes),
        nested=sum(_is_nested(node) for node in nodes),
        walruses=sum(isinstance(node, ast.NamedExpr) for node in nodes),
        public=sum(_is_public(node) for node in tree.body),
    )


def plain_lines(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, rule and fix of each statement that does several things at once."""
    for node in ast.walk(tree):
        if isinstance(node, _COMPREHENSIONS):
            if any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node)):
                yield node.lineno, "walrus inside a comprehension", "write a loop"
            if len(node.generators) > 1 and len(ast.unparse(node)) > SHORT_COMPREHENSION:
                rule = f"several `for` in a comprehension of over {SHORT_COMPREHENSION} characters"
                yield node.lineno, rule, "write a loop"
        if isinstance(node, ast.Assign) and _assigns_calls_side_by_side(node):
            yield node.lineno, "tuple-to-tuple assignment of calls", "write one line for each"


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a statement is a string that stands alone."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _is_nested(node: ast.AST) -> bool:
    if not isinstance(node, _COMPREHENSIONS):
        return False
    inner = list(ast.walk(node))[1:]
    return len(node.generators) > 1 or any(isinstance(n, _COMPREHENSIONS) for n in inner)


def _is_public(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    is_device_code = any(_dotted_name(d) == "triton.jit" for d in node.decorator_list)
    return not (is_device_code or node.name.startswith("_"))


def _dotted_name(decorator: ast.expr) -> str:
    """``triton.jit`` of ``@triton.jit`` and of ``@triton.jit(noinline=True)``."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _assigns_calls_side_by_side(node: ast.Assign) -> bool:
    if not isinstance(node.targets[0], ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(element, ast.Call) for element in node.value.elts)


def _code_and_comments(source: str, tree: ast.Module) -> tuple[int, int]:
    """Lines of code, and comments that tell a reader something."""
    docstring_lines = _docstring_lines(tree)
    code_lines: set[int] = set()
    comments = 0
    layout = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += not (_TOOL_COMMENT.match(token.string) or _HEADER.match(token.string))
        elif token.type not in layout:
            code_lines.update(range(token.start[0], token.end[0] + 1))
    return len(code_lines - docstring_lines), comments


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand alone: docstrings, also those under an attribute."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if is_docstring(node):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines
