"""Gathered weights of layers, on their way while other layers run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from k31fn.parallel.fsdp.fused_gather import start_gather, wait_gather
from k31fn.parallel.fsdp.placement import Placements

__all__ = ["Prefetch", "weights_in_order"]


class Prefetch:
    """Gathered weights of layers in a given order; the next ones travel while those handed out are
    used.
    """

    def __init__(
        self, params: Sequence[Any], placements: Sequence[Placements], order: Iterable[int]
    ) -> None:
        """Asks for the first layer's."""
        self._params = params
        self._placements = placements
        self._order = iter(order)
        self._start()

    def take(self) -> Any:
        """Waits for the next layer's weights, and asks for those of the one after."""
        assert self._pending is not None
        # Waits first: with the next ones asked for before, three layers' weights could be there.
        weights = wait_gather(self._pending)
        self._start()
        return weights

    def _start(self) -> None:
        i = next(self._order, None)
        self._pending = None if i is None else start_gather(self._params[i], self._placements[i])


class _WholeWeights(Prefetch):
    """Weights that are whole already, or are gathered by the layers."""

    def take(self) -> Any:
        return self._params[next(self._order)]

    def _start(self) -> None:
        pass


def weights_in_order(
    params: Sequence[Any], placements: Sequence[Placements], order: Iterable[int]
) -> Prefetch:
    """The weights of layers in this order; without placements they are whole."""
    kind = Prefetch if placements else _WholeWeights
    return kind(params, placements, order)
