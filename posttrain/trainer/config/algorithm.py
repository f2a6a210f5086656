"""Front door to the typed classes of the `algorithm` section; they live in `posttrain.config.algorithm`."""

from posttrain.config.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgorithmConfig", "KLControlConfig", "RolloutCorrectionConfig"]
