"""A job's share of the processors: threads may end while they are looked at."""

from __future__ import annotations

import os

import pytest

from posttrain.sandbox import usage

RUNNING = b"7 (python) R " + b"0 " * 40


@pytest.fixture
def made_nice(monkeypatch):
    """The priorities that were set; threads 8 and 9 of process 7 run, and 8 has ended when it is looked at again."""
    found = {}
    files = {"7/task/8/stat": RUNNING, "7/task/9/stat": RUNNING, "7/task/9/status": b"Name: x\nNSpid:\t9\t2\n"}
    monkeypatch.setattr(usage, "list_threads", lambda proc, process: ["8", "9"])
    monkeypatch.setattr(usage, "read_proc", lambda proc, name: files.get(name, b""))
    monkeypatch.setattr(usage, "_namespace_depth", lambda proc: 1)
    monkeypatch.setattr(os, "setpriority", lambda which, who, level: found.update({who: level}))
    return found


def test_a_thread_that_has_ended_meanwhile_leaves_the_others_their_turn(made_nice):
    usage.lower_priorities(0, [7])
    assert made_nice == {2: 4}, "two beside each other, each of half the weight: four levels of a quarter"
