"""What all algorithm files share: their error, reading a setting from any kind of config, sums under a mask."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch

from posttrain.errors import UserError


class AlgorithmError(UserError, ValueError):
    """A mistake in how an algorithm was named, set up or called; the text says what to do about it."""


def unknown_name(what: str, name: object, known: Iterable[str], hint: str = "") -> AlgorithmError:
    """The error for a name that is not offered: lists the known ones and the nearest."""
    names = sorted(known)
    # None is better than a wrong one: `gspo` is not `grpo`, but `grop` is.
    nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.8)
    nearest = nearest or [known for known in names if sorted(known) == sorted(str(name))]
    guess = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return AlgorithmError(f"Unknown {what} `{name}`.{guess} Known: {', '.join(names)}.{' ' + hint if hint else ''}")


def setting(config: Any, name: str, default: Any) -> Any:
    """`config.name` of a settings class, a mapping or a plain object; `default` where it is missing or null."""
    if config is None:
        return default
    if hasattr(config, "get"):
        value = config.get(name, None)
    else:
        value = getattr(config, name, None)
    return default if value is None else value


def keep_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with zeros where the mask is 0, even over NaN or infinity, which a product would let through."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values under the mask; 0 under an empty one."""
    return keep_masked(values, mask).sum() / mask.bool().sum().clamp(min=1)
