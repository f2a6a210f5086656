"""Roles of workers, and which of them a configuration needs."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any

from posttrain.algorithms.common import read_setting as setting

WorkerType = type[Any]


class Role(Enum):
    """What a worker is for."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Env = 7
    TeacherModel = 8

    def __str__(self) -> str:
        return _NAMES.get(self, self.name.lower())

    @classmethod
    def from_string(cls, name: str) -> Role:
        for role, known in _NAMES.items():
            if known == name.lower():
                return role
        raise ValueError(f"No Role found for string: {name}")


_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.TeacherModel: "teacher",
}


def _is_mapping_of_roles(config: Any) -> bool:
    return isinstance(config, dict) and any(isinstance(role, Role) for role in config)


def need_reference_policy(config: Any) -> bool:
    """KL in the reward or in the loss. (0.7 also called it with roles to workers.)"""
    if _is_mapping_of_roles(config):
        return Role.RefPolicy in config
    return bool(setting(config.algorithm, "use_kl_in_reward", False) or config.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: Any) -> bool:
    """Whether a model gives the reward."""
    if _is_mapping_of_roles(config):
        return Role.RewardModel in config
    section = setting(setting(config, "reward", None), "reward_model", None) or setting(config, "reward_model", None)
    return bool(setting(section, "enable", False))


def need_critic(config: Any) -> bool:
    """`critic.enable`, or the estimator `gae` where that says nothing."""
    enabled = setting(config.critic, "enable", None)
    if enabled is not None:
        return bool(enabled)
    if str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator)) == "gae":
        return True
    warnings.warn(
        "There is no critic, as algorithm.adv_estimator is not gae; critic.enable=True makes one", stacklevel=2
    )
    return False


def create_rl_dataset(
    data_paths: Any, data_config: Any, tokenizer: Any, processor: Any, is_train: bool = True, max_samples: int = -1
) -> Any:
    """The data set of these files: verl's, or the class of `data.custom_cls`."""
    from verl.utils.dataset.rl_dataset import get_dataset_class

    return get_dataset_class(data_config)(
        data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config, max_samples=max_samples
    )


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """torch's sampler: shuffled by `data.seed` if `data.shuffle`, else in order."""
    import torch
    from torch.utils.data import RandomSampler, SequentialSampler

    if not data_config.shuffle:
        return SequentialSampler(dataset)
    generator = torch.Generator()
    seed = setting(data_config, "seed", None)
    if seed is not None:
        generator.manual_seed(int(seed))
    return RandomSampler(dataset, generator=generator)
