from __future__ import annotations

import pytest
import torch

from k31fn.parallel import Mesh, P, each_rank, record_collectives, shard_map
from k31fn.parallel.collectives import own_index
from k31fn.parallel.point_to_point import recv, send
from k31fn.testing import Ranks
from tests.parallel import cases_pipeline


def test_messages_arrive_in_order_on_threads():
    with record_collectives() as record:
        results = each_rank(cases_pipeline.ping_pong, Mesh(pp=2), lambda _: ())
    assert [r.tolist() for r in results[0]] == [[10.0, 20.0], [30.0]]
    assert [r.tolist() for r in results[1]] == [[1.0, 2.0], [3.0]]
    for own in record.ranks:
        assert own.counts == {"send": 2, "recv": 2}
        assert own.nbytes == {"send": 12, "recv": 12}
        assert {e.axes for e in own.events} == {("pp",)}


def test_messages_arrive_in_order_on_processes(two_ranks: Ranks):
    (first, info), (second, _) = two_ranks.run(cases_pipeline.ping_pong_on_rank)
    assert [r.tolist() for r in first] == [[10.0, 20.0], [30.0]]
    assert [r.tolist() for r in second] == [[1.0, 2.0], [3.0]]
    assert info["events"][:4] == ["issue send", "issue send", "issue recv", "issue recv"]


def test_a_message_is_a_copy():
    """The receiver may change what it got without changing what the sender holds."""

    def body(axes):
        x = torch.ones(2)
        if own_index(axes.pp) == 0:
            send(x, axes.pp, 1)()
            recv(
                (1,), axes.pp, 1, dtype=torch.float32, device="cpu"
            )()  # the other has changed its own
            return x
        y = recv((2,), axes.pp, 0, dtype=torch.float32, device="cpu")()
        y.zero_()
        send(torch.ones(1), axes.pp, 0)()
        return y

    first, second = each_rank(body, Mesh(pp=2), lambda _: ())
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_ranks_of_another_axis_are_not_concerned():
    def body(axes, k):
        if own_index(axes.pp) == 0:
            send(torch.full((1,), k), axes.pp, 1)()
            return torch.zeros(1)
        return recv((1,), axes.pp, 0, dtype=torch.float32, device="cpu")()

    results = each_rank(body, Mesh(pp=2, tp=2), lambda c: (float(c["tp"] + 1),))
    assert [float(r) for r in results] == [0.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((3,), torch.float32, r"\[3\] torch.float32 is expected, but \[2\] torch.float32 was sent"),
        ((2,), torch.float64, r"\[2\] torch.float64 is expected"),
    ],
)
def test_a_message_of_another_shape_or_dtype_is_refused(shape, dtype, match):
    def body(axes):
        if own_index(axes.pp) == 0:
            return send(torch.ones(2), axes.pp, 1)()
        return recv(shape, axes.pp, 0, dtype=dtype, device="cpu")()

    with pytest.raises(ValueError, match=match):
        each_rank(body, Mesh(pp=2), lambda _: ())


def test_a_sender_that_has_left_is_named():
    def body(axes):
        if own_index(axes.pp):
            recv((2,), axes.pp, 0, dtype=torch.float32, device="cpu")()

    with pytest.raises(ValueError, match=r"recv from 0 .*\{'pp': 0\} returned without taking part"):
        each_rank(body, Mesh(pp=2), lambda _: ())


@pytest.mark.parametrize("to", [0, 2, -1])
def test_another_rank_of_the_axis_must_be_named(to):
    with pytest.raises(ValueError, match=f"send: rank {to} from rank 0 of 2"):
        each_rank(
            lambda axes: own_index(axes.pp) or send(torch.ones(1), axes.pp, to),
            Mesh(pp=2),
            lambda _: (),
        )


def test_only_on_real_ranks():
    assert own_index(()) == 0
    with pytest.raises(ValueError, match="not bound to ranks"):
        own_index(Mesh(pp=2).axes().pp)

    def body(axes, x):
        send(x, axes.pp, 1)
        return x

    with pytest.raises(ValueError, match=r"\('pp',\) in the simulated mesh"):
        shard_map(body, Mesh(pp=2), (P("pp"),), P("pp"))(torch.ones(2))
