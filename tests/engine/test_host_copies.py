"""Copies of exported weights in host memory, made while the exported tensors are freed one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from posttrain.engine.sharding import host_copies


def walk(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as engines export them: each tensor is freed before the next is made, so that its `id` is reused."""
    for number in range(count):
        weight = torch.full((4,), float(number))
        yield f"layer.{number}", weight
        if number == 0:
            yield "head", weight  # tied
        del weight


def test_every_name_has_its_own_values_although_tensors_are_freed_during_the_walk():
    state = host_copies(walk(50))
    assert list(state) == ["layer.0", "head", *(f"layer.{number}" for number in range(1, 50))]
    assert all(torch.equal(state[f"layer.{number}"], torch.full((4,), float(number))) for number in range(50))


def test_a_tied_weight_stays_one_tensor_and_no_other_shares_memory():
    state = host_copies(walk(50))
    assert state["head"] is state["layer.0"]
    assert len({weight.data_ptr() for weight in state.values()}) == 50


def test_parts_of_one_tensor_become_copies_of_their_own():
    """Safetensors rejects a file in which two weights share memory."""
    whole = torch.arange(8.0)
    state = host_copies([("gate", whole[:4]), ("up", whole[4:])])
    assert state["gate"].untyped_storage().data_ptr() != state["up"].untyped_storage().data_ptr()
    whole.zero_()
    assert state["up"].tolist() == [4.0, 5.0, 6.0, 7.0]
