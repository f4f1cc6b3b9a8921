"""How a device records what is queued on it, behind one small interface.

CUDA's graphs, and torch_npu's, which have the same functions under the same names (run over a
stand-in for the module only: nobody has run them on an NPU). A CPU has none: a call there runs as
it is. In tests :func:`k31fn.testing.captures_on_cpu` puts a recorder in its place that keeps the
same rules.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from k31fn import device as devices
from k31fn.jit.watch import Watch

__all__ = ["STAND_IN", "Recorder", "Recording", "recorder_of"]


@runtime_checkable
class Recording(Protocol):
    """What was recorded.

    Attributes:
        nbytes: of the device's memory that it holds for itself.
    """

    nbytes: int

    def replay(self) -> None:
        """Queues all of it again, on the tensors that it was recorded on."""
        ...


@runtime_checkable
class Recorder(Protocol):
    """Records for one kind of device."""

    def watching(self, watch: Watch) -> contextlib.AbstractContextManager[None]:
        """Inside, tells ``watch`` of what makes the host wait though no operator shows it."""
        ...

    def record(self, run: Callable[[], None], inputs: Sequence[Tensor]) -> Recording:
        """Records ``run()``, which reads and writes ``inputs``; these keep their values, and so
        they do if it raises.
        """
        ...


@functools.cache
def _stream(module: Any, device: int) -> Any:
    """The stream of all captures on a device: libraries keep some MiB for each that they see."""
    with module.device(device):
        return module.Stream()


class _GraphRecording:
    def __init__(self, graph: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class _GraphRecorder:
    """The graphs of ``torch.cuda`` or ``torch.npu``. Its graphs share one pool of memory: nothing
    in it lives from one launch to the next but results, which are copied out.

    Args:
        module: ``torch.cuda`` or ``torch.npu``.
        graph: its class of graphs.
    """

    def __init__(self, module: Any, graph: Callable[[], Any]) -> None:
        self._module = module
        self._graph = graph
        self._pool: Any = None

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        module = self._module
        mode = module.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            show = warnings.showwarning

            def note(message: Any, *args: Any, **kwargs: Any) -> None:
                if "called a synchronizing" in str(message):
                    watch.note_wait()
                elif "Synchronization debug mode" not in str(message):  # that it is not complete
                    show(message, *args, **kwargs)

            warnings.showwarning = note  # put back by the block around it
            watch.device_tells = True
            # not "error": the call would break off, with half of its state written
            module.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                module.set_sync_debug_mode(mode)

    def record(self, run: Callable[[], None], inputs: Sequence[Tensor]) -> _GraphRecording:
        module = self._module
        module.synchronize()
        # What was cached for calls that ran as they are is given back: the graph takes as much.
        gc.collect()
        module.empty_cache()
        held = module.memory_reserved()
        graph = self._graph()
        stream = _stream(module, module.current_device())
        stream.wait_stream(module.current_stream())
        # Nothing is executed here, so the inputs stay as they are.
        with module.stream(stream):
            # thread_local: other threads (a watchdog of collectives) may ask their events meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                # the stream leaves its capture; that it has become invalid is known
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        module.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = graph.pool()
        return _GraphRecording(graph, module.memory_reserved() - held)


STAND_IN: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "k31fn_recorder", default=None
)
"""Records on the CPU, in tests."""


def recorder_of(kind: str) -> Recorder | None:
    """A recorder for a kind of device; None: it has no graphs."""
    if kind == "cpu":
        return STAND_IN.get()
    graphs = devices.graphs(kind)
    return None if graphs is None else _GraphRecorder(*graphs)
