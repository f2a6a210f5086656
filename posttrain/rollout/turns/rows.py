"""Conversations and the rows of a batch: what each row brings for its tools, and what its turns leave for samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.protocol import DataProto
from posttrain.rollout.turns.loop import Turns
from posttrain.rollout.turns.next_turn import Key


def begin_all(turns: Turns, keys: Sequence[Key], asked: DataProto, rows: DataProto) -> None:
    """A conversation for each row that is asked for. A row may have something for a tool of its own:
    `extra_info["tools_kwargs"][NAME]["create_kwargs"]`."""
    prompts, seeds = asked.non_tensor_batch["raw_prompt_ids"], asked.non_tensor_batch["seed"]
    more = rows.non_tensor_batch.get("extra_info", [None] * len(rows))
    for key, ids, seed, info in zip(keys, prompts, seeds, more, strict=True):
        turns.begin(key, ids, int(seed), dict(asked.meta_info), given_by(info))


def given_by(info: Any) -> dict[str, Any]:
    """What a row's `extra_info` has for its tools, by their names."""
    asked = info.get("tools_kwargs") if isinstance(info, dict) else None
    if not isinstance(asked, dict):
        return {}
    return {name: (own or {}).get("create_kwargs") or {} for name, own in asked.items()}


def facts_for_rewards(turns: Turns, keys: Sequence[Key]) -> dict[Key, dict[str, Any]]:
    """What reward functions find in `extra_info` of these whole responses."""
    records = {key: turns.records[key] for key in keys}
    return {
        key: {"num_turns": record.turns, "tool_calls": len(record.calls), "tool_reward": record.reward}
        for key, record in records.items()
    }


def fields_of_turns(turns: Turns, keys: Sequence[Key]) -> DataProto:
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
