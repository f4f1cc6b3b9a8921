from __future__ import annotations

import pytest
import torch

from k31fn.hf_format.mxfp4 import decode, encode

LADDER = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def by_hand(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One nibble after the other, by the bits: sign, two of exponent, one of mantissa."""
    rows = []
    for row, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        values = []
        for at in range(2 * len(row)):
            nibble = (row[at // 2] >> (4 * (at % 2))) & 0xF
            sign, exponent, mantissa = nibble >> 3, (nibble >> 1) & 3, nibble & 1
            size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            values.append((-size if sign else size) * 2.0 ** (scales[at // 32] - 127))
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float64)


def random_bytes(rows: int, columns: int, low: int = 60, high: int = 190):
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return packed, torch.randint(low, high, (rows, columns // 32), dtype=torch.uint8)


def test_a_written_out_group():
    """Low nibble first: bytes 10 32 54 76 are 0, .5, 1, 1.5, 2, 3, 4, 6; 98 ba dc fe the same,
    negative.
    """
    packed = torch.tensor(
        [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 7, 0x21]], dtype=torch.uint8
    )
    values = decode(packed, torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert values[0, :16].tolist() == [*LADDER, *(-v for v in LADDER)]
    assert torch.signbit(values[0, 8])
    assert values[0, 30:].tolist() == [0.5, 1.0]
    assert decode(packed, torch.tensor([[130]], dtype=torch.uint8), torch.float32)[0, 7] == 48
    assert decode(packed, torch.tensor([[120]], dtype=torch.uint8), torch.float32)[0, 1] == 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_decoding_is_exact(dtype: torch.dtype):
    packed, scale = random_bytes(7, 96)
    values = decode(packed, scale, dtype)
    assert values.dtype == dtype
    assert torch.equal(values.double(), by_hand(packed, scale))


def test_every_scale_byte():
    packed = torch.full((255, 16), 0x12, dtype=torch.uint8)  # 1 and 0.5
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    assert torch.equal(decode(packed, scale, torch.float64), by_hand(packed, scale))
    assert torch.equal(decode(packed, scale, torch.bfloat16).double(), by_hand(packed, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_it_can_hold_comes_back_bit_for_bit(dtype: torch.dtype):
    packed, scale = random_bytes(64, 64)
    packed[5], packed[6, :8] = 0, 0x88  # a group of zeros, and negative zeros
    weights = decode(packed, scale, dtype)
    again = decode(*encode(weights), dtype)
    assert torch.equal(again, weights)
    assert torch.equal(torch.signbit(again), torch.signbit(weights))


def test_encoding_is_stable():
    """A second round changes no byte: the scale follows from the values."""
    first = encode(torch.randn(16, 64))
    for a, b in zip(encode(decode(*first, torch.float32)), first, strict=True):
        assert torch.equal(a, b)


def test_smallest_and_largest_scales():
    weights = torch.zeros(2, 32, dtype=torch.float64)
    weights[0, 0], weights[1, 0] = 0.5 * 2.0**-127, 6 * 2.0**127
    packed, scale = encode(weights)
    assert scale.flatten().tolist() == [0, 254]
    assert torch.equal(decode(packed, scale, torch.float64), weights)


def test_rounding_is_to_nearest_ties_to_even():
    """With 6 in the group the scale is 1. Ties lie between codes; a code's last bit is its
    mantissa.
    """
    given = [6, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, -0.75, -5.0, -0.2, 0.24]
    wanted = [6, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, -1, -4, -0.0, 0]
    weights = torch.zeros(1, 32)
    weights[0, : len(given)] = torch.tensor(given)
    packed, scale = encode(weights)
    assert scale.item() == 127
    assert decode(packed, scale, torch.float32)[0, : len(given)].tolist() == wanted


def test_values_above_six_saturate():
    """Up to 7, from where the next scale holds them better."""
    weights = torch.full((1, 32), 6.99)
    packed, scale = encode(weights)
    assert scale.item() == 127
    assert (decode(packed, scale, torch.float32) == 6).all()
    weights = torch.full((1, 32), 7.9)
    packed, scale = encode(weights)
    assert scale.item() == 128
    assert (decode(packed, scale, torch.float32) == 8).all()


def by_bits(largest: float) -> int:
    """The scale byte as compressed-tensors makes it: a quarter is added to the mantissa of the
    largest weight in bfloat16, then the mantissa is dropped.
    """
    bits = int(torch.tensor(largest, dtype=torch.bfloat16).view(torch.int16))
    return ((bits + (1 << 5)) >> 7) - 2


def test_the_scale_is_that_of_the_format_that_a_checkpoint_declares():
    groups = torch.randn(4000, 32).bfloat16()
    _, scale = encode(groups)
    wanted = [by_bits(float(group.abs().max())) for group in groups]
    assert scale.flatten().tolist() == wanted
    plain = torch.frexp(groups.float().abs().amax(-1)).exponent - 3 + 127
    differs = (plain != scale.flatten()).float().mean()
    assert 0.08 < float(differs) < 0.25  # the rules are two, for one group in seven


def test_the_largest_weight_of_a_group_is_at_most_a_fifth_off():
    """Over all of an octave; by the exponent alone it would be a quarter."""
    largest = torch.linspace(4, 8, 4001, dtype=torch.float64)[:-1]
    weights = torch.zeros(4000, 32, dtype=torch.float64)
    weights[:, 3] = largest
    found = decode(*encode(weights), torch.float64)[:, 3]
    error = ((found - largest) / largest).abs()
    assert float(error.max()) == pytest.approx(0.2, abs=1e-9)
    assert float(largest[error.argmax()]) == 5.0
    by_exponent = ((largest.clamp(max=6) - largest) / largest).abs()
    assert float(by_exponent.max()) > 0.249


def test_rounding_is_nearest_among_all_values():
    weights = torch.randn(8, 32, dtype=torch.float64)
    packed, scale = encode(weights)
    all_values = torch.tensor([*LADDER, *(-v for v in LADDER)], dtype=torch.float64)
    reachable = all_values * (2.0 ** (scale.double() - 127))[..., None]
    nearest = (weights[..., None] - reachable).abs().amin(-1)
    assert torch.equal((decode(packed, scale, torch.float64) - weights).abs(), nearest)


def test_more_dimensions():
    weights = torch.randn(3, 4, 64)
    stacked = encode(weights)
    for i in range(3):
        for a, b in zip(encode(weights[i]), stacked, strict=True):
            assert torch.equal(a, b[i])


def test_what_is_refused():
    packed, scale = random_bytes(2, 64)
    with pytest.raises(ValueError, match=r"packed \[2, 32\] and scale \[2, 1\] do not fit"):
        decode(packed, scale[:, :1], torch.float32)
    scale[1, 0] = 255
    with pytest.raises(ValueError, match="1 of 4 scales are 255"):
        decode(packed, scale, torch.float32)
    scale[1, 0] = 254
    packed[1, 0] = 0x77
    with pytest.raises(ValueError, match=r"scales up to 254 are too large for torch\.bfloat16"):
        decode(packed, scale, torch.bfloat16)
    assert torch.isfinite(decode(packed, scale, torch.float64)).all()
    with pytest.raises(ValueError, match="48 columns"):
        encode(torch.ones(1, 48))
    with pytest.raises(ValueError, match="2 weights are not finite"):
        encode(torch.tensor([[torch.nan, torch.inf, *[0.0] * 30]]))
