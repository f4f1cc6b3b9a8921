"""Keys, and the generator that makes them and all words."""

from __future__ import annotations

from typing import Any

import torch

from k31fn.typing import Int, Tensor

__all__ = ["DRAW", "check_key", "fold_in", "key", "philox", "split", "words64"]

# of Philox4x32 (Salmon et al., table 2 and section 4.3): multipliers and the key's increments
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

_WORD = 0xFFFFFFFF
# the fourth word of a counter: the three uses of a key never meet in one counter
DRAW, _SPLIT, _FOLD = range(3)


def key(seed: int, *, device: torch.device | str | None = None) -> Int[Tensor, "2"]:
    """The key of a seed.

    Args:
        seed: 0 <= seed < 2**64; its low and high 32 bits are the two words.
        device: where the key, and all that is drawn with it, lives.

    Raises:
        ValueError: the seed is out of range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed} must be in [0, 2**64); take it modulo 2**64")
    # filled, not copied: a step that makes a key waits for nothing, and can be captured
    low = torch.full((), seed & _WORD, dtype=torch.int64, device=device)
    return torch.stack([low, torch.full_like(low, seed >> 32)])


def split(key: Int[Tensor, "2"], num: int) -> Int[Tensor, "num 2"]:
    """``num`` new keys; the i-th does not depend on ``num``.

    Raises:
        ValueError: ``num`` is negative, or ``key`` is not one key.
    """
    check_key(key)
    if num < 0:
        raise ValueError(f"num={num} must not be negative")
    index = torch.arange(num, dtype=torch.int64, device=key.device)
    # index * 0 and not zeros: under vmap a constant must be batched as the counter is
    return torch.stack(philox(*words64(index), index * 0, index * 0 + _SPLIT, key)[:2], dim=-1)


def fold_in(key: Int[Tensor, "2"], data: int | Int[Tensor, ""]) -> Int[Tensor, "2"]:
    """A new key from ``key`` and an int64 (a step, a layer, a rank); a tensor may be batched by
    vmap.

    Raises:
        ValueError: ``data`` is not one int64, or ``key`` is not one key.
    """
    check_key(key)
    data = _int64(data, key.device)
    # 64 bits of data fill two counter words, so a negative number has a key of its own too
    return torch.stack(philox(*words64(data), data * 0, data * 0 + _FOLD, key)[:2])


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of counters in [0, 2**32) that broadcast.

    A product of two 32-bit words wraps into int64 with the right bits, so the high word is its
    shift. The low word is masked only when it has reached a position where its upper half would
    matter: 10 operations a round, not 14.
    """
    k0, k1 = key[0], key[1]
    for _ in range(10):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _WORD
        # unmasked: the next round's shift and mask drop their upper halves
        c1 = product1
        c3 = product0
        k0 = (k0 + _WEYL[0]) & _WORD
        k1 = (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def words64(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of an int64."""
    return x & _WORD, (x >> 32) & _WORD


def _int64(data: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(data, int):
        if not -(1 << 63) <= data < 1 << 63:
            raise ValueError(f"data={data} must fit int64; take it modulo 2**63")
        return torch.full((), data, dtype=torch.int64, device=device)
    if data.ndim or data.dtype.is_floating_point or data.dtype.is_complex:
        raise ValueError(
            f"data has shape {list(data.shape)} and {data.dtype}; expected one integer: fold in "
            "one by one"
        )
    return data.to(torch.int64)


def check_key(key: Any) -> None:
    """Refuses what is not one key."""
    if not isinstance(key, Tensor):
        raise ValueError(
            f"key={key!r} is a {type(key).__name__}; a seed becomes a key by k31fn.random.key"
        )
    if key.shape != (2,) or key.dtype != torch.int64:
        raise ValueError(
            f"key has shape {list(key.shape)} and {key.dtype}; expected [2], int64: batch keys "
            "with vmap"
        )
