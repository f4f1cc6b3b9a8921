# pyright: reportMissingImports=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Triton kernels to Ascend's IR, without an NPU and without CANN.

Stages: Triton IR, linalg (triton-ascend's adapter), HIVM (ascendnpu-ir's compiler: fusion, memory
planning within UB, L1 and L0C, synchronisation). The step from HIVM to machine code needs CANN; a
stub that does nothing stands in for it, or CANN's own where it is on the PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.pop("TRITON_INTERPRET", None)

import ascendnpuir
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["TARGETS", "TOOLS", "CompileError", "Hivm", "to_hivm", "to_linalg"]

TARGETS = ("Ascend910B3", "Ascend910_9392")  # A2 and A3
TOOLS = Path(str(ascendnpuir.__file__)).parent / "bin"
_SECONDS = 120  # for one kernel; the slowest of mHC takes 13 on a busy core

_STUB = """#!/bin/sh
[ "$1" = "--version" ] && { echo "hivmc 1.2.0"; exit 0; }
before=; out=
for a in "$@"; do [ "$before" = "-o" ] && out="$a"; before="$a"; done
[ -n "$out" ] && : > "$out" && : > "$out.o"
exit 0
"""


class CompileError(RuntimeError):
    """A kernel that does not compile; the message is the compiler's."""


class Hivm(NamedTuple):
    """Result of the compiler for a kernel.

    Attributes:
        mode: which cores: ``aiv`` (vector), ``aic`` (cube) or ``mix``.
        scalar: loads and stores of single elements, which are slow.
        retried: whether the first plan overflowed UB and a second was made.
    """

    mode: str
    scalar: int
    retried: bool


def to_linalg(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], target: str
) -> str:
    """The kernel as linalg IR.

    Raises:
        CompileError: the frontend or the adapter refused it.
    """
    backend = backends["ascend"].compiler(GPUTarget("npu", target, 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"hash": "x", "target": backend.target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    source = ASTSource(fn=kernel, signature=dict(signature), constants=dict(constants))
    try:
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        return str(stages["ttadapter"](stages["ttir"](module, metadata), metadata))
    except subprocess.CalledProcessError as e:
        raise CompileError(e.stderr.decode()[-300:]) from e
    except Exception as e:  # the frontend's errors have no common base
        raise CompileError(f"{type(e).__name__}: {str(e).strip().splitlines()[-1][:300]}") from e


def to_hivm(linalg: str, target: str) -> Hivm:
    """Compiles linalg IR up to the step that only CANN has.

    Raises:
        CompileError: with the compiler's last error, such as an overflow of UB, or since it took
            too long.
    """
    mode = re.search(r'mix_mode\s*=\s*"([^"]+)"', linalg)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "kernel.mlir"
        source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg), encoding="utf-8")
        command = [
            str(_executable("bishengir-compile")),
            str(source),
            f"--target={target}",
            "--enable-auto-multi-buffer=True",
            "--enable-auto-bind-sub-block=True",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            f"--save-temps={folder}/steps",
            "-o",
            f"{folder}/kernel",
        ]
        env = {**os.environ, "PATH": f"{_stubs(folder)}{os.environ['PATH']}"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=env, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"bishengir-compile was not done after {_SECONDS} s") from None
        hivm = "".join(p.read_text(encoding="utf-8") for p in (folder / "steps").rglob("*.mlir"))
    said = done.stderr + done.stdout
    if done.returncode or not hivm:
        errors = [line for line in said.splitlines() if "error:" in line or "overflow" in line]
        raise CompileError(
            re.sub(r'loc\("[^"]*"', 'loc("k"', errors[-1])[:300] if errors else said[-300:]
        )
    scalar = len(re.findall(r"= memref\.load|memref\.store", hivm))
    return Hivm(mode[1] if mode else "", scalar, "retrying compilation" in said)


def _stubs(folder: Path) -> str:
    """A folder for the PATH with a stand-in for CANN's compiler; nothing where CANN is there."""
    if shutil.which("hivmc"):
        return ""
    stub = folder / "bin" / "hivmc"
    stub.parent.mkdir()
    stub.write_text(_STUB, encoding="utf-8")
    stub.chmod(0o755)
    return f"{stub.parent}:"


def _executable(name: str) -> Path:
    path = TOOLS / name
    if not os.access(path, os.X_OK):  # wheels may lose the bit
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
