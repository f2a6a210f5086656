"""verl's address of the settings of algorithms."""

from verl._missing import not_given
from verl.trainer.config import AlgoConfig, BaseConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "BaseConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
__getattr__ = not_given(__name__)
