"""The layer against its equations, token by token and head by head in float64."""

import pytest
import torch
from torch import Tensor

from k31fn import params, random, tree
from k31fn.autodiff import value_and_grad
from k31fn.kernels.registry import record_impls
from k31fn.layers import gdn
from k31fn.segments import from_lengths

D, H, K, V = 12, 2, 8, 6
CFG = gdn.Config(D, H, K, V, init_std=0.3)


def weights(dtype=torch.float64) -> gdn.Params[Tensor]:
    """Drawn, and then moved off the initial values that hide a term."""
    p = params.init(gdn.specs(CFG), random.key(0), dtype=dtype)
    return tree.map(lambda w: w + 0.3 * torch.rand_like(w) if w.ndim == 1 else w, p)


def one_document(p: gdn.Params[Tensor], x: Tensor) -> Tensor:
    """The layer's equations for one document ``[T D]``."""

    def convolved(w: Tensor, taps: Tensor, width: int) -> Tensor:
        inputs = torch.cat([x.new_zeros(3, H * width), x @ w])
        z = torch.stack([(inputs[t : t + 4] * taps.T).sum(0) for t in range(len(x))])
        return (z / (1 + (-z).exp())).reshape(-1, H, width)

    q, k = (convolved(w, c.weight, K) for w, c in ((p.w_q, p.conv_q), (p.w_k, p.conv_k)))
    v = convolved(p.w_v, p.conv_v.weight, V)
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    # e^g = (1 + e^z)^-rate, as softplus(z) = log(1 + e^z)
    decay = (1 + (x @ p.w_a + p.dt_bias).exp()) ** -p.A_log.exp()
    beta, z = 1 / (1 + torch.exp(-x @ p.w_b)), x @ p.w_g
    heads = []
    for h in range(H):
        s, rows = x.new_zeros(K, V), []
        for t in range(len(x)):
            erase = torch.eye(K, dtype=x.dtype) - beta[t, h] * torch.outer(k[t, h], k[t, h])
            s = decay[t, h] * erase @ s + beta[t, h] * torch.outer(k[t, h], v[t, h])
            o = s.T @ q[t, h] / K**0.5
            rows.append(p.o_norm * o / (o.pow(2).mean() + 1e-5).sqrt())
        heads.append(torch.stack(rows))
    return (z / (1 + (-z).exp()) * torch.cat(heads, dim=1)) @ p.w_o


def by_documents(p: gdn.Params[Tensor], x: Tensor, lengths: list[list[int]]) -> Tensor:
    """Every document alone, by the equations; 0 for padding."""
    rows = []
    for row, documents in zip(x, lengths, strict=True):
        parts, start = [], 0
        for n in documents:
            parts.append(one_document(p, row[start : start + n]))
            start += n
        rows.append(torch.cat([*parts, torch.zeros_like(row[start:])]))
    return torch.stack(rows)


LENGTHS = [[5, 1, 64], [48, 20]]


def test_values_and_all_gradients_are_those_of_the_separate_documents():
    """Weight gradients of a packed batch are the sums over its documents."""
    p, x = weights(), torch.randn(2, 72, D, dtype=torch.float64)
    ct, segments = torch.randn_like(x), from_lengths(LENGTHS, 72)
    value, grads = value_and_grad(
        lambda p, x: (gdn.apply(p, x, CFG, segments=segments).y * ct).sum(), (0, 1)
    )(p, x)
    expected, wanted = value_and_grad(
        lambda p, x: (by_documents(p, x, LENGTHS) * ct).sum(), (0, 1)
    )(p, x)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    for (path, g), w in zip(tree.flatten_with_paths(grads), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11, msg=path)
        assert g.any(), path
    y = gdn.apply(p, x, CFG, segments=segments).y
    assert not y[segments.ids == 0].any()
    # without being told of the documents it is wrong
    assert (gdn.apply(p, x, CFG).y - by_documents(p, x, LENGTHS)).abs().max() > 1e-2


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_prefill_and_decoding_equal_the_whole(dtype, atol):
    p, x = weights(dtype), torch.randn(2, 70, D, dtype=dtype)
    whole = gdn.apply(p, x, CFG).y
    ends = []
    for cuts in ([70], [1] * 5 + [65], [63, 1, 1, 5], [64, 3, 3]):
        state, outputs = gdn.init_state(CFG, 2, dtype=dtype), []
        for part in x.split(cuts, dim=1):
            y, state = gdn.extend(p, part, CFG, state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=atol)
        ends.append(state)
    for state in ends[1:]:
        for a, b in zip(tree.leaves(state), tree.leaves(ends[0]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_documents_and_later_tokens_change_no_bit():
    p, x = weights(torch.float32), torch.randn(1, 40, D)
    segments = from_lengths([[21, 15]], 40)
    ct = torch.linspace(-1, 1, 40)[None, :, None]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor) -> Tensor:
            return (gdn.apply(p, x, CFG, segments=segments).y * ct).sum()

        return gdn.apply(p, x, CFG, segments=segments).y, value_and_grad(loss)(x)[1]

    y, grad = run(x)
    for touched, kept in ((slice(0, 21), slice(21, 40)), (slice(21, 36), slice(0, 21))):
        other = x.clone()
        other[:, touched] = torch.randn_like(other[:, touched])
        y_other, grad_other = run(other)
        assert torch.equal(y_other[:, kept], y[:, kept])
        assert torch.equal(grad_other[:, kept], grad[:, kept])
    later = x.clone()
    later[:, 30:] = torch.randn_like(later[:, 30:])
    assert torch.equal(run(later)[0][:, :30], y[:, :30])


# ------------------------------------------------------------------------------------- declarations


def test_parameter_count_of_the_paper():
    """num_heads * head_dim = 3/4 of the width, values twice as wide: 6 D^2, and small ones."""
    D, H, K = 2048, 6, 256
    count = params.count(gdn.specs(gdn.Config(D, H, K, value_dim=2 * K)))
    assert count == 6 * D * D + 2 * D * H + 4 * H * 4 * K + 2 * H + 2 * K


def test_islands_tags_and_initial_values():
    specs = gdn.specs(CFG)
    found = {path: spec.tags for path, spec in tree.flatten_with_paths(specs)}
    assert {path for path, tags in found.items() if "per_head" in tags} == {"w_q", "w_k", "w_v"}
    matrices = {"w_q", "w_k", "w_v", "w_g", "w_o", "w_a", "w_b"}
    assert {path for path, tags in found.items() if "matrix" in tags} == matrices
    assert {path for path, tags in found.items() if "no_decay" in tags} == found.keys() - matrices
    p = params.init(specs, random.key(0), dtype=torch.bfloat16)
    kept = {path for path, leaf in tree.flatten_with_paths(p) if leaf.dtype == torch.float32}
    assert kept == found.keys() - matrices
    step = torch.nn.functional.softplus(p.dt_bias)
    assert 1e-3 <= float(step.min()) <= float(step.max()) <= 0.1
    assert 1 <= float(p.A_log.exp().min()) <= float(p.A_log.exp().max()) <= 16


def test_a_bf16_model_is_near_the_float64_one():
    p, x = weights(torch.bfloat16), torch.randn(1, 20, D).bfloat16()
    y = gdn.apply(p, x, CFG).y
    wide = gdn.apply(tree.map(lambda w: w.double(), p), x.double(), CFG).y
    assert y.dtype == torch.bfloat16
    # bf16 products: a few units of 2^-8 of the largest output
    torch.testing.assert_close(y.double(), wide, rtol=0, atol=0.03 * float(wide.abs().max()))


def test_uses_the_operators():
    with record_impls() as used:
        gdn.apply(weights(), torch.randn(1, 3, D, dtype=torch.float64), CFG)
    assert used == {
        ("short_conv", "reference"): 1,
        ("gdn", "reference"): 1,
        ("gated_norm", "reference"): 1,
    }


BAD = {
    "hidden_size": 0,
    "num_heads": 0,
    "head_dim": -1,
    "value_dim": 0,
    "norm_eps": 0.0,
    "l2_eps": -1e-6,
    "init_std": 0.0,
}


@pytest.mark.parametrize(("field", "value"), BAD.items())
def test_bad_configs_are_refused(field, value):
    with pytest.raises(ValueError, match=f"gdn.Config.{field}={value} must be positive"):
        gdn.Config(**{"hidden_size": D, "num_heads": H, "head_dim": K, field: value})


def test_a_bad_convolution_is_refused():
    with pytest.raises(ValueError, match="width=1"):
        gdn.Config(D, H, K, conv_width=1)
