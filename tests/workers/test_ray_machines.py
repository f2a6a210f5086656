"""Which machines of a Ray a run's ranks live on, from what Ray says of its nodes."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import UserError

pytest.importorskip("ray")
from posttrain.controller.ray_machines import chosen


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": f"10.0.0.{name}", "Resources": resources}


NODES = [
    node("1", CPU=8.0, GPU=4.0),
    node("2", CPU=16.0, GPU=8.0),
    node("3", CPU=16.0, GPU=8.0, alive=False),
    node("4", CPU=4.0),
    node("5", CPU=32.0, GPU=8.0),
]


def test_machines_are_alive_have_the_gpus_and_begin_with_the_commands_own():
    taken = chosen(NODES, "5", 2, 8, "cuda")
    assert [(machine.id, machine.address, machine.cores) for machine in taken] == [
        ("5", "10.0.0.5", 32),
        ("2", "10.0.0.2", 16),
    ]
    assert [machine.id for machine in chosen(NODES, "4", 3, 4, "cuda")] == ["1", "2", "5"]  # its own has no GPU
    assert [machine.id for machine in chosen(NODES, "4", 4, 9, "cpu")] == ["4", "1", "2", "5"]


def test_too_few_machines_are_counted_in_words():
    with pytest.raises(UserError, match=r"nnodes=3: the Ray of this run has 2 machine\(s\) with 8 GPU\(s\), 4 in all"):
        chosen(NODES, "5", 3, 8, "cuda")
    with pytest.raises(UserError, match=r"nnodes=5: the Ray of this run has 4 machine\(s\), 4 in all"):
        chosen(NODES, "5", 5, 1, "cpu")
