"""A heeded Ctrl-C belongs to what it ended: a program goes on ending, a caller in Python goes on living."""

import os
import signal

import pytest

from posttrain import interrupts
from posttrain.trainer.run.result import GracefulStop


def left_at_once():
    with pytest.raises(KeyboardInterrupt), GracefulStop(lambda text: None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_python_caller_is_not_interrupted_once_its_run_has_ended():
    left_at_once()
    assert not interrupts.interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_stays_interrupted_so_that_errors_which_follow_are_known_to_come_of_it(monkeypatch):
    monkeypatch.setattr(interrupts, "_since", None)
    with interrupts.one_interrupt():
        left_at_once()
        assert interrupts.interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
