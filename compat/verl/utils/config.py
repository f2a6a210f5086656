"""Configurations as objects, and their check."""

from __future__ import annotations

import dataclasses
from typing import Any

from verl._config import BaseConfig

__all__ = ["omega_conf_to_dataclass", "update_dict_with_config", "validate_config"]


def omega_conf_to_dataclass(config: Any, dataclass_type: type[Any] | None = None) -> Any:
    """A section as an object of a class, or of the class that its `_target_` names."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if not isinstance(config, DictConfig | ListConfig | dict | list) and config:
        return config
    if not config:
        return None if dataclass_type is None else dataclass_type()
    if dataclass_type is None:
        if "_target_" not in config:
            raise AssertionError(f"name a class, or give the section its `_target_`; it has {list(config)}")
        from hydra.utils import instantiate

        return instantiate(config, _convert_="partial")
    made = OmegaConf.create(config) if not isinstance(config, DictConfig | ListConfig) else config
    if issubclass(dataclass_type, BaseConfig):
        return dataclass_type(**OmegaConf.to_container(made, resolve=True))  # pyright: ignore
    if not dataclasses.is_dataclass(dataclass_type):
        raise ValueError(f"{dataclass_type} is not a dataclass")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass_type), made))


def update_dict_with_config(dictionary: dict[str, Any], config: Any) -> None:
    """Takes the values that the configuration has for the dict's names."""
    dictionary.update({key: getattr(config, key) for key in dictionary if hasattr(config, key)})


def validate_config(config: Any, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """Checks all settings together, as a run does when it starts; the error lists every problem.

    Files and devices are looked at when the run starts.
    """
    from posttrain.config import load_config
    from verl.utils.py_functional import convert_to_regular_types

    load_config(convert_to_regular_types(config))
    print("[validate_config] All configuration checks passed successfully!")
