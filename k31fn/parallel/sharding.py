"""Which mesh axis each logical dimension of a layer is split over.

Every layer takes ``sh=``: a :class:`Sharding` that holds one axis object per logical axis, or nothing. An absent axis
makes every collective over it an identity, so the same layer code runs on one device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["UNSHARDED", "Axis", "Sharding"]


@dataclass(frozen=True)
class Axis:
    """A named mesh axis of ``size`` ranks. An axis in a :class:`Sharding` is an object, never a name to look up."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Axis({self.name!r}).size={self.size}: an axis has at least one rank")


@dataclass(frozen=True)
class Sharding:
    """One mesh axis per logical axis; ``()`` where the dimension is not split.

    Attributes:
        heads: attention heads (KDA, MLA, DSA), column-parallel in and row-parallel out.
        mlp: inner width of dense and shared MLPs.
        experts: routed experts.
        vocab: vocabulary of the embedding and the head.
        sequence: tokens.
    """

    heads: Axis | tuple[()] = ()
    mlp: Axis | tuple[()] = ()
    experts: Axis | tuple[()] = ()
    vocab: Axis | tuple[()] = ()
    sequence: Axis | tuple[()] = ()

    def axes(self) -> dict[str, Axis]:
        """The logical axes that are split."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: axis for name, axis in values.items() if isinstance(axis, Axis) and axis.size > 1}


UNSHARDED = Sharding()
