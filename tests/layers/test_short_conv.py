import pytest
import torch

from k31fn import params, random
from k31fn.kernels.registry import record_impls
from k31fn.layers import short_conv
from k31fn.params import Normal
from k31fn.segments import from_lengths

CFG = short_conv.Config(5)


def weights(dtype=torch.float64):
    return params.init(short_conv.specs(CFG), random.key(0), dtype=dtype)


def test_prefill_and_decoding_equal_the_whole_for_every_cut():
    p, x = weights(), torch.randn(2, 7, 5, dtype=torch.float64)
    whole = short_conv.apply(p, x, CFG)
    for cut in range(1, 7):
        state, outputs = short_conv.init_state(CFG, 2, dtype=torch.float64), []
        for part in (x[:, :cut], *x[:, cut:].split(1, dim=1)):
            y, state = short_conv.extend(p, part, CFG, state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-14)
        assert torch.equal(state.history, x[:, -3:])


def test_documents_are_separate():
    p, x = weights(), torch.randn(1, 9, 5, dtype=torch.float64)
    packed = short_conv.apply(p, x, CFG, segments=from_lengths([[2, 5]], 9))
    parts = [short_conv.apply(p, x[:, a:b], CFG) for a, b in ((0, 2), (2, 7))]
    torch.testing.assert_close(packed[:, :7], torch.cat(parts, dim=1), rtol=0, atol=1e-14)
    assert not packed[:, 7:].any()


def test_the_taps_are_a_float32_island():
    spec = short_conv.specs(CFG).weight
    assert (spec.shape, spec.axes, spec.tags) == (
        (5, 4),
        ("heads", "conv"),
        frozenset({"no_decay"}),
    )
    assert weights(torch.bfloat16).weight.dtype == torch.float32
    assert weights().weight.abs().max() <= 0.5
    assert short_conv.specs(short_conv.Config(5, init=Normal(0.02))).weight.init == Normal(0.02)


def test_uses_the_operator():
    with record_impls() as used:
        short_conv.apply(weights(), torch.randn(1, 3, 5), CFG)
    assert used == {("short_conv", "reference"): 1}


@pytest.mark.parametrize(("field", "value"), [("channels", 0), ("width", 1)])
def test_bad_configs_are_refused(field, value):
    with pytest.raises(ValueError, match=f"short_conv.Config.{field}={value}"):
        short_conv.Config(**{"channels": 4, field: value})
