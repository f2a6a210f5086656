"""Responses of several turns on their way to the rewards: an agent may have given a reward itself, or have failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.config.agent import KEY
from posttrain.conversations.batch import reward_info
from posttrain.conversations.conversation import Conversation
from posttrain.conversations.loop import ConversationLoop
from posttrain.protocol import DataProto
from posttrain.rewards.outcomes import FailureWatch, read_result
from posttrain.rewards.types import RewardResult
from posttrain.rollout.base import Output
from posttrain.trainer.ppo.reward import RewardManager

NO_REWARD = "it gave no reward, and there is no reward function for these rows"


def feed_turns(
    rewards: RewardManager, loop: ConversationLoop, ended: Sequence[Output], *, failed: float = 0.0, alone: bool = False
) -> None:
    """Whole responses are scored by their agents, or go to the reward function. `failed` is the score where an agent
    failed; `alone` says that agents alone can score."""
    by_agent: list[tuple[Any, RewardResult]] = []
    left: list[Output] = []
    for output in ended:
        result = score_by_agent(loop.records[output.id], failed, alone=alone and loop.has_agents)  # pyright: ignore
        if result is None:
            left.append(output)
        else:
            by_agent.append((output.id, result))
    if by_agent:
        rewards.settle(by_agent)
    facts: dict[Any, Any] = {output.id: reward_info(loop.records[output.id]) for output in left}  # pyright: ignore
    marks: dict[Any, Any] = {output.id: output.written for output in left}
    rewards.feed([(output.id, output.token_ids) for output in left], facts, marks)  # pyright: ignore


def score_by_agent(record: Conversation, failed: float, *, alone: bool = False) -> RewardResult | None:
    """What a conversation earned by its agent; None where that is left to the reward function."""
    error = record.error
    if error is None and record.score is None:
        if not alone:
            return None
        error = NO_REWARD
    if error is None:
        score, parts, error = read_result(record.score)
        if error is None:
            return RewardResult(score, parts)
    return RewardResult(failed, error=f"agent: {error}")


class AgentWatch:
    """Ends the run when agents fail on every response."""

    def __init__(self) -> None:
        self._watch = FailureWatch("agent", KEY, "correct it; `posttrain generate` shows what it makes of a prompt")

    def look(self, records: Sequence[Conversation], rows: DataProto, tokenizer: Any) -> list[list[int]]:
        """The prompts of a batch, as agents left them; rows whose prompt is another have its text."""
        self._watch.check([record.error and f"agent: {record.error}" for record in records])
        fields = rows.non_tensor_batch
        if "prompt" in fields:
            changed = [n for n, record in enumerate(records) if record.own_prompt]
            texts = np.array(fields["prompt"], dtype=object)
            for number in changed:
                texts[number] = tokenizer.decode(list(records[number].prompt_ids), skip_special_tokens=False)
            fields["prompt"] = texts
        return [list(record.prompt_ids) for record in records]
