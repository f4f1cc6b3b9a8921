"""Which mesh axes each logical dimension of a layer is split over.

Every layer takes ``sh=``: a :class:`Sharding` that holds axis objects per logical axis, or nothing.
An absent axis makes every collective over it an identity, so the same layer code runs on one
device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from k31fn.parallel.axis import Axes, Axis, active, axis_names
from k31fn.parallel.mesh import MeshAxes

__all__ = ["UNSHARDED", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """One mesh axis, or a tuple of atomic ones, per logical axis; ``()`` where the dimension is not
    split.

    A layer's input and output are split by token over ``context`` (contiguous slices) and, inside
    each slice, over ``sequence``. ``segments``, token ids and labels are split over ``context``
    only. Tensor parallelism is sequence sharding: ``heads``, ``mlp``, ``vocab`` and ``sequence``
    are the same axes.

    Attributes:
        heads: attention heads (KDA, MLA, DSA), column-parallel in and row-parallel out.
        mlp: inner width of dense and shared MLPs.
        vocab: vocabulary of the embedding and the head.
        sequence: tokens between the layers, inside a slice.
        context: tokens, contiguous slices of the whole sequence.
        experts: routed experts.
        expert_mlp: inner width of the routed experts: what ``experts`` leaves of ``sequence``.

    Raises:
        ValueError: ``heads``, ``mlp`` or ``vocab`` are other axes than ``sequence``.
    """

    heads: Axes = ()
    mlp: Axes = ()
    vocab: Axes = ()
    sequence: Axes = ()
    context: Axes = ()
    experts: Axes = ()
    expert_mlp: Axes = ()

    def __post_init__(self) -> None:
        for name in ("heads", "mlp", "vocab"):
            axes = active(getattr(self, name))
            others = active(self.sequence)
            # A layer gathers its tokens over ``sequence`` and scatters its sum over them: over
            # other axes than those that split its columns the sum would be wrong.
            if axes != others:
                raise ValueError(
                    f"Sharding.{name}={list(axis_names(axes))}, but "
                    f"sequence={list(axis_names(others))}: tensor parallelism splits heads, "
                    "widths, vocabulary and the tokens between layers over the same axes; take "
                    "Sharding.on(axes)"
                )

    @classmethod
    def on(cls, axes: MeshAxes) -> Sharding:
        """The sharding of the model on a mesh."""
        return cls(
            heads=axes.tp,
            mlp=axes.tp,
            vocab=axes.tp,
            sequence=axes.tp,
            context=axes.cp,
            experts=axes.ep,
            expert_mlp=axes.etp,
        )

    @property
    def tokens(self) -> tuple[Axis, ...]:
        """``context`` and ``sequence``: the axes over which a layer's input is split by token,
        outermost first.
        """
        # Slices of the row first, then parts of a slice: the order of a gather of all tokens.
        return active(self.context) + active(self.sequence)

    def axes(self) -> dict[str, Axes]:
        """The logical axes that are split."""
        split: dict[str, Axes] = {}
        for field in dataclasses.fields(self):
            axes: Axes = getattr(self, field.name)
            if active(axes):
                split[field.name] = axes
        return split


UNSHARDED = Sharding()
