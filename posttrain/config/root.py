"""The whole tree of a PPO-family run."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.actor import ActorConfig, RefConfig
from posttrain.config.algorithm import AlgorithmConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.data import DataConfig
from posttrain.config.model import ModelConfig
from posttrain.config.reward import CustomRewardConfig, RewardConfig
from posttrain.config.reward_model import RewardModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.schema import Section
from posttrain.config.trainer import TrackingConfig, TrainerConfig


@dataclass
class ActorRolloutRefConfig(Section):
    """The policy in its three roles: trained actor, rollout, frozen reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass
class PPOConfig(Section):
    """Everything that `posttrain.trainer.main_ppo` can be told."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
