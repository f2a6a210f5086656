"""Conversations and the rows of a batch: what each row brings for its conversation, and what its turns leave for
samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.protocol import DataProto
from posttrain.rollout.agents.loop import Agents
from posttrain.rollout.turns.conversation import Conversation
from posttrain.rollout.turns.loop import Turns
from posttrain.rollout.turns.next_turn import Key

Loop = Turns | Agents
"""Who leads conversations: tools' own loop, or agents."""
ROW = ("raw_prompt", "data_source", "ground_truth", "extra_info", "index")
"""Fields of a row that its conversation may know of."""


def begin_all(turns: Loop, keys: Sequence[Key], asked: DataProto, rows: DataProto, ranks: int = 1) -> None:
    """A conversation for each row that is asked for. A row may have something for a tool of its own:
    `extra_info["tools_kwargs"][NAME]["create_kwargs"]`. Conversations of one prompt have their turns on one rank."""
    prompts, seeds = asked.non_tensor_batch["raw_prompt_ids"], asked.non_tensor_batch["seed"]
    known = {name: rows.non_tensor_batch[name] for name in ROW if name in rows.non_tensor_batch}
    groups = {uid: number for number, uid in enumerate(dict.fromkeys(uid for uid, _ in keys))}
    for number, (key, ids, seed) in enumerate(zip(keys, prompts, seeds, strict=True)):
        row = {name: values[number] for name, values in known.items()}
        turns.begin(key, ids, int(seed), dict(asked.meta_info), row, groups[key[0]] * ranks // len(groups))


def facts_of(record: Conversation) -> dict[str, Any]:
    """What reward functions find in `extra_info` of a whole response."""
    calls = {"num_turns": record.turns, "tool_calls": len(record.calls), "tool_reward": record.reward}
    return {**record.facts, **calls}


def fields_of_turns(turns: Loop, keys: Sequence[Key]) -> DataProto:
    """`num_turns` (the model's), `tool_calls`, `tool_reward` and `tool_seconds` of each row."""
    records = [turns.records.pop(key) for key in keys]
    return DataProto.from_dict(
        non_tensors={
            "num_turns": [record.turns for record in records],
            "tool_calls": [record.calls for record in records],
            "tool_reward": [record.reward for record in records],
            "tool_seconds": [record.tool_seconds for record in records],
        }
    )
