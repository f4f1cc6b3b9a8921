"""All Triton kernels of k31fn, from the registry: what they compile to, and whether they keep to
the dialect.

``builds(kind)`` lists what is compiled for a kind of device, and refuses a registry that would
leave something out: a file of kernels that no implementation names, an op without a forward kernel,
or without a backward one where it has gradients, a kernel that no device's list has, or no kernel
at all. ``dialect(path)`` lists what a file uses that not all backends have, or compile to what the
interpreter does not do.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import k31fn.kernels
from k31fn.kernels.launch import Build
from k31fn.kernels.registry import OPS, load_all

__all__ = ["KINDS", "builds", "dialect", "files", "modules"]

KINDS = ("cuda", "npu")
_ROOT = Path(next(iter(k31fn.kernels.__path__)))
_LONGEST_NAME = 49  # characters: CANN cuts longer names of kernels
_ABSENT = {
    "make_block_ptr": "gone in Triton 3.9; use pointers and masks",
    "make_tensor_descriptor": "of one vendor; use pointers and masks",
    "rand": "draw outside the kernel, from a key",
    "sort": "not on all backends",
    "cumsum": "not on all backends; use a triangular product",
    "argmax": "not on all backends; ties differ",
    "inline_asm_elementwise": "of one vendor",
    "float64": "not on Ascend; float64 runs the reference",
    "atomic_add": "sums in the order of arrival; store parts and add them in order",
    "autotune": "compiles many variants at start; use a table of tiles",
}


def files() -> list[Path]:
    """Every file of Triton kernels; one that only uses triton has none."""
    paths = [*_ROOT.glob("*/triton.py"), *_ROOT.glob("*/triton/*.py")]
    return sorted(filter(_kernels, paths))


def modules() -> dict[str, Any]:
    """The imported module of each op with kernels, which lists them; some may be in other files."""
    load_all()
    imported = {}
    for op in sorted(OPS.values(), key=lambda op: op.name):
        for impl in op.implementations.values():
            if impl.kernels:
                imported[op.name] = importlib.import_module(impl.kernels)
    return imported


def builds(kind: str) -> list[Build]:
    """Kernels to compile for a kind of device.

    Raises:
        ValueError: something would be left out.
    """
    found: list[Build] = []
    listed: set[str] = set()
    for op, module in modules().items():
        # of all kinds: a kernel that one kind does not use has to be in another's list
        by_kind = {k: module.builds(k) for k in KINDS}
        for direction in ("forward", "backward") if OPS[op].differentiable else ("forward",):
            if not any(b.direction == direction for b in by_kind[kind]):
                raise ValueError(f"op {op!r}: its builds({kind!r}) have no {direction} kernel")
        for some in by_kind.values():
            listed |= {build.kernel.__name__ for build in some}
        found += by_kind[kind]
    if not found:
        raise ValueError("no kernel is registered")
    missing = set().union(*map(_kernels, files())) - listed
    if missing:
        raise ValueError(
            f"{sorted(missing)} are in no device's builds of a module that an implementation names "
            "(Implementation.kernels); helpers start with _ or return something"
        )
    return found


def _kernels(path: Path) -> set[str]:
    """Names of the file's ``@triton.jit`` functions that are not helpers: a kernel returns
    nothing.
    """
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            jitted = "triton.jit" in map(ast.unparse, node.decorator_list)
            if jitted and not any(map(_returns, ast.walk(node))):
                names.add(node.name)
    return names


def _returns(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and node.value is not None


def dialect(path: Path, source: str | None = None) -> list[str]:
    """Uses in the file that not every backend can do, as ``line: what, why``."""
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source)
    found = []
    for name in _kernels(path):
        if len(name) > _LONGEST_NAME:
            found.append((0, f"{name}: {len(name)} characters, at most {_LONGEST_NAME}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_triton = ast.unparse(node.value) in ("tl", "triton", "tl.extra")
            reason = _ABSENT.get(node.attr) if of_triton else None
            if reason:
                found.append((node.lineno, f"{ast.unparse(node)}: {reason}"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot":
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if given.get("input_precision") != "'ieee'":
                fault = "tl.dot: input_precision='ieee', or float32 is cut to tf32 on CUDA"
                found.append((node.lineno, fault))
        if isinstance(node, ast.FunctionDef):
            found += _second_names(node)
    return [f"{line}: {what}" for line, what in sorted(found)]


def _second_names(function: ast.FunctionDef) -> list[tuple[int, str]]:
    """Names that are a second one of a value when a loop begins which sets both.

    Triton (3.6, 3.9) carries a variable through a loop only if its body gives it another value than
    it had. With ``b = a`` before, ``b = a`` in the loop is no change, and b stays what it was; the
    interpreter does what Python does, so no test on a CPU sees it.
    """
    found: list[tuple[int, str]] = []
    second: dict[str, ast.Name] = {}
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target = node.targets[0]
            if isinstance(node.value, ast.Name):
                second[target.id] = node.value
            else:
                second.pop(target.id, None)
        if isinstance(node, ast.For):
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            for name, value in second.items():
                if name in stored and value.id in stored:
                    fault = f"{name} = {value.id}: the loop would not carry both; make two values"
                    found.append((value.lineno, fault))
    return found
