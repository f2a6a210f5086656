"""Rewards, tools and agents on all machines of a run's Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from posttrain.config.root import PPOConfig
from posttrain.controller.pool import Workers
from posttrain.conversations.loop import ConversationLoop
from posttrain.conversations.machines import has_workers, spread_conversations
from posttrain.conversations.settings import agent_settings
from posttrain.machines.cluster import other_machines
from posttrain.rewards.pool import RewardPool


def spread_work(
    stack: ExitStack,
    config: PPOConfig,
    pool: RewardPool | None,
    turns: ConversationLoop | None,
    workers: Workers,
    say: Callable[[str], object],
) -> None:
    """Let the other machines compute rewards and run tools and agents as well, as the settings say, until the stack is
    closed."""
    scores = pool if config.reward.on_all_machines else None
    settings = agent_settings(config.actor_rollout_ref.rollout.agent)
    talks = turns if turns is not None and settings.on_all_machines and has_workers(turns) else None
    if not workers.in_ray or (scores is None and talks is None):
        return
    machines = stack.enter_context(other_machines(say))
    if not machines:
        return
    if scores is not None:
        scores.spread(machines, say)
    if talks is not None:
        stack.callback(talks.close)  # tools are asked to end what they started, before their machines are given up
        spread_conversations(talks, config, machines, say)
