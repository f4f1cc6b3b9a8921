import pytest
import torch

from k31fn import params, random
from k31fn.layers import norm


def test_starts_as_ones_and_normalises():
    cfg = norm.Config(8)
    weights = params.init(norm.specs(cfg, axis="latent"), random.key(0), dtype=torch.float64)
    assert torch.equal(weights.weight, torch.ones(8, dtype=torch.float64))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm.apply(weights, x, cfg), expected, rtol=1e-14, atol=0)


def test_config_names_the_fault():
    with pytest.raises(ValueError, match=r"norm.Config.dim=0"):
        norm.Config(0)
    with pytest.raises(ValueError, match=r"norm.Config.eps=0.*NaN"):
        norm.Config(8, eps=0.0)
