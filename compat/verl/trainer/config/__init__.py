"""Sections of settings under verl's names."""

from posttrain.config.root import AlgorithmConfig, FilterGroupsConfig, KLControlConfig
from verl._config import BaseConfig
from verl.trainer.config.rollout_correction import RolloutCorrectionConfig

__all__ = ["AlgoConfig", "BaseConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]


class AlgoConfig(BaseConfig):
    """The section `algorithm`."""

    _section = AlgorithmConfig
