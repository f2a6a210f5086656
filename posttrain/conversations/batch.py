"""Conversations and batches: what a row of the data gives its conversation, and what conversations leave in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.conversations.conversation import Conversation, Key
from posttrain.conversations.loop import ConversationLoop
from posttrain.protocol import DataProto

ROW_FIELDS = ("raw_prompt", "data_source", "ground_truth", "extra_info", "index")
"""Fields of a row that its agent and its tools may read."""


def begin_conversations(
    loop: ConversationLoop, keys: Sequence[Key], asked: DataProto, rows: DataProto, ranks: int = 1
) -> list[int]:
    """Starts a conversation for each row. Gives the rows whose first turn the caller submits, with their prompts; the
    others' agents ask for theirs. Conversations of one prompt stay on one rank, so that they share its prefix."""
    prompts, seeds = asked.non_tensor_batch["raw_prompt_ids"], asked.non_tensor_batch["seed"]
    fields = {name: rows.non_tensor_batch[name] for name in ROW_FIELDS if name in rows.non_tensor_batch}
    groups = {uid: number for number, uid in enumerate(dict.fromkeys(uid for uid, _ in keys))}
    to_submit = []
    for number, (key, ids, seed) in enumerate(zip(keys, prompts, seeds, strict=True)):
        row = {name: values[number] for name, values in fields.items()}
        rank = groups[key[0]] * ranks // len(groups)
        if loop.begin(key, ids, int(seed), dict(asked.meta_info), row, rank):
            to_submit.append(number)
    return to_submit


def reward_info(record: Conversation) -> dict[str, Any]:
    """What reward functions find in `extra_info` of a whole response."""
    counts = {"num_turns": record.turns, "tool_calls": len(record.calls), "tool_reward": record.reward}
    return {**record.facts, **counts}


def turn_fields(loop: ConversationLoop, keys: Sequence[Key]) -> DataProto:
    """`num_turns` (the model's), `tool_calls`, `tool_reward` and `tool_seconds` of each response."""
    records = [loop.records.pop(key) for key in keys]
    return DataProto.from_dict(
        non_tensors={
            "num_turns": [record.turns for record in records],
            "tool_calls": [record.calls for record in records],
            "tool_reward": [record.reward for record in records],
            "tool_seconds": [record.tool_seconds for record in records],
        }
    )
