"""The last collectives of a process."""

import time

from k31fn.parallel.flight_recorder import FlightRecorder


def test_the_last_are_kept_and_numbered_by_group():
    flight = FlightRecorder()
    for i in range(300):
        issued = flight.add("psum", ("fsdp",) if i % 3 else ("tp",), (i,), "float32")
        issued.waited = time.monotonic()
    flight.add("all_gather", ("tp",), (5, 2), "bfloat16")
    rows = flight.as_json()
    assert len(rows) == 256
    assert rows[-2]["shape"] == (299,)
    assert rows[-1]["number"] == 101  # after 100 on tp
    assert [r["number"] for r in rows if r["axes"] == ("fsdp",)][-1] == 200
    assert rows[-1]["waited"] is None
    assert all(r["began"] >= r["waited"] >= 0 for r in rows[:-1])


def test_messages_count_by_their_other_end():
    flight = FlightRecorder()
    for kind in ("send to 1", "recv from 1", "send to 1", "psum", "send to 0"):
        flight.add(kind, ("pp",), (1,), "float32")
    assert [r["number"] for r in flight.as_json()] == [1, 1, 2, 1, 1]
