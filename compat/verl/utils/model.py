"""Small facts about models and their inputs."""

from __future__ import annotations

from typing import Any

import torch


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only; 0 in the padding on the left."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> torch.Tensor:
    """A mask of rows with random padding on both sides, for tests."""
    assert 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 and 0 <= max_ratio_of_left_padding < 1
    rows, width = input_ids.shape
    most, left = int(width * max_ratio_of_valid_token), int(width * max_ratio_of_left_padding)
    least = max(1, int(width * min_ratio_of_valid_token))
    assert least <= most and most + left <= width, "real tokens and the padding on their left do not fit into a row"
    starts = torch.randint(0, left + 1, (rows, 1))
    ends = starts + torch.randint(least, most + 1, (rows, 1))
    places = torch.arange(width)
    return ((places >= starts) & (places < ends)).long().to(input_ids.device)


def get_model_size(model: torch.nn.Module, scale: str = "auto") -> tuple[float, str]:
    """(parameters, unit): in billions (B), millions (M), thousands (K) or as they are."""
    count = sum(parameter.numel() for parameter in model.parameters())
    sizes = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1}
    unit = next(name for name, size in sizes.items() if count > size or not name) if scale == "auto" else scale
    if unit not in sizes:
        raise NotImplementedError(f"Unknown scale {scale}: it is B, M, K, an empty text or auto")
    return count / sizes[unit], unit


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    count, unit = get_model_size(model)
    print(f"{name or type(model).__name__} contains {count:.2f}{unit} parameters")


def update_model_config(module_config: Any, override_config_kwargs: dict[str, Any]) -> None:
    """Sets attributes, those of nested dicts too."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, dict):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)
