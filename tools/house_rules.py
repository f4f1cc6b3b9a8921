"""The rules of this repository that no linter knows.

``python -m tools.house_rules k31fn`` lists what breaks them, and prints how densely each package is
written (:mod:`tools.density`) beside the aims; a missed aim is a finding too.

Read from the syntax tree, so comments and docstrings may name what code may not use (except TODO
and FIXME). A function's length is that of its body without its docstring: explaining costs nothing,
and neither does an argument on a line of its own.

A package has two faces. Users import from its door, ``k31fn.<package>``, and find there what is
meant for them; code in ``k31fn`` imports a name from the module that defines it, where a reader
finds it. Of :data:`USER_CODE` only the door is checked, whatever folders are given.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools import density

__all__ = ["Doors", "Finding", "check", "check_user_code", "doors_of", "main"]


class Finding(NamedTuple):
    """One broken rule, printed as ``file:line: rule, fix``."""

    path: str
    line: int
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}, {self.fix}"


_PICKLE = "rank and file data are JSON or safetensors: nothing is unpickled"
_MODULES = {
    "torch.utils.checkpoint": "use k31fn.autodiff.remat, which works under torch.func",
    "pickle": _PICKLE,
    "cloudpickle": _PICKLE,
    "dill": _PICKLE,
    "shelve": _PICKLE,
    "torch.load": _PICKLE,
    "torch.save": _PICKLE,
}
_JSON = (
    "k31fn.strict_json reads what comes from a file: a field twice, NaN and deep nesting are errors"
)
# What these read was written by a process of the same run.
_OWN_JSON = (
    "k31fn/strict_json.py",
    "k31fn/checkpoint/writer.py",
    "k31fn/checkpoint/writer_process.py",
    "k31fn/kernels/warmup/pool.py",
    "k31fn/kernels/warmup/__main__.py",
    "k31fn/parallel/backends/processes.py",
    "k31fn/testing/ranks.py",
    "k31fn/trainer/ranks/watchdog.py",
)
_CALLS = {"eval": "parse the value (json, ast.literal_eval)", "exec": "call a function"}
_ISLAND = (
    "compute in torch.promote_types(x.dtype, torch.float32), so that a float64 run stays float64"
)


USER_CODE = ("examples", "configs", "train.py")

Doors = Mapping[str, Mapping[str, str]]
"""By package: the names that its ``__init__`` takes from a module inside, and that module."""

_NO_DOORS: Doors = {}


def check(path: str, source: str, doors: Doors = _NO_DOORS) -> list[Finding]:
    """What breaks the rules in the file at ``path`` (posix, from the repository root) that holds
    ``source``, ``doors`` being those of the code under ``k31fn``.
    """
    tree = ast.parse(source, path)
    found = [*_text(source), *_lengths(path, source, tree), *_names(tree), *_code(tree)]
    if path.startswith("k31fn/layers/") or re.fullmatch(r"k31fn/kernels/(.+/)?reference\.py", path):
        found += _islands(tree)
    if path.startswith("k31fn/") and path not in _OWN_JSON:
        found += _uses(tree, {"json.loads": _JSON, "json.load": _JSON})
    if path != "k31fn/trackers.py":
        found += _uses(
            tree, {"torch.utils.tensorboard": "only k31fn/trackers.py writes TensorBoard events"}
        )
    found += _through_doors(tree, doors)
    return sorted(Finding(path, *f) for f in set(found))


def check_user_code(path: str, source: str) -> list[Finding]:
    """Imports of user code that go past a door: those modules may change without notice."""
    findings: set[Finding] = set()  # a statement of several names is one
    for line, module, _ in _imports(ast.parse(source, path)):
        if module.split(".")[0] == "k31fn" and not _DOOR.fullmatch(module):
            fix = "import from k31fn, k31fn.<package>, k31fn.layers.<layer> or k31fn.kernels.<op>"
            findings.add(Finding(path, line, f"{module} lies behind a door", fix))
    return sorted(findings)


def doors_of(sources: Mapping[str, str]) -> Doors:
    """The doors among these files: source by path."""
    doors: dict[str, dict[str, str]] = {}
    for path, source in sources.items():
        parts = Path(path).parts
        if parts[-1] != "__init__.py":
            continue
        package = ".".join(parts[:-1])
        doors[package] = {}
        for _, module, alias in _imports(ast.parse(source, path)):
            if module.startswith(package + "."):
                # Under the name by which others see it: an op takes its reference as another.
                doors[package][alias.asname or alias.name] = module
    return doors


_DOOR = re.compile(r"k31fn(\.\w+|\.(layers|kernels)\.\w+)?")


_Found = tuple[int, str, str]


def _through_doors(tree: ast.Module, doors: Doors) -> Iterator[_Found]:
    for line, package, alias in _imports(tree):
        module = doors.get(package, {}).get(alias.name)
        if module is not None:
            yield line, f"{package} only hands {alias.name} on", f"import it from {module}"


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, ast.alias]]:
    """Line and module of each import, and what is taken of it: of ``import a.b`` that is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, node.module, alias


def _text(source: str) -> Iterator[_Found]:
    for number, line in enumerate(source.splitlines(), 1):
        if mark := re.search(r"\b(TODO|FIXME)\b", line):
            yield number, f"{mark[0]} in a file", "do it now or open an issue"


def _lengths(path: str, source: str, tree: ast.Module) -> Iterator[_Found]:
    kernel = path.startswith("k31fn/kernels/")
    most_file, most_function = (500, 120) if kernel else (400, 80)
    lines = len(source.splitlines())
    if lines > most_file:
        yield most_file + 1, f"file of {lines} lines, at most {most_file}", "split it by subject"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _code_lines(node)
            if length > most_function:
                rule = (
                    f"function {node.name} has {length} lines in its body, at most {most_function}"
                )
                yield node.lineno, rule, "split it into named steps"


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body without its docstring, comments between included."""
    first = node.body[0]
    if density.is_docstring(first):
        start = (first.end_lineno or first.lineno) + 1
    else:
        start = first.lineno
    return (node.end_lineno or node.lineno) - start + 1


def _names(tree: ast.Module) -> list[_Found]:
    return _uses(tree, _MODULES)


def _uses(tree: ast.Module, banned: dict[str, str]) -> list[_Found]:
    """Imports of, and dotted references to, the banned modules and functions."""
    found: list[_Found] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            for name in _referred(node):
                uses = [ban for ban in banned if name == ban or name.startswith(ban + ".")]
                found += [(node.lineno, f"{ban} is banned", banned[ban]) for ban in uses]
    return found


def _referred(node: ast.stmt | ast.expr) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Attribute():
            return [dotted] if (dotted := _dotted(node)) else []
        case _:
            return []


def _dotted(node: ast.expr) -> str | None:
    """``torch.utils.checkpoint`` of that expression; None when it does not start with a name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            base = _dotted(value)
            return f"{base}.{attr}" if base else None
        case _:
            return None


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, list[ast.expr]]]:
    """Each call, with its arguments, positional and by keyword."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, [*node.args, *(k.value for k in node.keywords)]


def _code(tree: ast.Module) -> Iterator[_Found]:
    for call, _ in _calls(tree):
        if isinstance(call.func, ast.Name) and call.func.id in _CALLS:
            yield call.lineno, f"{call.func.id}() is banned", _CALLS[call.func.id]
        for keyword in call.keywords:
            if keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and not keyword.value.value
            ):
                yield call.lineno, "shell=True is banned", "pass a list of arguments"


def _islands(tree: ast.Module) -> Iterator[_Found]:
    for call, arguments in _calls(tree):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else None
        if method == "float" and not arguments:
            yield call.lineno, ".float() in a layer or reference", _ISLAND
        if method in ("to", "type") and any(
            _dotted(a) in ("torch.float32", "torch.float") for a in arguments
        ):
            yield call.lineno, ".to(torch.float32) in a layer or reference", _ISLAND


def _density_table(counts: dict[str, density.Counts]) -> str:
    """A row per package, the whole last: every rate that has an aim."""
    head = f"{'package':<14}{'files':>6}{'lines':>8}"
    lines = [head + "".join(f"{aim.rate:>16}" for aim in density.AIMS)]
    for package, of_package in counts.items():
        rates = of_package.rates()
        cells = "".join(f"{rates[aim.rate]:>16.2f}" for aim in density.AIMS)
        lines.append(f"{package:<14}{of_package.files:>6}{of_package.lines:>8}{cells}")
    signs = [f"{'>=' if aim.least else '<='} {aim.bound:g}" for aim in density.AIMS]
    lines.append(f"{'aim':<28}" + "".join(f"{sign:>16}" for sign in signs))
    return "\n".join(lines)


def _package(path: Path) -> str:
    """``layers`` of ``k31fn/layers/kda.py``; files at the top are a package of their own."""
    return path.parts[1] if len(path.parts) > 2 else "(top level)"


def _missed_aims(counts: dict[str, density.Counts]) -> list[Finding]:
    """Aims that the whole misses, or ``layers`` or ``model`` in comments."""
    rows = [(package, "comments") for package in ("layers", "model") if package in counts]
    rows += [("whole", aim.rate) for aim in density.AIMS]
    findings = []
    for aim in density.AIMS:
        for package, rate in rows:
            if rate != aim.rate:
                continue
            value = counts[package].rates()[rate]
            if not aim.holds(value):
                rule = f"{value:.2f} {rate} {aim.unit}, aim {aim.bound:g}"
                findings.append(Finding(package, 0, rule, "see tools/density.py"))
    return findings


def _user_code() -> list[Path]:
    files: list[Path] = []
    for root in map(Path, USER_CODE):
        files += [root] if root.is_file() else sorted(root.rglob("*.py"))
    return files


def main(arguments: list[str]) -> int:
    """Checks every Python file under the given folders and prints what was found.

    Returns:
        The exit status: 1 if there is a finding.
    """
    roots = arguments or ["k31fn"]
    files = sorted(f for root in roots for f in Path(root).rglob("*.py"))
    if not files:
        print(
            f"house rules: no Python file under {roots}; run from the repository root",
            file=sys.stderr,
        )
        return 1
    findings: list[Finding] = []
    counts: dict[str, density.Counts] = {}
    sources = {path.as_posix(): path.read_text(encoding="utf-8") for path in files}
    doors = doors_of(sources)
    for path in files:
        source = sources[path.as_posix()]
        findings += check(path.as_posix(), source, doors)
        rules = density.plain_lines(ast.parse(source))
        findings += [Finding(path.as_posix(), *rule) for rule in rules]
        for package in (_package(path), "whole"):
            counts[package] = counts.get(package, density.Counts()).plus(density.count(source))
    for path in _user_code():
        findings += check_user_code(path.as_posix(), path.read_text(encoding="utf-8"))
    counts["whole"] = counts.pop("whole")  # the last row
    findings += _missed_aims(counts)
    print(_density_table(counts))
    for finding in findings:
        print(finding)
    print(f"house rules: {len(files)} files, {len(findings)} findings", file=sys.stderr)
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
