"""verl's address of the settings of algorithms."""

from verl.trainer.config import AlgoConfig, BaseConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "BaseConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
