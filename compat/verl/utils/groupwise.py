"""Groups of rows: their numbers, means and deviations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_torch_index(index: Any, device: Any = None) -> torch.Tensor:
    """(rows,) the number of each row's group, from names of any kind."""
    names = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index).reshape(-1)
    numbers = np.unique(names.astype(str) if names.dtype == object else names, return_inverse=True)[1]
    return torch.from_numpy(numbers).to(device or "cpu")


def group_mean_std(scores: torch.Tensor, gidx: torch.Tensor, eps: float = 1e-6, device: Any = None) -> Any:
    """(means, deviations, sizes) by group; a group of one has mean 0 and deviation 1."""
    scores = scores.reshape(-1).float()
    groups = gidx.reshape(-1).to(scores.device)
    sizes = torch.bincount(groups).to(scores.dtype)
    mean = torch.bincount(groups, weights=scores) / sizes.clamp(min=1)
    squares = torch.bincount(groups, weights=(scores - mean[groups]) ** 2)
    deviation = (squares / (sizes - 1).clamp(min=1)).clamp(min=eps).sqrt()
    several = sizes > 1
    made = torch.where(several, mean, 0.0), torch.where(several, deviation, 1.0), sizes
    return tuple(part.to(device or scores.device, scores.dtype) for part in made)
