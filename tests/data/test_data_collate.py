"""collate: prompts of a data set become the batch that rollout starts from."""

import pytest
import torch

from posttrain.config.trainer import DataConfig
from posttrain.data import PromptDataset
from posttrain.data.dataset import collate
from posttrain.protocol import DataProto


def test_prompts_are_padded_left_to_the_longest_with_mask_and_positions():
    fields = {"raw_prompt": [], "prompt": "", "data_source": "s", "ground_truth": "1", "extra_info": None, "index": 0}
    data = collate([{"prompt_ids": [5, 6], **fields}, {"prompt_ids": [7, 8, 9, 4], **fields}], pad_token_id=2)
    assert data.batch["prompts"].tolist() == [[2, 2, 5, 6], [7, 8, 9, 4]]
    assert data.batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert data.batch["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert data.non_tensor_batch["raw_prompt_ids"].tolist() == [[5, 6], [7, 8, 9, 4]]


def test_fields_of_the_items_are_carried_and_prompt_is_the_decoded_prompt(tokenizer):
    rows = [
        {"prompt": "abc", "ground_truth": "1", "data_source": "math", "response": "r"},
        {"prompt": "z", "extra_info": {"k": 1}},
    ]
    data = collate(list(PromptDataset(rows, tokenizer, DataConfig())), pad_token_id=tokenizer.pad_token_id)
    fields = data.non_tensor_batch
    assert fields["ground_truth"].tolist() == ["1", None] and fields["data_source"].tolist() == ["math", None]
    assert fields["extra_info"].tolist() == [{"response": "r"}, {"k": 1}] and fields["index"].tolist() == [0, 1]
    assert fields["raw_prompt"][1] == [{"role": "user", "content": "z"}]
    assert "response" not in fields  # that name is the generated text's
    decoded = [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(data.batch["prompts"], data.batch["attention_mask"], strict=True)
    ]
    assert fields["prompt"].tolist() == decoded


def test_batches_of_different_widths_join_to_what_one_batch_would_be(tokenizer):
    items = list(PromptDataset([{"prompt": "x" * n} for n in (1, 4, 9)], tokenizer, DataConfig()))
    parts = DataProto.concat([collate(items[:2], pad_token_id=3), collate(items[2:], pad_token_id=3)])
    whole = collate(items, pad_token_id=3)
    assert all(torch.equal(parts.batch[name], tensor) for name, tensor in whole.batch.items())


def test_no_items_are_an_error():
    with pytest.raises(ValueError, match="no items"):
        collate([])
