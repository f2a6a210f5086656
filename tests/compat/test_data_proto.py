"""DataProto with verl's interface and verl's behaviour. (All but the tests of files hold for verl 0.9.1 as well.)"""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import (
    DataProtoConfig,
    DataProtoItem,
    pad_dataproto_to_divisor,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def batch(rows=4, **meta_info):
    ids = torch.arange(rows * 2).reshape(rows, 2)
    names = np.array([f"n{row}" for row in range(rows)], dtype=object)
    return DataProto.from_dict({"ids": ids, "mask": torch.ones(rows, 2)}, {"name": names}, dict(meta_info))


def test_a_batch_is_a_tensordict_beside_arrays_and_facts():
    data = batch(temperature=0.5)
    assert isinstance(data.batch, TensorDict) and tuple(data.batch.batch_size) == (4,)
    assert len(data) == 4 and data.meta_info == {"temperature": 0.5}
    assert list(data.batch.keys()) == ["ids", "mask"]
    lists = DataProto.from_dict(non_tensors={"label": [1, 2, 3]})
    assert lists.batch is None and len(lists) == 3 and lists.non_tensor_batch["label"].dtype == object
    assert len(DataProto()) == 0


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(AssertionError):
        DataProto.from_dict({"a": torch.zeros(3, 1), "b": torch.zeros(4, 1)})
    with pytest.raises(AssertionError):
        DataProto.from_dict({"a": torch.zeros(3, 1)}, {"name": np.array(["x"], dtype=object)})
    with pytest.raises(ValueError):
        DataProto.from_single_dict({"a": [1, 2]})
    with pytest.raises(AssertionError):
        batch().union(DataProto.from_dict({"ids": torch.zeros(4, 2)}))
    with pytest.raises(AssertionError):
        batch(temperature=1).union(batch(temperature=2))


def test_a_single_dict_is_told_apart_by_kind():
    data = DataProto.from_single_dict({"a": torch.zeros(2, 1), "b": np.array(["x", "y"], dtype=object)})
    assert list(data.batch.keys()) == ["a"] and list(data.non_tensor_batch) == ["b"]


def test_rows_are_chosen_by_number_slice_list_array_tensor_and_mask():
    data = batch(k=1)
    item = data[2]
    assert isinstance(item, DataProtoItem) and item.batch["ids"].tolist() == [4, 5]
    assert item.non_tensor_batch == {"name": "n2"} and item.meta_info == {"k": 1}
    for chosen in (
        slice(1, 3),
        [1, 2],
        np.array([1, 2]),
        torch.tensor([1, 2]),
        torch.tensor([False, True, True, False]),
    ):
        part = data[chosen]
        assert part.batch["ids"].tolist() == [[2, 3], [4, 5]] and part.non_tensor_batch["name"].tolist() == ["n1", "n2"]
        assert part.meta_info == {"k": 1}
    assert data.slice(0, 4, 2).non_tensor_batch["name"].tolist() == ["n0", "n2"]
    with pytest.raises(TypeError):
        data["ids"]


def test_rows_are_repeated_reordered_cut_and_joined():
    data = batch()
    assert data.repeat(2).non_tensor_batch["name"].tolist() == ["n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"]
    assert data.repeat(2, interleave=False).batch["ids"][:, 0].tolist() == [0, 2, 4, 6, 0, 2, 4, 6]
    assert data.sample_level_repeat([0, 2, 1, 0]).non_tensor_batch["name"].tolist() == ["n1", "n1", "n2"]
    data.reorder(torch.tensor([3, 2, 1, 0]))
    assert data.non_tensor_batch["name"].tolist() == ["n3", "n2", "n1", "n0"] and data.batch["ids"][0].tolist() == [
        6,
        7,
    ]
    halves = data.chunk(2)
    assert [part.non_tensor_batch["name"].tolist() for part in halves] == [["n3", "n2"], ["n1", "n0"]]
    assert [len(part) for part in data.split(3)] == [3, 1]
    joined = DataProto.concat(halves)
    assert torch.equal(joined.batch["ids"], data.batch["ids"])
    with pytest.raises(AssertionError):
        data.chunk(3)


def test_chunks_may_be_unequal_where_padding_is_enabled(monkeypatch):
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    assert DataProtoConfig.auto_padding
    assert [len(part) for part in batch(5).chunk(2)] == [3, 2]
    arrays = DataProto.from_dict(non_tensors={"label": [1, 2, 3, 4, 5]})
    assert [len(part) for part in arrays.chunk(3)] == [2, 2, 1]
    monkeypatch.delenv("VERL_AUTO_PADDING")
    data = DataProto.from_dict({"a": torch.zeros(3, 1)}, auto_padding=True)
    assert data.is_padding_enabled() and not batch().is_padding_enabled()
    data.padding(1, "first")
    assert len(data) == 4


def test_metrics_of_workers_are_gathered_and_other_facts_must_agree():
    parts = [batch(2, metrics={"loss": 1.0}, k=1), batch(2, metrics={"loss": 3.0}, k=1)]
    assert DataProto.concat(parts).meta_info == {"k": 1, "metrics": {"loss": [1.0, 3.0]}}
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'k'"):
        DataProto.concat([batch(2, k=1), batch(2, k=2)])


def test_fields_are_selected_popped_renamed_and_united():
    data = batch(k=1, other=2)
    part = data.select(["ids"], ["name"], ["k"])
    assert list(part.batch.keys()) == ["ids"] and part.meta_info == {"k": 1}
    popped = data.pop(batch_keys=["mask"], non_tensor_batch_keys=["name"], meta_info_keys=["other"])
    assert list(data.batch.keys()) == ["ids"] and data.non_tensor_batch == {} and data.meta_info == {"k": 1}
    assert list(popped.batch.keys()) == ["mask"] and popped.meta_info == {"other": 2}
    with pytest.raises(AssertionError):
        data.pop(batch_keys=["mask"])
    data.rename("ids", "input_ids")
    assert list(data.batch.keys()) == ["input_ids"]
    with pytest.raises(ValueError):
        data.rename(["input_ids"], ["a", "b"])
    whole = data.union(popped)
    assert whole is data and set(data.batch.keys()) == {"input_ids", "mask"} and data.meta_info == {"k": 1, "other": 2}


def test_unions_of_parts():
    first, second = (TensorDict({name: torch.ones(2)}, [2]) for name in "ab")
    assert set(union_tensor_dict(first, second).keys()) == {"a", "b"}
    nan = np.array([float("nan"), {"x": 1}], dtype=object)
    assert list(union_numpy_dict({"a": nan}, {"a": nan.copy(), "b": nan})) == ["a", "b"]
    with pytest.raises(AssertionError):
        union_numpy_dict({"a": nan}, {"a": np.array([1.0, {"x": 1}], dtype=object)})


def test_padding_to_a_divisor_is_taken_off_again():
    padded, added = pad_dataproto_to_divisor(batch(3), 8)
    assert added == 5 and padded.non_tensor_batch["name"].tolist() == ["n0", "n1", "n2", "n0", "n1", "n2", "n0", "n1"]
    assert unpad_dataproto(padded, added).non_tensor_batch["name"].tolist() == ["n0", "n1", "n2"]
    assert pad_dataproto_to_divisor(padded, 4) == (padded, 0) and unpad_dataproto(padded, 0) is padded


def test_mini_batches_in_order_and_shuffled_by_a_seed():
    data = batch(k=1)
    ordered = [part.non_tensor_batch["name"].tolist() for part in data.make_iterator(2, epochs=2)]
    assert ordered == [["n0", "n1"], ["n2", "n3"]] * 2
    shuffled = list(data.make_iterator(4, epochs=1, seed=3, dataloader_kwargs={"shuffle": True}))
    assert sorted(shuffled[0].non_tensor_batch["name"]) == ["n0", "n1", "n2", "n3"] and shuffled[0].meta_info == {
        "k": 1
    }
    again = list(data.make_iterator(4, epochs=1, seed=3, dataloader_kwargs={"shuffle": True}))
    assert torch.equal(again[0].batch["ids"], shuffled[0].batch["ids"])
    with pytest.raises(AssertionError):
        data.make_iterator(3, epochs=1)


def test_columns_become_rows():
    data = DataProto.from_dict({"pair": torch.arange(8).reshape(2, 4), "id": torch.tensor([[1], [2]])})
    cut = data.unfold_column_chunks(2, split_keys=["pair"])
    assert cut.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and cut.batch["id"][:, 0].tolist() == [
        1,
        1,
        2,
        2,
    ]


def test_a_tensordict_and_back():
    whole = batch(k=1).to_tensordict()
    assert isinstance(whole, TensorDict)
    data = DataProto.from_tensordict(whole)
    assert data.non_tensor_batch["name"].tolist() == ["n0", "n1", "n2", "n3"] and data.meta_info == {"k": 1}
    assert torch.equal(data.batch["ids"], batch().batch["ids"])


def test_a_batch_travels_between_processes():
    data = pickle.loads(pickle.dumps(batch(k=1)))
    assert (
        data.batch["ids"][1].tolist() == [2, 3]
        and data.non_tensor_batch["name"][1] == "n1"
        and data.meta_info == {"k": 1}
    )
    assert data.to("cpu") is data


# verl writes pickles here:


def test_files_hold_tensors_and_json_and_no_program(tmp_path):
    data = batch(k=[1, 2])
    data.non_tensor_batch["number"] = np.array([1.5, 2, 3, 4])
    data.save_to_disk(tmp_path / "batch")
    read = DataProto.load_from_disk(tmp_path / "batch")
    assert torch.equal(read.batch["ids"], data.batch["ids"]) and read.meta_info == {"k": [1, 2]}
    assert read.non_tensor_batch["name"].tolist() == ["n0", "n1", "n2", "n3"]
    assert read.non_tensor_batch["number"].dtype == np.float64
    (tmp_path / "verls").write_bytes(pickle.dumps(data))
    with pytest.raises(ValueError, match="is a pickle"):
        DataProto.load_from_disk(tmp_path / "verls")
    data.meta_info["tokenizer"] = object()
    with pytest.raises(TypeError, match="tokenizer"):
        data.save_to_disk(tmp_path / "batch")
