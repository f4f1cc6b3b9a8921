# pyright: reportMissingImports=false
"""Runs the IR that Ascend's frontend makes of a kernel, on the CPU, in place of the kernel.

linalg IR to loops to LLVM (upstream passes of ascendnpu-ir's ``bishengir-opt``), compiled in this
process by llvmlite, called once per program of the grid on the tensors' own memory.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import llvmlite.binding as llvmlite
from torch import Tensor
from triton._C.libtriton import ir, llvm

from tools.ascend.compile import TARGETS, TOOLS, CompileError, to_linalg

__all__ = ["OnCpu", "load_shim"]

_PASSES = [
    "--canonicalize",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--convert-cf-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
]
_TYPES = {
    "torch.float32": "*fp32",
    "torch.bfloat16": "*bf16",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
    "torch.uint8": "*u8",
}


def load_shim(folder: Path) -> None:
    """Compiles and loads the one function that the lowered IR needs, and libm."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", str(source), "-o", str(library)], check=True)
    llvmlite.initialize_native_target()
    llvmlite.initialize_native_asmprinter()
    llvmlite.load_library_permanently("libm.so.6")
    llvmlite.load_library_permanently(str(library))


class OnCpu:
    """Stands in for a ``@triton.jit`` function: ``kernel[grid](*args, **constants)``."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.built: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """A launch with this grid."""

        def launch(*args: Any, **given: Any) -> None:
            names = self.kernel.arg_names
            constants = {k: v for k, v in given.items() if k in names}
            values = dict(zip([n for n in names if n not in constants], args, strict=True))
            types = {k: _type(v) for k, v in values.items()}
            key = (tuple(types.items()), tuple(constants.items()))
            if key not in self.built:
                self.built[key] = _machine_code(self.kernel, types, constants)
            _call(self.built[key][1], types, values, grid[0])

        return launch


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[str(value.dtype)]
    return "fp32" if isinstance(value, float) else "i32"


def _machine_code(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> tuple[Any, int]:
    """The engine that owns the code, and the address of the function."""
    lines = to_linalg(kernel, types, constants, TARGETS[-1]).splitlines()
    linalg = "\n".join(
        line for line in lines if "annotation.mark" not in line
    )  # a hint, unknown to upstream passes
    with tempfile.TemporaryDirectory() as name:
        source, lowered = Path(name) / "a.mlir", Path(name) / "b.mlir"
        source.write_text(linalg, encoding="utf-8")
        command = [str(TOOLS / "bishengir-opt"), str(source), *_PASSES, "-o", str(lowered)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{kernel.__name__} does not lower for the CPU: {done.stderr[:300]}")
        context = ir.context()
        ir.load_dialects(context)
        module = ir.parse_mlir_module(str(lowered), context)
        module.context = context
        llvm.init_targets()
        text = str(llvm.to_module(module, llvm.context()))
    parsed = llvmlite.parse_assembly(text)
    parsed.verify()
    machine = llvmlite.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvmlite.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine, engine.get_function_address(kernel.__name__)


def _call(address: int, types: dict[str, str], values: dict[str, Any], programs: int) -> None:
    """One program after the other. Pointers travel as memrefs of rank 1; two empty ones and six
    integers are added.
    """
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    memref = [pointer, pointer, integer, integer, integer]
    kinds: list[Any] = memref * 2
    passed: list[Any] = [None, None, 0, 0, 1] * 2
    for name, value in values.items():
        if types[name].startswith("*"):
            kinds += memref
            passed += [value.data_ptr(), value.data_ptr(), 0, value.numel(), 1]
        else:
            kinds.append(ctypes.c_float if types[name] == "fp32" else ctypes.c_int32)
            passed.append(value)
    function = ctypes.CFUNCTYPE(None, *kinds, *[ctypes.c_int32] * 6)(address)
    for program in range(programs):
        function(*passed, programs, 1, 1, program, 0, 0)
