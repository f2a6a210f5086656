"""Front door to the typed classes of the `algorithm` section; they live in `posttrain.config.root`."""

from posttrain.config.root import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgorithmConfig", "KLControlConfig", "RolloutCorrectionConfig"]
