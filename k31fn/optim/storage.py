"""How an optimiser keeps what it remembers between steps: in which dtype, and on which device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k31fn import device as devices
from k31fn import precision
from k31fn.typing import Float, Tensor

__all__ = ["Storage"]

_SLOWEST = 0.98  # decay of a running mean that bfloat16 can follow


@dataclass(frozen=True)
class Storage:
    """Moments and momenta between steps; a step itself works on the parameters' device.

    In bfloat16 a running mean with decay b stands still while what it follows is within ``2^-9 / (1
    - b)`` of it: 4% for b = 0.95, which is less than a step's noise. Rounding is to nearest, so it
    costs nothing and repeats on every mesh: the mean square of unit noise comes out 0.2% low for b
    = 0.95 and 2% for 0.98 (measured). More is refused.

    Attributes:
        dtype: float32 (float64 in a float64 run), or bfloat16.
        host: in the host's memory, pinned if the parameters are on another device. Each step
            fetches and stores it, slice by slice, and waits for the last copy at its end.

    Raises:
        ValueError: another dtype.
    """

    dtype: torch.dtype = torch.float32
    host: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"Storage.dtype={self.dtype} must be torch.float32 or torch.bfloat16")

    def check_decay(self, **decays: float) -> None:
        """Refuses a decay that the dtype cannot follow.

        Raises:
            ValueError: names it.
        """
        for name, value in decays.items():
            if self.dtype == torch.bfloat16 and value > _SLOWEST:
                raise ValueError(
                    f"{name}={value} with state in bfloat16, which rounds changes below 2^-9 "
                    f"away: the mean would stand still; use at most {_SLOWEST}, or keep the state "
                    "in float32"
                )

    def zeros(self, like: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """What is stored before the first step, of a value like this one."""
        if not self.away(like):
            return torch.zeros_like(like, dtype=self._dtype(like))
        return self._empty(like).zero_()

    def adopt(self, stored: Float[Tensor, "..."], like: Tensor) -> Float[Tensor, "..."]:
        """What was stored, to be written into: itself, or a copy as this storage keeps it.

        A run resumed with another storage has its old one in the state: it is replaced once.
        """
        if stored.dtype == self._dtype(like) and stored.is_cpu == (like.is_cpu or self.away(like)):
            return stored
        return self.zeros(like).copy_(stored)

    def fetch(self, stored: Float[Tensor, "..."], like: Tensor) -> Float[Tensor, "..."]:
        """What was stored, where ``like`` is; itself if it is there already."""
        # The copy is queued before the step that reads it, on the same stream.
        return stored.to(like.device, non_blocking=True)

    def store(self, stored: Float[Tensor, "..."], new: Float[Tensor, "..."]) -> None:
        """Puts ``new`` in the place of ``stored``."""
        if stored is not new:
            # Without a wait for each leaf: `settle` waits once, at the end of the step.
            stored.copy_(new, non_blocking=True)

    def keep(self, new: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """A new value as it is kept, of a step that writes into nothing."""
        return new.to("cpu" if self.away(new) else new.device, self._dtype(new))

    def away(self, x: Tensor) -> bool:
        """Whether it is stored elsewhere than where it is used."""
        return self.host and not (x.is_cpu or x.is_meta)

    def settle(self, device: torch.device | None) -> None:
        """Waits until what was stored has reached the host, so that anyone may read it."""
        if self.host and device is not None and device.type not in ("cpu", "meta"):
            devices.synchronize(device)

    def _dtype(self, x: Tensor) -> torch.dtype:
        # In a float64 run float32 means float64.
        return self.dtype if self.dtype == torch.bfloat16 else precision.island(x.dtype)

    def _empty(self, like: Tensor) -> Tensor:
        # Pinned: only such memory is copied while the device computes.
        return torch.empty(like.shape, dtype=self._dtype(like), device="cpu", pin_memory=True)
