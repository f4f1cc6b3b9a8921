"""A device ``npu`` in Python whose tensors hold tensors of the CPU: for code that must not care
where it runs.

With the stand-in for torch_npu beside it, so that :mod:`k31fn.device` finds two devices and
adapters their operators. torch takes the name for the whole process, so :func:`install` belongs
into a process of its own.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import Counter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.npu import fake_torch_npu

__all__ = ["NpuTensor", "install", "raw"]

_holders: Counter[int] = Counter()  # tensors per storage of the CPU
_bytes = {"now": 0, "most": 0}


class NpuTensor(Tensor):
    """On ``npu`` for everybody who asks; every operation runs on the tensor of the CPU inside."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, index: int = 0) -> NpuTensor:
        if isinstance(held, NpuTensor):
            raise TypeError("an npu tensor holds a tensor of the CPU")
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            dtype=held.dtype,
            device=torch.device("npu", index),
        )
        made.raw = held
        _hold(made)
        return made

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = "cpu"
        given = pytree.tree_leaves((args, kwargs))
        for x in given:
            elsewhere = isinstance(x, Tensor) and not isinstance(x, NpuTensor) and x.dim()
            if elsewhere and func is not torch.ops.aten.copy_.default:  # which moves
                raise RuntimeError(f"{func}: a tensor of {x.device} among tensors of npu")
        bare = pytree.tree_map_only(NpuTensor, raw, (args, kwargs))
        out = func(*bare[0], **bare[1])
        if target is not None and torch.device(target).type == "cpu":
            return out
        held = {id(x.raw): x for x in given if isinstance(x, NpuTensor)}
        return pytree.tree_map_only(
            Tensor, lambda t: held[id(t)] if id(t) in held else NpuTensor(t), out
        )


def raw(x: NpuTensor) -> Tensor:
    """The tensor of the CPU inside."""
    return x.raw


def _hold(x: NpuTensor) -> None:
    storage = x.raw.untyped_storage()
    place, size = storage.data_ptr(), storage.nbytes()

    def drop() -> None:
        _holders[place] -= 1
        _bytes["now"] -= 0 if _holders[place] else size

    _bytes["now"] += 0 if _holders[place] else size
    _bytes["most"] = max(_bytes.values())
    _holders[place] += 1
    weakref.finalize(x, drop)


class _Npu:
    """``torch_npu.npu``: two devices of 24 cube and 48 vector cores; nothing is queued."""

    def __init__(self) -> None:
        self.synchronized = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_name(self, device: Any = None) -> str:
        return "Ascend910_9392"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(cube_core_num=24, vector_core_num=48)

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1

    def memory_allocated(self, device: Any = None) -> int:
        return _bytes["now"]

    def max_memory_allocated(self, device: Any = None) -> int:
        return _bytes["most"]

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _bytes["most"] = _bytes["now"]


def install() -> types.ModuleType:
    """Sets up the device, and returns the stand-in for torch_npu."""
    _setup_privateuseone_for_python_backend("npu")
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return NpuTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return NpuTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        inside = [x.raw if isinstance(x, NpuTensor) else x for x in (source, target)]
        inside[1].copy_(inside[0])
        return target

    for name, f in (
        ("empty.memory_format", empty),
        ("empty_strided", empty_strided),
        ("_copy_from", copy_from),
    ):
        library.impl(name, f, "PrivateUse1")
    module = fake_torch_npu.install()
    module.npu = _Npu()
    module.library = library  # lives as long as it is registered
    sys.modules["torch_npu"] = module
    return module
