"""Optimiser state in bfloat16 and in the host's memory."""

import math

import pytest
import torch

from k31fn import optim, tree
from k31fn.optim.storage import Storage
from tests.optim.tiny import clone, gradients, identical, largest_difference, spec, specs, weights

NARROW = Storage(torch.bfloat16)


def both(storage: Storage) -> optim.Transform:
    s = specs()
    rest = optim.adamw(s, storage=storage, where=lambda path, spec: "matrix" not in spec.tags)
    return optim.combine(s, optim.muon(s, storage=storage), rest)


def run(transform, steps, donate=True, scale=1.0):
    values = weights()
    state = transform.init(values)
    for step in range(steps):
        grads = tree.map(lambda g: g * scale, gradients(step, values))
        values, state = transform.update(grads, state, values, lr=0.02, donate=donate)
    return values, state


def test_bfloat16_state_has_half_the_bytes_and_nearly_the_steps():
    (wide, _), (narrow, state) = run(both(Storage()), 30), run(both(NARROW), 30)
    kept = [*tree.leaves(state[0].momentum), *tree.leaves(state[1].mu), *tree.leaves(state[1].nu)]
    assert {x.dtype for x in kept} == {torch.bfloat16}
    moved = largest_difference(wide, weights())
    assert 0 < largest_difference(narrow, wide) < 0.05 * moved
    again, _ = run(both(NARROW), 30, donate=False)
    assert largest_difference(again, narrow) < 1e-5


@pytest.mark.parametrize(("beta2", "bias"), [(0.95, 0.005), (0.98, 0.025)])
def test_a_mean_in_bfloat16_is_hardly_biased(beta2, bias):
    """The second moment of unit noise, rounded to nearest at each step, has about the mean that it
    has in float32.
    """
    w = {"w": torch.zeros(4000)}
    transform = optim.adamw({"w": spec(4000)}, beta2=beta2, storage=NARROW)
    state, values = transform.init(w), w
    generator = torch.Generator().manual_seed(0)
    means = []
    for step in range(300):
        g = {"w": torch.randn(4000, generator=generator)}
        values, state = transform.update(g, state, values, lr=0.0, donate=True)
        if step >= 150:
            means.append(float(state.nu["w"].to(torch.float32).mean()))
    print(f"{beta2=}: mean {sum(means) / len(means):.4f}")
    assert sum(means) / len(means) == pytest.approx(1.0, abs=bias)


def test_a_decay_that_bfloat16_cannot_follow_is_refused():
    """At 0.999 the mean of unit noise would stay where it is: far from 1 for thousands of steps."""
    with pytest.raises(ValueError, match=r"beta2=0\.999 with state in bfloat16"):
        optim.adamw(specs(), beta2=0.999, storage=NARROW)
    with pytest.raises(ValueError, match=r"momentum=0\.99 with state in bfloat16"):
        optim.muon(specs(), momentum=0.99, storage=NARROW)
    nu = torch.full((4000,), 4.0, dtype=torch.bfloat16)
    for _ in range(400):
        nu = (0.999 * nu.to(torch.float32) + 0.001 * torch.randn(4000).square()).to(torch.bfloat16)
    assert nu.to(torch.float32).mean() > 3.9  # in float32: 1 + 3 * 0.999^400 = 3.0
    with pytest.raises(ValueError, match=r"Storage\.dtype=torch\.float16"):
        Storage(torch.float16)


def test_a_skipped_step_keeps_the_bits():
    transform = both(NARROW)
    values, state = run(transform, 3)
    before = clone((values, state))
    bad = tree.map(lambda p: torch.full_like(p, math.nan), values)
    assert identical(
        transform.update(bad, state, values, lr=0.1, skip=torch.tensor(True), donate=True), before
    )


@pytest.mark.parametrize("donate", [True, False])
def test_on_the_host_each_moment_is_fetched_and_stored_once(donate, monkeypatch):
    """Told that the parameters are elsewhere: on the CPU both are the identity, and the numbers are
    those without.
    """
    monkeypatch.setattr(Storage, "away", lambda self, x: self.host)
    monkeypatch.setattr(Storage, "_empty", lambda self, like: torch.empty_like(like))
    put = "store" if donate else "keep"
    calls = {"fetch": 0, put: 0}
    for name in calls:
        plain = getattr(Storage, name)

        def noting(self, *args, plain=plain, name=name, **how):
            calls[name] += 1
            return plain(self, *args, **how)

        monkeypatch.setattr(Storage, name, noting)
    hosted = run(both(Storage(host=True)), 4, donate)
    matrices = sum("matrix" in s.tags and "frozen" not in s.tags for s in tree.leaves(specs()))
    others = sum("matrix" not in s.tags and "frozen" not in s.tags for s in tree.leaves(specs()))
    assert calls == {"fetch": 4 * (matrices + 2 * others), put: 4 * (matrices + 2 * others)}
    assert identical(hosted, run(both(Storage()), 4, donate))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_state_lies_in_pinned_memory(dtype):
    transform, plain = both(Storage(dtype, host=True)), both(Storage(dtype))
    found = []
    for t in (transform, plain):
        values = tree.map(lambda x: x.cuda(), weights())
        state = t.init(values)
        for step in range(4):
            grads = tree.map(lambda g: g.cuda(), gradients(step, weights()))
            values, state = t.update(
                grads, state, values, lr=0.02, skip=torch.tensor(False, device="cuda"), donate=True
            )
            if t is transform:
                kept = [
                    *tree.leaves(state[0].momentum),
                    *tree.leaves(state[1].mu),
                    *tree.leaves(state[1].nu),
                ]
                assert all(x.is_cpu and x.is_pinned() and x.dtype == dtype for x in kept)
        found.append(tree.map(lambda x: x.cpu(), (values, state)))
    assert (
        largest_difference(found[0][0], found[1][0]) < 1e-6
    )  # one fused call against one for each leaf


def test_on_meta_tensors_it_says_the_shapes():
    transform = both(Storage(torch.bfloat16, host=True))
    values = tree.map(lambda x: x.to("meta"), weights())
    state = transform.init(values)
    _, after = transform.update(values, state, values, lr=0.1, donate=True)
    pairs = zip(tree.leaves(state), tree.leaves(after), strict=True)
    assert all(a.is_meta and (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
