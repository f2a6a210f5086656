"""Ranks on several machines meet on the interface that faces the first, not on that of the machine's own name."""

from __future__ import annotations

import os

import pytest

from posttrain.engine import interface, ranks
from posttrain.engine.interface import GLOO, address_facing, name_interface


@pytest.fixture
def machine(monkeypatch):
    """A machine with a loopback, an interface without an address, and one that faces 10.0.0.1."""
    monkeypatch.setenv(GLOO, "")
    monkeypatch.delenv(GLOO)
    found = {"lo": "127.0.0.1", "down0": None, "eth7": "10.0.0.3"}
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: list(enumerate(found)))
    monkeypatch.setattr(interface, "_address_of", found.get)
    monkeypatch.setattr(interface, "address_facing", lambda host: "10.0.0.3" if host == "10.0.0.1" else "127.0.0.1")
    return monkeypatch


def test_ranks_that_join_name_the_interface_that_faces_the_first_machine(machine):
    machine.setattr(ranks.dist, "init_process_group", lambda *arguments, **named: None)
    ranks.join_ranks(1, 2, "10.0.0.1:5000", ranks.torch.device("cpu"))
    assert os.environ[GLOO] == "eth7"


def test_ranks_of_one_machine_and_users_with_a_choice_are_left_alone(machine):
    name_interface("127.0.0.1")
    assert GLOO not in os.environ
    machine.setenv(GLOO, "ib0")
    name_interface("10.0.0.1")
    assert os.environ[GLOO] == "ib0"


def test_addresses_are_those_that_the_system_gives():
    assert address_facing("127.0.0.1") == interface._address_of("lo") == "127.0.0.1"
    assert address_facing("no such host") is None and interface._address_of("nothing0") is None
