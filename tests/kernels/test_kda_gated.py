"""KDA from projections: the kernels with norms and gates inside against the reference in float64,
which is the composition of two others.

Tolerances are those of ``test_kda_triton``, whose kernels these are. Gradients of A_log and dt_bias
are sums over tokens whose terms have both signs: in bfloat16 the error of a sum of n is that of the
terms over some sqrt(n) of what cancels, so it is taken over the norm of the gradients of z that
are summed.
"""

import pytest
import torch
from torch import Tensor

from k31fn.kernels.kda import kda_gated
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.segments import from_lengths
from k31fn.testing import assert_op_matches
from tests.kernels.fused import DEVICE, poisoned

gated = pytest.importorskip("k31fn.kernels.kda.triton.gated", exc_type=ImportError)
launches = pytest.importorskip("k31fn.kernels.kda.triton.launches", exc_type=ImportError)
NAMES = ("o", "state", "dq", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias", "dstate")
FLOAT32, BFLOAT16, ALIKE = 5e-6, 1e-2, 2e-2
Inputs = tuple[Tensor | float, ...]


def logits(kind: str, *shape: int) -> Tensor:
    """Of the gate, for A_log and dt_bias near 0. ``initial``: of a new layer, log-decays of -0.01
    to -0.7; ``trained``: of one that has learned, from weak to strong beside each other.
    """
    if kind == "initial":
        decay = torch.exp(torch.rand(shape) * 4.2 - 4.6) / 5
        return torch.logit(decay)
    if kind == "trained":
        return 2 * torch.randn(shape) - 3
    return torch.full(shape, {"hard": 20.0, "weak": -6.2}[kind])


def inputs(
    lengths: list[list[int]],
    length: int,
    *,
    gate: str = "trained",
    alike: bool = False,
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int, int] = (2, 16, 16),
) -> Inputs:
    """All arguments; ``alike``: keys of cosine above 0.99, beta near 1."""
    batch, (heads, width, columns) = len(lengths), size
    q, k, noise = (torch.randn(batch, length, heads, width) for _ in range(3))
    z = logits(gate, batch, length, heads, width) + 0.1 * noise
    beta = torch.randn(batch, length, heads)
    if alike:
        k = torch.randn(heads, width) + 0.05 * k
        beta = 6 + beta
    v = torch.randn(batch, length, heads, columns)
    state = 0.3 * torch.randn(batch, heads, width, columns)
    low = [x.to(dtype).to(DEVICE) for x in (3 * q, k, v, z, beta)]
    parameters = (0.1 * torch.randn(heads), 0.1 * torch.randn(heads, width))
    rest = [x.to(DEVICE) for x in (*parameters, from_lengths(lengths, length).ids)]
    return *low, *rest, -5.0, 1e-6, width**-0.5, state.to(DEVICE)


def results(xs: Inputs, cts: tuple[Tensor, Tensor], impl: str = "triton") -> list[Tensor]:
    """Outputs and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() if _differentiable(x) else x for x in xs]
    with use_impl(kda_gated=impl), record_impls() as ran:
        out = kda_gated(*leaves)
    assert ran["kda_gated", impl] == 1
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    like = [c.to(o.dtype) for c, o in zip(cts, out, strict=True)]
    return [*(o.detach() for o in out), *torch.autograd.grad(list(out), wanted, like)]


def _differentiable(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def check(xs: Inputs, limit: float, limit_o: float | None = None, impl: str = "triton") -> None:
    cts = (torch.randn_like(xs[2]), 0.3 * torch.randn_like(xs[11]))
    wide = tuple(x.double() if _differentiable(x) else x for x in xs)
    exact = results(wide, cts, "reference")
    with poisoned():
        ours = results(xs, cts, impl)
    # of sums over tokens: see the module's docstring
    scale = {"dA_log": exact[5] * wide[3], "ddt_bias": exact[5]}
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        norm = b.norm() if name not in scale else torch.maximum(b.norm(), scale[name].norm())
        error = float((a.double() - b).norm() / norm.clamp(min=1e-30))
        assert error <= (limit_o if name == "o" and limit_o else limit), f"{name}: {error:.1e}"


PACKINGS = {1: [[1]], 17: [[1, 16]], 65: [[31, 1, 3, 29]]}


@pytest.mark.parametrize("length", PACKINGS)
def test_equals_the_reference(length: int) -> None:
    check(inputs(PACKINGS[length], length, size=(1, 16, 16)), FLOAT32)


@pytest.mark.parametrize("gate", ["initial", "hard", "weak"])
def test_gates(gate: str) -> None:
    check(inputs([[20]], 20, gate=gate, size=(1, 16, 16)), FLOAT32)


def test_alike_keys_and_two_rows() -> None:
    check(inputs([[18], [9, 7]], 18, alike=True, gate="weak"), FLOAT32)


def test_bfloat16() -> None:
    check(inputs([[20, 13]], 35, dtype=torch.bfloat16), BFLOAT16)


def test_segments_and_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the parameters' gradients from several segments, the last one shorter."""
    monkeypatch.setattr(launches, "_SHORTEST", 1)
    monkeypatch.setattr(launches, "_SEGMENT", 2)
    check(inputs([[50, 2, 30]], 90, size=(1, 32, 16)), FLOAT32)


@pytest.mark.parametrize("keep", ["factors", "inputs"])
def test_what_is_kept_changes_no_bit(keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without factors each segment is prepared twice."""
    monkeypatch.setattr(launches, "_SHORTEST", 1)
    monkeypatch.setattr(launches, "_SEGMENT", 1)
    launched: list[int] = []
    prepare = launches.Inputs.prepare

    def counted(self, factors, first: int, tiles: int) -> None:
        launched.append(first)
        prepare(self, factors, first, tiles)

    monkeypatch.setattr(launches.Inputs, "prepare", counted)
    xs = inputs([[20]], 20, size=(1, 16, 16))
    cts = (torch.randn_like(xs[2]), 0.3 * torch.randn_like(xs[11]))
    with_default = results(xs, cts)
    assert launched == [0, 1]
    launched.clear()
    for a, b in zip(with_default, results((*xs, keep), cts), strict=True):
        assert torch.equal(a, b)
    assert launched == ([0, 1] if keep == "factors" else [0, 1, 1, 0])


def test_rates_beyond_the_limit_count_as_it() -> None:
    xs = list(inputs([[20]], 20, gate="weak", size=(2, 16, 16)))
    xs[5] = torch.tensor([100.0, 0.2], device=DEVICE)
    check(tuple(xs), FLOAT32)


def test_apart_is_the_same() -> None:
    xs = inputs([[20]], 20)
    with use_impl(kda="reference", kda_gates="reference"):
        check(xs, FLOAT32, impl="apart")


def test_vmap_and_no_state() -> None:
    xs = inputs([[9, 8]], 20, size=(1, 16, 16))
    for args in (xs, xs[:11]):
        assert_op_matches(
            kda_gated, "triton", args, rtol=1e-4, atol=1e-5, reference_dtype=torch.float64
        )


def test_padding_may_hold_nan_and_later_tokens_change_nothing() -> None:
    xs = inputs([[21, 3], []], 26, size=(1, 16, 16))
    cts = (torch.randn_like(xs[2]), 0.3 * torch.randn_like(xs[11]))
    clean = results(xs, cts)
    padding = xs[7] == 0
    dirty = [x.masked_fill(padding[(...,) + (None,) * (x.ndim - 2)], torch.nan) for x in xs[:5]]
    d_o = cts[0].masked_fill(padding[..., None, None], torch.nan)
    again = results((*dirty, *xs[5:]), (d_o, cts[1]))
    assert all(torch.equal(a, b) for a, b in zip(again, clean, strict=True))
    for x in (clean[0], *clean[2:7]):
        assert not x[padding].any()
    other = [torch.cat([x[:, :11], x[:, 11:].flip(1)], 1) for x in xs[:5]]
    with use_impl(kda_gated="triton"):
        assert torch.equal(kda_gated(*other, *xs[5:]).o[:, :11], clean[0][:, :11])


def test_a_forgotten_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of q has a scale, and its gradient too."""
    of_gates = gated.gates_gradients

    def broken(inputs, cts, outs, numbers, ids):
        return of_gates(inputs, cts, outs, (*numbers[:2], 1.5 * numbers[2]), ids)

    monkeypatch.setattr(gated, "gates_gradients", broken)
    with pytest.raises(AssertionError, match="dq: "):
        check(inputs([[5]], 5, size=(1, 16, 16)), FLOAT32)


def test_refusals() -> None:
    xs = inputs([[5]], 5)
    changed = {
        r"A_log is \[H\] and dt_bias \[H K\]": {5: torch.zeros(3, device=DEVICE)},
        "at most float32, got float64": {6: xs[6].double()},
        r"bound is in \[-5.0, 0\) and scale positive, got -6.0": {8: -6.0},
        r"g is \[B T H K\]": {3: xs[3][:, :4]},
    }
    for reason, change in changed.items():
        args = [change.get(i, x) for i, x in enumerate(xs)]
        with use_impl(kda_gated="triton"), pytest.raises(ValueError, match=reason):
            kda_gated(*args)


@pytest.mark.cuda
@pytest.mark.parametrize("gate", ["initial", "trained", "hard", "weak"])
def test_at_full_width(gate: str) -> None:
    lengths = [[1000], [37, 1, 460, 3, 400]]
    xs = inputs(lengths, 1000, gate=gate, size=(3, 128, 128))
    check(xs, FLOAT32)
    low = [x.bfloat16() for x in xs[:5]]
    check((*low, *xs[5:]), BFLOAT16, 5e-3)


@pytest.mark.cuda
def test_alike_keys_at_full_width() -> None:
    xs = inputs([[1000]], 1000, gate="weak", alike=True, size=(3, 128, 128))
    check(xs, 2 * FLOAT32)
    check((*(x.bfloat16() for x in xs[:5]), *xs[5:]), ALIKE, 1e-2)


@pytest.mark.cuda
def test_repeats_are_bit_identical() -> None:
    xs = inputs([[300, 50]], 400, dtype=torch.bfloat16, size=(3, 128, 128))
    cts = (torch.randn_like(xs[2]), 0.3 * torch.randn_like(xs[11]))
    first, *others = (results(xs, cts) for _ in range(20))
    for run in others:
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))
