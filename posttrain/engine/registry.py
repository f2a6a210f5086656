"""From a configuration to a train engine: the layout that it asks for, and the registered class that builds it."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.config.train_engines import RL, SUPERVISED, EngineKeys, train_engine
from posttrain.engine.base import EngineLayout, EngineSettings, TrainEngine
from posttrain.engine.heads import Head
from posttrain.engine.ranks import world_size


def policy_layout(config: PPOConfig) -> EngineLayout:
    """Of the policy and its reference."""
    actor = config.actor_rollout_ref.actor
    return _layout(RL, actor, actor.fsdp_config.fsdp_size, actor.ulysses_sequence_parallel_size)


def critic_layout(config: PPOConfig) -> EngineLayout:
    """Of the critic, which has the actor's engine."""
    critic = config.critic
    sizes = critic.fsdp_config.fsdp_size, critic.ulysses_sequence_parallel_size
    return _layout(RL, config.actor_rollout_ref.actor, *sizes)


def supervised_layout(config: Any) -> EngineLayout:
    """Of a run of supervised training, or of a reward model."""
    return _layout(SUPERVISED, config.fsdp, config.fsdp.fsdp_size, config.fsdp.ulysses_sequence_parallel_size)


def _layout(keys: EngineKeys, section: Any, fsdp_size: int, sequence_size: int) -> EngineLayout:
    own = train_engine(section.strategy, keys).own_settings
    return EngineLayout(section.strategy, keys, fsdp_size, sequence_size, getattr(section, own) if own else {})


def engine_class(layout: EngineLayout) -> type[TrainEngine]:
    return train_engine(layout.strategy, layout.keys).load("engine")


def loading_device(layout: EngineLayout, device: torch.device) -> torch.device:
    """Where a model is loaded to: engines that hold a part of it take that part from host memory."""
    in_parts = world_size() > 1 or train_engine(layout.strategy, layout.keys).loads_on_host
    return torch.device("cpu") if in_parts else device


def build_train_engine(
    module: torch.nn.Module, settings: EngineSettings, layout: EngineLayout, head: Head | None = None
) -> TrainEngine:
    """The engine of `layout.strategy` over a loaded model."""
    return engine_class(layout).create(module, settings, layout, head)
