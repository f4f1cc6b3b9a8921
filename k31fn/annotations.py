"""Annotations as checks at run time: what :func:`k31fn.checked` installs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import Any

import jaxtyping

__all__ = ["install"]


class _KernelsUnchecked:
    """Triton reads the source of its functions, so these may not be wrapped: their modules go
    around the hook.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that Python itself finds, for a module of kernels; None for any other."""
        is_kernels = name.startswith("k31fn.kernels.") and ".triton" in name
        return importlib.machinery.PathFinder.find_spec(name, path, target) if is_kernels else None


def install() -> None:
    """Puts the checks around the functions of every module that is imported from now on; once.

    Raises:
        RuntimeError: as :func:`k31fn.checked` says.
    """
    if _KernelsUnchecked in map(type, sys.meta_path):
        return
    if importlib.util.find_spec("beartype") is None:
        raise RuntimeError("checked annotations need beartype: pip install beartype")
    loaded = sorted(m for m in sys.modules if m.startswith("k31fn.") and m != __name__)
    if loaded:
        raise RuntimeError(
            f"{loaded[0]} is imported already and would go unchecked; call k31fn.checked() right "
            "after import k31fn, or set K31FN_CHECK=1"
        )
    jaxtyping.install_import_hook("k31fn", "beartype.beartype")
    sys.meta_path.insert(0, _KernelsUnchecked())
