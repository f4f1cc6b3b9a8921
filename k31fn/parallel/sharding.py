"""Which mesh axes each logical dimension of a layer is split over.

Every layer takes ``sh=``: a :class:`Sharding` that holds axis objects per logical axis, or nothing. An absent axis
makes every collective over it an identity, so the same layer code runs on one device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from k31fn.parallel.axis import Axes, Axis, active

__all__ = ["UNSHARDED", "Axis", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """One mesh axis, or a tuple of atomic ones, per logical axis; ``()`` where the dimension is not split.

    Attributes:
        heads: attention heads (KDA, MLA, DSA), column-parallel in and row-parallel out.
        mlp: inner width of dense and shared MLPs.
        experts: routed experts.
        vocab: vocabulary of the embedding and the head.
        sequence: tokens.
    """

    heads: Axes = ()
    mlp: Axes = ()
    experts: Axes = ()
    vocab: Axes = ()
    sequence: Axes = ()

    def axes(self) -> dict[str, Axes]:
        """The logical axes that are split."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: axes for name, axes in values.items() if active(axes)}


UNSHARDED = Sharding()
