"""Conversations and batches: what a row of the data gives its conversation, and what conversations leave in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.conversations.conversation import Conversation, Key
from posttrain.conversations.loop import ConversationLoop
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

ROW_FIELDS = ("raw_prompt", "data_source", "ground_truth", "extra_info", "index")
"""Fields of a row that its agent and its tools may read."""


def begin_conversations(
    loop: ConversationLoop, keys: Sequence[Key], asked: DataProto, rows: DataProto, ranks: Mapping[Any, int]
) -> list[int]:
    """Starts a conversation for each row. Gives the rows whose first turn the caller submits, with their prompts; the
    others' agents ask for theirs. `ranks` has the rank of each prompt: its conversations share its prefix there."""
    prompts, seeds = asked.non_tensor_batch["raw_prompt_ids"], asked.non_tensor_batch["seed"]
    fields = {name: rows.non_tensor_batch[name] for name in ROW_FIELDS if name in rows.non_tensor_batch}
    to_submit = []
    for number, (key, ids, seed) in enumerate(zip(keys, prompts, seeds, strict=True)):
        row = {name: values[number] for name, values in fields.items()}
        if loop.begin(key, ids, int(seed), dict(asked.meta_info), row, ranks[key[0]]):
            to_submit.append(number)
    return to_submit


def reward_info(record: Conversation) -> dict[str, Any]:
    """What reward functions find in `extra_info` of a whole response."""
    counts = {"num_turns": record.turns, "tool_calls": len(record.calls), "tool_reward": record.reward}
    given = {"turn_rewards": [reward for _, reward in record.turn_rewards]} if record.turn_rewards else {}
    return {**record.facts, **given, **counts, "num_rows": len(record.rows)}


def join_rows(loop: ConversationLoop, samples: DataProto, ended: Sequence[Output]) -> DataProto:
    """The batch of these conversations, which have ended so: a row for each branch, the rows of a sample together."""
    records = [loop.records.pop(output.id) for output in ended]
    branches = [(record, branch) for record in records for branch in record.rows]
    counts = [len(record.rows) for record in records]
    rows = samples if len(branches) == len(samples) else samples[np.repeat(np.arange(len(samples)), counts)]
    outputs = []
    for record, output in zip(records, ended, strict=True):
        outputs += [branch.output(output.id, branch.finish_reason) for branch in record.rows[:-1]] + [output]
    pad = loop.tokenizer.pad_token_id
    rows.union(to_batch([list(branch.prompt_ids) for _, branch in branches], outputs, pad))
    if "prompt" in rows.non_tensor_batch:
        texts = np.array(rows.non_tensor_batch["prompt"], dtype=object)
        for number, (_, branch) in enumerate(branches):
            if branch.own_prompt:
                texts[number] = loop.tokenizer.decode(list(branch.prompt_ids), skip_special_tokens=False)
        rows.non_tensor_batch["prompt"] = texts
    parents = [record.parent_row(branch) for record, branch in branches]
    fields = {
        "num_turns": [record.turns for record, _ in branches],
        "tool_calls": [record.calls for record, _ in branches],
        "tool_reward": [record.reward for record, _ in branches],
        "call_seconds": [record.call_seconds for record, _ in branches],
        "turn_rewards": [record.turn_rewards for record, _ in branches],
        "branch": [branch.number for _, branch in branches],
        "parent": [parent for parent, _ in parents],
        "fork": [fork for _, fork in parents],
        "turn_ends": [branch.turn_ends for _, branch in branches],
    }
    return rows.union(DataProto.from_dict(non_tensors=fields))
