import pytest
import torch

from k31fn import params, random
from k31fn.layers import mlp

CFG = mlp.Config(6, 10, beta=2.0, linear_beta=3.0)


def test_equals_a_loop_over_neurons():
    p = params.init(mlp.specs(CFG), random.key(0), dtype=torch.float64)
    p = mlp.Params(*(20 * w for w in (p.w_gate, p.w_up, p.w_down)))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    y = torch.zeros_like(x)
    for f in range(10):
        g, u = x @ p.w_gate[:, f], x @ p.w_up[:, f]
        h = 2 * torch.tanh(g / 2) / (1 + torch.exp(-g)) * 3 * torch.tanh(u / 3)
        y = y + h[..., None] * p.w_down[f]
    torch.testing.assert_close(mlp.apply(p, x, CFG).y, y, rtol=1e-12, atol=1e-12)


def test_specs():
    specs = mlp.specs(CFG)
    assert specs.w_gate.shape == specs.w_up.shape == (6, 10)
    assert specs.w_down.shape == (10, 6)
    assert specs.w_gate.axes == specs.w_down.axes[::-1] == ("hidden", "mlp")
    assert params.count(specs) == 180


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 0), ("intermediate_size", 0), ("beta", 0.0), ("linear_beta", -1.0)],
)
def test_config_names_the_fault(field, value):
    with pytest.raises(ValueError, match=rf"mlp\.Config\.{field}={value}"):
        mlp.Config(**{"hidden_size": 6, "intermediate_size": 10, field: value})
