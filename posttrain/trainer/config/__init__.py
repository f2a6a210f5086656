"""The YAML tree that Hydra composes; `python -m posttrain.config.generate` makes it from the settings classes."""
