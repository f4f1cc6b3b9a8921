# pyright: reportMissingImports=false
"""Triton as :mod:`k31fn.kernels.warmup` needs it: its hooks, its cache, and a driver for where
there is no device.

Uses ``triton.knobs``, ``JITFunction.preload`` and ``runtime.driver.set_active``; with triton 3.6
and 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from k31fn import strict_json
from k31fn.kernels.warmup import Launch

__all__ = ["ahead_of_time", "compilations", "ensure", "folder", "load", "record", "use_folder"]

_BASE = Path(knobs.cache.dir)  # before use_folder
_SUMS = "k31fn-sha256.json"
# what Triton raises on half an entry
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration)


def folder(device: str) -> Path:
    """The folder of a device's kernels: below Triton's cache, or ``TRITON_CACHE_DIR``."""
    name = f"{device}-torch-{torch.__version__}-triton-{triton.__version__}"
    return _BASE / "k31fn" / re.sub(r"[^\w.+-]", "-", name)


def use_folder(path: Path) -> None:
    """Makes ``path`` the cache of all of this process's kernels."""
    path.mkdir(parents=True, exist_ok=True)
    knobs.cache.dir = str(path)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that Triton compiles inside, by name; one that it finds in its cache is not among
    them.
    """
    names: list[str] = []
    before = knobs.compilation.listener

    # the listener that was there, a profiler's or a test's, is told too
    def seen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            names.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = seen
    try:
        yield names
    finally:
        knobs.compilation.listener = before


def record(run: Callable[[], None]) -> list[Launch]:
    """The kernels that ``run()`` would compile.

    None of them is compiled or launched, so its results mean nothing.
    """
    wanted: dict[Launch, None] = {}

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        kernel = fn.jit_function.fn
        target = cast(GPUTarget, driver.active.get_current_target())
        launch = Launch(
            kernel.__module__,
            kernel.__qualname__,
            (target.backend, target.arch, target.warp_size),
            compile["specialization_data"],
        )
        wanted[launch] = None
        return True  # which makes Triton leave the launch out

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        run()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(wanted)


class _Ahead:
    """Stands for a driver where there is no device: enough to compile, not to launch."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ahead_of_time(target: tuple[str, int | str, int]) -> None:
    """Makes this process compile from now on for ``target``, whether it has such a device or
    not, and launch nothing.
    """
    stand_in: Any = _Ahead(GPUTarget(*target))
    driver.set_active(stand_in)


def ensure(launch: Launch) -> tuple[Any, str]:
    """The compiled kernel, from the cache if it is there whole, and how it was made.

    Returns:
        Triton's kernel; and ``"found"``, ``"compiled"``, or ``"rebuilt"``: something was there, but
        not all of it.
    """
    kernel_of = getattr(importlib.import_module(launch.module), launch.function)
    with _alone(launch), compilations() as compiled:
        try:
            kernel = kernel_of.preload(launch.data)
        except _DAMAGED:
            kernel = None
            _drop_odd_groups()
        # found, but with other files than were written: a disk that was full, a copy cut short
        if kernel is None or (not compiled and _sums(kernel) != _written(kernel)):
            with _always_compiling():
                kernel = kernel_of.preload(launch.data)
            state = "rebuilt"
        else:
            state = "compiled" if compiled else "found"
        if state != "found":
            _write(_place(kernel), json.dumps(_sums(kernel)))
    return kernel, state


def load(wanted: Sequence[Launch], *, on_device: bool) -> None:
    """Loads kernels into this process, and into its current device's memory if ``on_device``;
    compiles what is missing.

    A launch of one of them finds it without asking the file system.
    """
    for launch in wanted:
        kernel, _ = ensure(launch)
        if on_device:
            kernel._init_handles()  # the step that loads a binary; Triton does it at first launch


@contextlib.contextmanager
def _alone(launch: Launch) -> Iterator[None]:
    """One process at a time works on an entry.

    The system unlocks what a process that is killed held.
    """
    locks = Path(knobs.cache.dir) / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps(launch).encode()).hexdigest()
    with open(locks / name, "a") as file:  # "a": the file is there for its lock, and stays empty
        # a file system without locks: both compile, and the last name wins
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _always_compiling() -> Iterator[None]:
    before = knobs.compilation.always_compile
    knobs.compilation.always_compile = True
    try:
        yield
    finally:
        knobs.compilation.always_compile = before


def _drop_odd_groups() -> None:
    """Removes lists of an entry's files that are JSON and no such list: Triton fails on them even
    where it compiles.
    """
    for file in Path(knobs.cache.dir).glob("*/__grp__*"):
        with contextlib.suppress(OSError, ValueError):
            group = strict_json.parse(file.read_bytes(), file.name)
            if not isinstance(group, dict) or not isinstance(group.get("child_paths", {}), dict):
                file.unlink(missing_ok=True)


def _sums(kernel: Any) -> dict[str, str]:
    files = sorted(kernel.metadata_group.items())
    return {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in files}


def _place(kernel: Any) -> Path:
    return Path(next(iter(kernel.metadata_group.values()))).parent / _SUMS


def _written(kernel: Any) -> Any:
    try:
        return strict_json.load_object(_place(kernel))
    except (OSError, ValueError):
        return None


def _write(file: Path, text: str) -> None:
    # renamed when it is whole and on the disk: a reader sees all of it or nothing
    temporary = file.with_name(f"{file.name}.{os.getpid()}-{uuid.uuid4().hex}")
    with open(temporary, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
