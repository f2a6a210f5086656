"""No test waits for ever for a program, and none for what another has left behind."""

from __future__ import annotations

import os
import subprocess

import forked
import patience
import pytest


@pytest.mark.parametrize("given", [{}, {"capture_output": True}, {"stdout": subprocess.PIPE, "text": True}])
def test_a_program_that_does_not_end_is_killed_and_named(given, monkeypatch):
    monkeypatch.setattr(patience, "PROGRAM_S", 0.2)
    with pytest.raises(subprocess.TimeoutExpired, match=r"sleep 3; echo"):
        subprocess.run(["bash", "-c", "sleep 3; echo"], **given)
    with subprocess.Popen(["sleep", "60"]) as process, pytest.raises(subprocess.TimeoutExpired):
        process.wait()
    assert process.returncode == -9


def test_bounds_of_the_callers_own_are_left_alone(monkeypatch):
    monkeypatch.setattr(patience, "PROGRAM_S", 0.01)
    assert subprocess.run(["sh", "-c", "sleep 0.1; echo a"], capture_output=True, timeout=60).stdout == b"a\n"
    with subprocess.Popen(["sleep", "0.1"]) as process:
        assert process.wait(60) == 0


def test_the_process_that_is_forked_ends_though_another_holds_its_input(monkeypatch):
    monkeypatch.setattr(forked, "END_S", 0.2)
    server = forked.Forked()
    assert server.server.stdin is not None
    held = os.dup(server.server.stdin.fileno())
    try:
        server.close()
    finally:
        os.close(held)
    assert server.server.returncode == -9


def test_a_condition_that_never_comes_fails(monkeypatch):
    monkeypatch.setattr(patience, "CONDITION_S", 0.1)
    patience.until(lambda: True, "for nothing")
    with pytest.raises(AssertionError, match="waited in vain for snow"):
        patience.until(lambda: False, "for snow")


def test_programs_have_almost_the_time_of_the_test_that_runs_now(monkeypatch):
    monkeypatch.setattr(patience, "PROGRAM_S", patience.PROGRAM_S)
    assert patience.PROGRAM_S == 305.0  # pytest said so when this test began
    patience.fit_deadline(900)
    assert patience.PROGRAM_S == 885.0
