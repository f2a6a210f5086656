"""DataProto: rows, fields, widths and disk."""

import copy
import pickle

import numpy as np
import pytest
import torch

from posttrain.protocol import DataProto, TensorBatch, pad_to_common_width


def make(rows=4, width=3, **meta):
    ids = torch.arange(rows * width).reshape(rows, width)
    return DataProto.from_dict({"responses": ids}, {"uid": [f"u{i}" for i in range(rows)]}, meta)


def generated(prompt_lengths, response_lengths, pad=0):
    """A batch as it stands after generation: prompts padded left, responses right."""
    rows, width_p, width_r = len(prompt_lengths), max(prompt_lengths), max(response_lengths)
    prompts, responses = torch.full((rows, width_p), pad), torch.full((rows, width_r), pad)
    prompt_mask, response_mask = torch.zeros(rows, width_p).long(), torch.zeros(rows, width_r).long()
    for row, (p, r) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        prompts[row, width_p - p :] = 10 + row
        prompt_mask[row, width_p - p :] = 1
        responses[row, :r] = 20 + row
        response_mask[row, :r] = 1
    attention_mask = torch.cat([prompt_mask, response_mask], 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0) * attention_mask,
        "response_mask": response_mask,
        "old_log_probs": -response_mask.float(),
    }
    return DataProto.from_dict(tensors, {"uid": list(range(rows))}, {"pad_token_id": pad})


def test_repeat_interleaved_and_not_treats_tensors_and_objects_alike():
    data = make(2)
    interleaved = data.repeat(repeat_times=3, interleave=True)
    assert interleaved.non_tensor_batch["uid"].tolist() == ["u0"] * 3 + ["u1"] * 3
    assert interleaved.batch["responses"][:, 0].tolist() == [0, 0, 0, 3, 3, 3]
    tiled = data.repeat(repeat_times=3, interleave=False)
    assert tiled.non_tensor_batch["uid"].tolist() == ["u0", "u1"] * 3
    assert tiled.batch["responses"][:, 0].tolist() == [0, 3] * 3


def test_split_gives_parts_of_k_rows_in_order_and_a_smaller_last_one():
    parts = make(10, key="v").split(4)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [uid for part in parts for uid in part.non_tensor_batch["uid"]] == [f"u{i}" for i in range(10)]
    assert torch.equal(torch.cat([part.batch["responses"] for part in parts]), make(10).batch["responses"])
    assert all(part.meta_info == {"key": "v"} for part in parts)


def test_fields_of_a_generated_batch_span_prompt_and_response():
    data = generated([2, 4], [3, 1])
    batch = data.batch
    assert batch.batch_size == torch.Size([2])
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert batch["attention_mask"].sum(1).tolist() == [5, 5]


@pytest.mark.parametrize("name", ["response_mask", "token_level_rewards", "advantages"])
def test_a_response_field_of_wrong_width_names_both_shapes(name):
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(2, 4\) but 'responses' has shape \(2, 3\)"):
        DataProto.from_dict({"responses": torch.zeros(2, 3), name: torch.zeros(2, 4)})


def test_input_ids_of_wrong_width_name_all_shapes():
    tensors = {"prompts": torch.zeros(2, 5), "responses": torch.zeros(2, 3), "input_ids": torch.zeros(2, 7)}
    with pytest.raises(ValueError, match=r"'input_ids' has shape \(2, 7\) but 'prompts' \(2, 5\).*\(2, 3\) make 8"):
        DataProto.from_dict(tensors)


def test_other_spellings_read_and_write_the_same_tensor():
    data = DataProto.from_dict({"old_log_probs": torch.ones(2, 3), "ref_log_prob": torch.zeros(2, 3)})
    assert data.batch["log_probs"] is data.batch["old_log_probs"]
    assert data.batch["ref_log_probs"] is data.batch["ref_log_prob"]
    assert "log_probs" in data.batch and list(data.batch) == ["old_log_probs", "ref_log_prob"]
    data.batch["log_probs"] = torch.full((2, 3), 7.0)
    assert data.batch["old_log_probs"][0, 0] == 7 and len(data.batch) == 2
    assert data[1].batch["log_probs"].tolist() == [7, 7, 7]
    assert list(data.select(["log_probs"]).batch) == ["old_log_probs"]


def test_uid_stays_with_its_rows_and_occurs_n_times():
    data = make(3).repeat(repeat_times=5, interleave=True)
    names, counts = np.unique(data.non_tensor_batch["uid"].astype(str), return_counts=True)
    assert names.tolist() == ["u0", "u1", "u2"] and counts.tolist() == [5, 5, 5]
    assert data.non_tensor_batch["uid"].dtype == object


def test_texts_are_decoded_on_first_reading_without_padding():
    calls = []

    def decode(ids):
        calls.append(ids)
        return "".join(chr(90 + i) for i in ids)

    data = generated([2, 4], [3, 1]).set_decoder(decode)
    assert "response" in data.non_tensor_batch and not calls
    assert list(data.non_tensor_batch) == ["uid"]
    repeated = data.repeat(2)
    assert repeated.non_tensor_batch["response"].tolist() == ["nnn", "nnn", "o", "o"]
    assert repeated.non_tensor_batch["prompt"].tolist() == ["dd", "dd", "eeee", "eeee"]
    made = len(calls)
    assert repeated[2].non_tensor_batch["response"] == "o" and len(calls) == made
    data.pop(batch_keys=["responses"])
    assert "response" not in data.non_tensor_batch
    with pytest.raises(KeyError, match="response"):
        data.non_tensor_batch["response"]


def test_decoder_stays_behind_when_a_batch_is_pickled():
    data = generated([2], [3]).set_decoder(lambda ids: "x")
    there = pickle.loads(pickle.dumps(data))
    assert "prompt" not in there.non_tensor_batch and torch.equal(there.batch["prompts"], data.batch["prompts"])
    assert len(copy.deepcopy(data)) == 1


def test_rows_of_other_count_are_refused_with_both_shapes():
    data = make(4)
    with pytest.raises(ValueError, match=r"'advantages' has shape \(3, 3\): 3 rows, but this batch .*\(4,\)"):
        data.batch["advantages"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"'truth' has shape \(2,\).*4 rows"):
        data.non_tensor_batch["truth"] = ["a", "b"]
    with pytest.raises(ValueError, match=r"\(4, 3\).*3 rows \('uid' has shape \(3,\)\)"):
        DataProto({"responses": torch.zeros(4, 3)}, {"uid": ["a", "b", "c"]})
    grown = DataProto()
    grown.batch["a"], grown.non_tensor_batch["b"] = torch.zeros(2), [1, 2, 3]
    with pytest.raises(ValueError, match=r"2 rows .*3 rows"):
        len(grown)


def test_wrong_kinds_of_values_are_refused():
    with pytest.raises(TypeError, match="takes tensors only"):
        DataProto({"uid": ["a"]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="first dimension"):
        DataProto({"x": torch.tensor(1)})
    with pytest.raises(TypeError, match="one value per row"):
        DataProto(None, {"uid": "abc"})


def test_rows_of_equal_lists_stay_lists():
    data = DataProto(None, {"raw_prompt_ids": [[1, 2], [3, 4]], "score": np.array([0.5, 1.0])})
    assert data.non_tensor_batch["raw_prompt_ids"].shape == (2,)
    assert data.non_tensor_batch["raw_prompt_ids"][1] == [3, 4]
    assert type(data.non_tensor_batch["score"][0]) is float


def test_from_single_dict_sorts_tensors_from_the_rest():
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": ["x", "y"]}, meta_info={"step": 3})
    assert list(data.batch) == ["a"] and list(data.non_tensor_batch) == ["b"] and data.meta_info == {"step": 3}


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        ([2, 0, -1], [2, 0, 3]),
        (range(2), [0, 1]),
        (np.array([3, 3]), [3, 3]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        (np.array([False, True, False, False]), [1]),
        ([], []),
    ],
)
def test_indexing_chooses_rows(index, rows):
    data = make(4)[index]
    assert data.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in rows]
    assert data.batch["responses"][:, 0].tolist() == [3 * i for i in rows] and len(data) == len(rows)


def test_one_row_is_an_item_without_the_first_dimension():
    item = make(4, t=1)[-1]
    assert item.batch["responses"].tolist() == [9, 10, 11] and item.non_tensor_batch["uid"] == "u3"
    assert item.meta_info == {"t": 1} and [row.non_tensor_batch["uid"] for row in make(2)] == ["u0", "u1"]


def test_indices_out_of_range_are_errors():
    for index in (4, [0, 4], [-5]):
        with pytest.raises(IndexError, match="4"):
            make(4)[index]
    with pytest.raises(IndexError, match=r"\(3,\) for a batch of shape \(4,\)"):
        make(4)[torch.tensor([True, False, True])]
    with pytest.raises(TypeError, match="integers"):
        make(4)[[0.5]]


def test_select_and_pop_take_fields_and_leave_the_rest():
    data = DataProto.from_dict({"a": torch.zeros(2), "b": torch.ones(2)}, {"c": [1, 2], "d": [3, 4]}, {"m": 1, "k": 2})
    chosen = data.select(batch_keys=["a"], non_tensor_batch_keys=["d"], meta_info_keys=["m"])
    assert (list(chosen.batch), list(chosen.non_tensor_batch), chosen.meta_info) == (["a"], ["d"], {"m": 1})
    popped = data.pop(batch_keys=["a", "b"], non_tensor_batch_keys=["c"], meta_info_keys=["k"])
    assert (list(popped.batch), list(popped.non_tensor_batch), popped.meta_info) == (["a", "b"], ["c"], {"k": 2})
    assert (list(data.batch), list(data.non_tensor_batch), data.meta_info) == ([], ["d"], {"m": 1})
    assert len(data) == 2 and data.batch.batch_size == torch.Size([2])


def test_pop_of_a_missing_field_changes_nothing():
    data = make(2)
    with pytest.raises(KeyError, match="no non-tensor field 'nope' in this batch; it has: uid"):
        data.pop(batch_keys=["responses"], non_tensor_batch_keys=["nope"])
    assert "responses" in data.batch


def test_rename_moves_fields_and_refuses_taken_names():
    data = make(2).rename(["responses", "uid"], ["tokens", "group"])
    assert list(data.batch) == ["tokens"] and list(data.non_tensor_batch) == ["group"]
    with pytest.raises(ValueError, match="'group' already"):
        data.rename("tokens", "group")
    with pytest.raises(KeyError):
        data.rename("absent", "x")


def test_union_adds_fields_and_refuses_conflicts_by_name_without_a_change():
    nan = torch.tensor([[1.0, float("nan")]] * 2)
    data = DataProto.from_dict({"x": nan}, {"uid": ["a", "b"]}, {"t": 1})
    assert (
        data.union(DataProto.from_dict({"x": nan.clone(), "y": torch.ones(2)}, {"uid": ["a", "b"]}, {"s": 2})) is data
    )
    assert list(data.batch) == ["x", "y"] and data.meta_info == {"t": 1, "s": 2}
    with pytest.raises(ValueError, match="tensor 'y' with different values"):
        data.union(DataProto.from_dict({"new": torch.ones(2), "y": torch.zeros(2)}))
    with pytest.raises(ValueError, match="non-tensor field 'uid'"):
        data.union(DataProto.from_dict({"new": torch.ones(2)}, {"uid": ["a", "c"]}))
    with pytest.raises(ValueError, match="meta_info 't' differs"):
        data.union(DataProto.from_dict({"new": torch.ones(2)}, meta_info={"t": 5}))
    with pytest.raises(ValueError, match="2 rows and one of 3 rows"):
        data.union(make(3))
    assert "new" not in data.batch


def test_stages_add_fields_without_touching_the_others():
    data = generated([2, 4], [3, 1])
    before = {name: tensor.clone() for name, tensor in data.batch.items()}
    data.batch["token_level_rewards"] = torch.ones(2, 3)
    data = data.union(DataProto.from_dict({"advantages": torch.ones(2, 3), "returns": torch.ones(2, 3)}))
    assert set(data.batch) == {*before, "token_level_rewards", "advantages", "returns"}
    assert all(torch.equal(data.batch[name], tensor) for name, tensor in before.items())


def test_chunk_needs_even_parts_and_padding_makes_them():
    data = make(5)
    with pytest.raises(ValueError, match=r"5 rows cannot be cut into 4 equal parts; call pad_to_divisor\(4\)"):
        data.chunk(4)
    padded, added = data.pad_to_divisor(4)
    assert added == 3 and padded.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2", "u3", "u4", "u0", "u1", "u2"]
    joined = DataProto.concat(padded.chunk(4)).unpad(added)
    assert torch.equal(joined.batch["responses"], data.batch["responses"]) and len(joined) == 5
    assert make(2).pad_to_divisor(7)[0].non_tensor_batch["uid"].tolist() == ["u0", "u1"] * 3 + ["u0"]
    assert data.pad_to_divisor(5)[1] == 0


def test_concat_restores_what_split_parted():
    data = make(7, t=1)
    joined = DataProto.concat(data.split(3))
    assert torch.equal(joined.batch["responses"], data.batch["responses"]) and joined.meta_info == {"t": 1}
    assert joined.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()


def test_concat_pads_prompts_left_and_responses_right_so_that_columns_keep_their_meaning():
    a, b = generated([2, 3], [4, 1], pad=9), generated([5], [2], pad=9)
    joined = DataProto.concat([a, b]).batch
    assert joined["prompts"].tolist()[0] == [9, 9, 9, 10, 10] and joined["responses"].tolist()[2] == [20, 20, 9, 9]
    assert torch.equal(joined["input_ids"], torch.cat([joined["prompts"], joined["responses"]], 1))
    assert joined["attention_mask"].tolist()[2] == [1, 1, 1, 1, 1, 1, 1, 0, 0]
    assert joined["attention_mask"].sum(1).tolist() == [6, 4, 7]
    assert joined["response_mask"].sum(1).tolist() == [4, 1, 2] and joined["old_log_probs"].sum() == -7
    whole = generated([2, 3, 5], [4, 1, 2], pad=9).batch
    assert torch.equal(joined["attention_mask"], whole["attention_mask"])
    assert torch.equal(joined["position_ids"], whole["position_ids"])


def test_own_per_token_fields_are_padded_and_other_widths_are_errors():
    a, b = make(2, 3), make(2, 5)
    a.batch["weight"], b.batch["weight"] = torch.ones(2, 3), torch.ones(2, 5)
    assert DataProto.concat([a, b]).batch["weight"].sum(1).tolist() == [3, 3, 5, 5]
    a.batch["vector"], b.batch["vector"] = torch.ones(2, 8), torch.ones(2, 6)
    with pytest.raises(ValueError, match=r"'vector' has shape \(2, 8\).*\(2, 6\)"):
        DataProto.concat([a, b])
    with pytest.raises(ValueError, match="'prompts' is missing"):
        pad_to_common_width([TensorBatch({"input_ids": torch.zeros(1, n)}) for n in (2, 3)])


def test_concat_refuses_missing_fields_types_and_conflicting_meta_info():
    with pytest.raises(KeyError, match="'extra'"):
        DataProto.concat(
            [make(2), DataProto.from_dict({"responses": torch.zeros(1, 3).long(), "extra": torch.ones(1)})]
        )
    with pytest.raises(ValueError, match=r"int64.*float32"):
        DataProto.concat([make(2).select(non_tensor_batch_keys=[]), DataProto({"responses": torch.zeros(1, 3)})])
    with pytest.raises(ValueError, match="meta_info 't' differs"):
        DataProto.concat([make(2, t=1), make(2, t=2)])
    with pytest.raises(ValueError, match="no batches"):
        DataProto.concat([])


def test_reorder_needs_every_row_once():
    data = make(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert data.non_tensor_batch["uid"].tolist() == ["u2", "u0", "u1"]
    with pytest.raises(ValueError, match="each of the 3 rows exactly once"):
        data.reorder([0, 0, 1])


def test_iterator_visits_every_row_once_per_epoch_in_an_order_given_by_the_seed():
    def visits(seed):
        return [b.non_tensor_batch["uid"].tolist() for b in make(10).make_iterator(4, epochs=2, seed=seed)]

    def rows(batches):
        return [uid for batch in batches for uid in batch]

    everyone = [f"u{i}" for i in range(10)]
    assert [len(uids) for uids in visits(None)] == [4, 4, 2, 4, 4, 2]
    assert rows(visits(None)) == everyone * 2
    assert visits(3) == visits(3) != visits(4)
    assert sorted(rows(visits(3)[:3])) == sorted(rows(visits(3)[3:])) == everyone
    assert visits(3)[:3] != visits(3)[3:]


def test_to_changes_the_device_of_all_tensors():
    data = make(2)
    assert data.to("meta") is data and data.batch["responses"].device.type == "meta"


def test_saved_batch_comes_back_equal(tmp_path):
    data = generated([2, 4], [3, 1])
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] = torch.ones(2, 3)
    data.batch["half"] = torch.ones(2, 3, dtype=torch.bfloat16)
    data.non_tensor_batch["extra_info"] = [{"难度": 1, "tags": ["a"]}, None]
    data.non_tensor_batch["count"] = [np.int64(3), 4]
    data.save_to_disk(tmp_path / "batch")
    assert sorted(path.name for path in (tmp_path / "batch").iterdir()) == ["fields.json", "tensors.safetensors"]
    back = DataProto.load_from_disk(tmp_path / "batch")
    assert set(back.batch) == set(data.batch) and back.meta_info == data.meta_info
    assert all(torch.equal(back.batch[n], t) and back.batch[n].dtype == t.dtype for n, t in data.batch.items())
    assert all(back.non_tensor_batch[n].tolist() == a.tolist() for n, a in data.non_tensor_batch.items())


def test_values_that_json_cannot_hold_are_named_when_saving(tmp_path):
    data = make(2)
    data.non_tensor_batch["info"] = [{"a": 1}, {"a": [object()]}]
    with pytest.raises(TypeError, match=r"non_tensor_batch\['info'\]\[1\]\['a'\]\[0\] is a object"):
        data.save_to_disk(tmp_path / "x")
    with pytest.raises(TypeError, match=r"meta_info\['m'\]\[1\] is a Tensor.*belong into `batch`"):
        make(2, m={1: torch.zeros(2)}).save_to_disk(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(FileNotFoundError, match="no saved DataProto"):
        DataProto.load_from_disk(tmp_path / "absent")


def test_printing_shows_rows_shapes_and_names():
    text = repr(make(4, step=2))
    assert "4 rows" in text and "responses int64 (4, 3)" in text and "uid" in text and "'step': 2" in text
