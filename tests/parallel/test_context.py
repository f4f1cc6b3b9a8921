"""What ranks of context parallelism need of each other, against loops over the whole row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.autodiff import value_and_grad
from k31fn.parallel import Mesh, MeshAxes, P, record_collectives, shard_map
from k31fn.parallel.context import left_halo, relay, whole_slice
from k31fn.segments import from_lengths, whole

B, H, K, V = 3, 2, 3, 2
PACKED = from_lengths([[5, 11], [8, 3, 2], [14]], 16)  # slices of 4: cut inside, at a cut, padding
SLICES = P(None, "cp")


def on_slices(f, *args: Any, backend: str = "simulated", out: P = SLICES):
    return shard_map(f, Mesh(cp=4), (SLICES,) * len(args), out, backend=backend)(*args)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_one_document_per_row_in_slices(backend):
    def f(axes: MeshAxes, x: Tensor) -> Tensor:
        own = whole_slice(x.shape[0], x.shape[1], axes.cp)
        return torch.stack([own.ids, own.position], dim=-1) + 0 * x[..., None]

    found, expected = (
        on_slices(f, torch.zeros(B, 16, dtype=torch.int64), backend=backend),
        whole(B, 16),
    )
    assert torch.equal(found, torch.stack([expected.ids, expected.position], dim=-1))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_halo_is_what_the_document_has_before_the_slice(count):
    x = torch.randn(B, 16, 5)

    def f(axes: MeshAxes, x: Tensor, position: Tensor) -> Tensor:
        return left_halo(x[:, -count:], count, position, axes.cp)

    found = on_slices(f, x, PACKED.position).unflatten(1, (4, count))
    for row in range(B):
        for rank in range(4):
            for d in range(1, count + 1):
                t = 4 * rank
                same = (
                    t - d >= 0
                    and PACKED.ids[row, t] > 0
                    and PACKED.ids[row, t - d] == PACKED.ids[row, t]
                )
                assert torch.equal(found[row, rank, -d], x[row, t - d] if same else torch.zeros(5))


def folded(states: Tensor, transitions: Tensor) -> Tensor:
    """The state before each slice ``[B n H K V]``: document by document from its first token's
    rank, in a loop.
    """
    rows = []
    for row in range(B):
        before = []
        for rank in range(4):
            position = int(PACKED.position[row, 4 * rank])
            state = torch.zeros_like(states[row, 0])
            first = rank - -(
                -position // 4
            )  # the rank on which this document begins, and then goes on to the end
            for j in range(first, rank):
                state = states[row, j] + (transitions[row, j] @ state if j > first else 0)
            before.append(state)
        rows.append(torch.stack(before))
    return torch.stack(rows)


def pairs() -> tuple[Tensor, Tensor]:
    """A pair per row and slice."""
    states, transitions = (torch.randn(B, 4, H, K, n, dtype=torch.float64) for n in (V, K))
    return states, transitions


def relayed(states: Tensor, transitions: Tensor, backend: str = "simulated") -> Tensor:
    """The transition of a slice in which another document begins is 0, as that of an operator
    is.
    """
    ids = PACKED.ids.unflatten(1, (4, 4))
    transitions = transitions * ((ids == ids[..., :1]) | (ids == 0)).all(-1)[..., None, None, None]

    def f(axes: MeshAxes, s: Tensor, m: Tensor, position: Tensor) -> Tensor:
        return relay(s[:, 0], m[:, 0], position, axes.cp)[:, None]

    return on_slices(f, states, transitions, PACKED.position, backend=backend)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_the_relay_equals_the_loop_in_value_and_gradients(backend):
    args, ct = pairs(), torch.randn(B, 4, H, K, V, dtype=torch.float64)
    with record_collectives() as record:
        value, grads = value_and_grad(
            lambda *args: (relayed(*args, backend=backend) * ct).sum(), (0, 1)
        )(*args)
    expected, wanted = value_and_grad(lambda *args: (folded(*args) * ct).sum(), (0, 1))(*args)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    assert set(record.counts) == {"all_gather", "psum_scatter"}  # one message, and back


def test_second_derivatives_of_the_relay():
    args = pairs()
    directions = [torch.randn_like(x) for x in args]

    def along(f) -> tuple[Tensor, ...]:
        def slope(*args: Tensor) -> Tensor:
            grads = value_and_grad(lambda *a: f(*a).pow(3).sum(), (0, 1))(*args)[1]
            return sum((g * d).sum() for g, d in zip(grads, directions, strict=True))

        return value_and_grad(slope, (0, 1))(*args)[1]

    for actual, expected in zip(along(relayed), along(folded), strict=True):
        assert expected.abs().max() > 1
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_slice_that_the_halo_leaves_is_refused():
    with pytest.raises(
        ValueError,
        match=r"mesh.cp=4: a slice of 4 tokens is shorter than the 5 .* at least 20 tokens",
    ):
        on_slices(
            lambda axes, x, p: left_halo(x[:, -5:], 5, p, axes.cp),
            torch.randn(B, 16, 2),
            PACKED.position,
        )
