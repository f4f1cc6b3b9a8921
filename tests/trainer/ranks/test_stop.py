"""Signals that come more than once, or with others."""

import signal

import pytest

from k31fn.trainer.ranks import stop
from k31fn.trainer.ranks.agreement import Ranks
from k31fn.trainer.ranks.stop import Stop


def send(*numbers):
    for number in numbers:
        # To this thread: one that is sent to the process may reach another thread, and the handler
        # is then run after the next signal, or the block.
        signal.raise_signal(number)


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ([signal.SIGTERM] * 50, "SIGTERM"),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGHUP], "SIGHUP"),
        ([signal.SIGINT] * 3, "SIGINT"),  # the terminal's and torchrun's, for one Ctrl-C
        ([signal.SIGTERM, signal.SIGINT], "SIGTERM"),
    ],
)
def test_a_burst_of_signals_is_one(numbers, cause):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    waits = Stop()
    assert waits.since == 0
    with waits.listening():
        send(*numbers)
        assert waits.cause == cause
        waits.agree(Ranks(), None)
        assert 0 < waits.since < 10
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_a_later_second_ctrl_c_breaks_off(monkeypatch):
    monkeypatch.setattr(stop, "_SAME_S", 0.0)
    with Stop().listening():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        waits = Stop()
        with waits.listening():
            send(signal.SIGHUP)
            assert not waits.cause
    finally:
        signal.signal(signal.SIGHUP, before)
