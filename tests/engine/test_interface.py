"""Ranks on several machines meet on the interface that faces the first, not on that of the machine's own name."""

from __future__ import annotations

import os

import pytest

from posttrain.engine import ranks
from posttrain.engine.ranks import GLOO, NCCL, address_facing, name_interface


@pytest.fixture
def machine(monkeypatch):
    """A machine with a loopback, an interface without an address, and one that faces 10.0.0.1."""
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = {"lo": "127.0.0.1", "down0": None, "eth7": "10.0.0.3"}
    monkeypatch.setattr(ranks.socket, "if_nameindex", lambda: list(enumerate(found)))
    monkeypatch.setattr(ranks, "_address_of", found.get)
    monkeypatch.setattr(ranks, "address_facing", lambda host: "10.0.0.3" if host == "10.0.0.1" else "127.0.0.1")
    return monkeypatch


def test_ranks_that_join_name_the_interface_that_faces_the_first_machine(machine):
    machine.setattr(ranks.dist, "init_process_group", lambda *arguments, **named: None)
    machine.setattr(ranks, "_store", lambda *arguments: None)
    ranks.join_ranks(1, 2, "10.0.0.1:5000", ranks.torch.device("cpu"))
    assert os.environ[GLOO] == "eth7" and NCCL not in os.environ  # between machines NCCL knows the fast ones


def test_ranks_of_one_machine_meet_where_no_other_reaches_them(machine):
    name_interface("127.0.0.1")
    assert os.environ[GLOO] == os.environ[NCCL] == "lo"


def test_users_with_a_choice_are_left_alone(machine):
    machine.setenv(GLOO, "ib0")
    machine.setenv(NCCL, "ib1")
    for host in ("10.0.0.1", "127.0.0.1"):
        name_interface(host)
        assert os.environ[GLOO] == "ib0" and os.environ[NCCL] == "ib1"


def test_addresses_are_those_that_the_system_gives():
    assert address_facing("127.0.0.1") == ranks._address_of("lo") == "127.0.0.1"
    assert address_facing("no such host") is None and ranks._address_of("nothing0") is None
