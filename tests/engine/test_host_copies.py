"""Copies of exported weights in host memory, made while the exported tensors are freed one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from posttrain.engine import export
from posttrain.engine.export import host_copies
from posttrain.models.lora import save_model


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


def test_a_model_is_exported_a_file_at_a_time_and_loads_as_from_one(tiny_model, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)
    sizes = []

    def save(folder, state):
        sizes.append(sum(weight.nbytes for weight in state.values()))
        save_model(model, folder, None, merged=False, state=state)

    weights = dict(model.named_parameters(remove_duplicate=False))  # a tied head is one tensor with two names
    limit = max(weight.nbytes for weight in weights.values())
    monkeypatch.setattr(export, "FILE_BYTES", 1)
    export.export_by_files(iter(weights.items()), tmp_path / "files", save)
    layers = model.config.num_hidden_layers
    assert len(sizes) >= layers + 1 and max(sizes) <= max(limit, sum(sizes) / 2)
    files = sorted(path.name for path in (tmp_path / "files").glob("model-*.safetensors"))
    assert files[-1] == f"model-{len(sizes):05}-of-{len(sizes):05}.safetensors"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "files").state_dict()
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)

    monkeypatch.setattr(export, "FILE_BYTES", 2**30)
    export.export_by_files(iter(weights.items()), tmp_path / "one", save)
    model.save_pretrained(tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        path.name for path in (tmp_path / "plain").iterdir()
    )
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
