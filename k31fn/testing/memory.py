"""Memory of live tensors, counted at every operation.

The one file that uses ``torch.utils._python_dispatch`` and weak references to storages; tested with
torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Largest", "LiveBytes", "live_bytes"]


@dataclass(frozen=True)
class Largest:
    """The largest tensor made: its storage in bytes, the shape it was made in, and by which
    operator.
    """

    nbytes: int
    shape: tuple[int, ...]
    op: str


class _SeenStorage:
    """A storage that has been seen; ``nbytes`` is 0 for one from before."""

    __slots__ = ("key", "nbytes", "ref")

    key: int
    nbytes: int
    ref: weakref.ref[Any]


class LiveBytes:
    """Measurement of :func:`live_bytes`.

    Attributes:
        peak: largest sum of bytes of the tensors alive at once, so far.
        largest: the largest single tensor made so far; None before the first.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.largest: Largest | None = None
        self._current = 0
        self._known: dict[int, _SeenStorage] = {}
        # A storage may die at any moment, on any thread and inside this class: its death is only
        # noted there.
        self._died: deque[_SeenStorage] = deque()
        self._lock = threading.RLock()  # backward passes count from autograd's threads

    @property
    def current(self) -> int:
        """Bytes of the tensors that were made inside and are alive now."""
        with self._lock:
            self._bury()
            return self._current

    def on_this_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Counts the operations of another thread too, one that was started inside the measured
        block.

        Backward passes need no care: autograd takes the measurement along to its own threads.
        """
        return _Watch(self)

    def _bury(self) -> None:
        while self._died:
            storage = self._died.popleft()
            self._current -= storage.nbytes
            # torch may have given the address to another storage by now
            if self._known.get(storage.key) is storage:
                del self._known[storage.key]

    def _enter(self, tensor: Tensor, op: Any) -> None:
        """Counts the storage of ``tensor`` if it is new; without an ``op`` it is one from
        before.
        """
        if tensor.layout != torch.strided:
            return
        untyped = tensor.untyped_storage()
        # the address of torch's own object: every Python wrapper of a storage is another object
        key = untyped._cdata
        nbytes = 0 if op is None else untyped.nbytes()
        known = self._known.get(key)
        if known is None:
            known = _SeenStorage()
            known.key = key
            known.nbytes = 0
            known.ref = weakref.ref(
                untyped, lambda _, died=self._died, storage=known: died.append(storage)
            )
            self._known[key] = known
        elif op is None or not known.nbytes:
            return  # it was there before the measurement, and stays uncounted
        self._current += nbytes - known.nbytes  # a known storage may have been resized
        known.nbytes = nbytes
        if op is not None and nbytes > (self.largest.nbytes if self.largest else 0):
            self.largest = Largest(nbytes, tuple(tensor.shape), str(op))

    def _before(self, args: Sequence[Tensor]) -> None:
        with self._lock:
            self._bury()
            for tensor in args:
                self._enter(tensor, None)

    def _after(self, results: Sequence[Tensor], op: Any) -> None:
        with self._lock:
            self._bury()
            for tensor in results:
                self._enter(tensor, op)
            self.peak = max(self.peak, self._current)


class _Watch(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # what torch.tensor() has just made
            self.live._before(_tensors((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        self.live._after(_tensors((result,)), func)
        return result


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Tensors among an operator's arguments or results, which are tensors, lists of them or
    neither: a search for any tree would cost as much as the operators.
    """
    tensors: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors.extend(t for t in x if isinstance(t, Tensor))
    return tensors


@contextlib.contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Counts the bytes of the tensors made inside and still alive, after every operation.

    A storage counts once, however many views it has, from the operation that makes it until its
    last reference goes, also if only an autograd graph holds it. Exact between operations; what a
    kernel allocates and frees within one is not seen, nor are an allocator's rounding and cache.
    Tensors from before do not count. All devices are added up, and meta tensors count as if they
    had memory. Works under every ``torch.func`` transform and in backward passes.

    A reference cycle keeps its tensors until Python collects it, here as elsewhere.

        with live_bytes() as live:
            value, grads = value_and_grad(loss)(params, batch)
        assert live.peak < 10e6, live.largest
    """
    live = LiveBytes()
    with live.on_this_thread():
        yield live
