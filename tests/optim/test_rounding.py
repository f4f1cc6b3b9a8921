"""Optimisers of parameters that are kept in bfloat16 alone."""

import torch

from k31fn import optim, params, random, tree
from k31fn.params import Constant, ParamSpec
from k31fn.testing import assert_close_trees

BF16 = torch.bfloat16
SPECS = {
    "w": ParamSpec((64, 48), ("", ""), params.Normal(1.0), tags=frozenset({"matrix"})),
    "island": ParamSpec((8,), ("",), Constant(1.0), torch.float32, frozenset({"no_decay"})),
    "frozen": ParamSpec((8,), ("",), Constant(1.0), tags=frozenset({"frozen"})),
}


def start():
    return params.init(SPECS, random.key(0), dtype=BF16)


def grads(step: int):
    return {
        n: random.normal(random.fold_in(random.key(1), step), SPECS[n].shape)
        for n in ("w", "island")
    }


def test_no_copy_is_kept():
    state = optim.rounded(optim.adamw(SPECS), SPECS, 0).init(start())
    held = {path: x for path, x in tree.flatten_with_paths(state) if x.numel() == 64 * 48}
    assert set(held) == {"inner.mu.w", "inner.nu.w"}
    plain = optim.adamw(SPECS).init(start())
    assert "master.w" in tree.paths(plain)


def test_steps_far_below_a_weight_add_up():
    """100 of AdamW's steps of 1e-4 on weights of 1 to 2, whose neighbours are 2^-7 away, within 5
    standard errors.
    """
    specs = {"w": ParamSpec((2048,), ("",), params.Uniform(1.0, 2.0))}
    p = params.init(specs, random.key(0), dtype=BF16)
    transform, first = (
        optim.rounded(optim.adamw(specs, weight_decay=0.0), specs, 3),
        p["w"].double(),
    )
    state, one = transform.init(p), {"w": torch.ones(2048)}
    assert torch.equal((first - 1e-4).to(BF16).double(), first), "nearest rounding loses each step"
    for _ in range(100):
        p, state = transform.update(one, state, p, lr=1e-4, donate=True)
    assert p["w"].dtype == BF16
    moved = p["w"].double() - first
    assert abs(float(moved.mean()) + 0.01) < 5 * (100 * 2.0**-7 * 1e-4 / 2048) ** 0.5


def test_both_updates_agree_and_a_skipped_one_changes_nothing():
    transform = optim.rounded(optim.adamw(SPECS), SPECS, 0)
    p, q = start(), start()
    state, other = transform.init(p), transform.init(q)
    for step in range(3):
        p, state = transform.update(grads(step), state, p, lr=0.01, donate=True)
        q, other = transform.update(grads(step), other, q, lr=0.01, donate=False)
        assert_close_trees(p, q, rtol=0, atol=0)
    before = tree.map(torch.clone, (p, state))
    p, state = transform.update(grads(9), state, p, lr=0.01, skip=torch.tensor(True), donate=True)
    assert_close_trees((p, state), before, rtol=0, atol=0)
    p, state = transform.update(grads(3), state, p, lr=0.01, skip=torch.tensor(False), donate=True)
    q, other = transform.update(grads(3), other, q, lr=0.01, donate=True)
    assert_close_trees(p, q, rtol=0, atol=0)
    assert int(state.updates) == int(other.updates) == 4
    again, _ = optim.rounded(optim.adamw(SPECS), SPECS, 1).update(
        grads(0), transform.init(start()), start(), lr=0.01, donate=True
    )
    first, _ = transform.update(grads(0), transform.init(start()), start(), lr=0.01, donate=True)
    assert not torch.equal(again["w"], first["w"]), "another seed"
    assert torch.equal(again["island"], first["island"])


def test_a_rank_rounds_its_part_as_one_device_does():
    rows = slice(16, 48)

    def tile(path: str, spec: ParamSpec) -> tuple[slice, ...]:
        return (
            (rows, *(slice(0, n) for n in spec.shape[1:]))
            if path == "w"
            else tuple(slice(0, n) for n in spec.shape)
        )

    whole, part = start(), params.init(SPECS, random.key(0), dtype=BF16, tile=tile)
    one, mine = (optim.rounded(optim.adamw(SPECS), SPECS, 0, tile=t) for t in (None, tile))
    state, own = one.init(whole), mine.init(part)
    for step in range(2):
        g = grads(step)
        whole, state = one.update(g, state, whole, lr=0.01, donate=True)
        part, own = mine.update({**g, "w": g["w"][rows]}, own, part, lr=0.01, donate=True)
    assert torch.equal(part["w"], whole["w"][rows])
