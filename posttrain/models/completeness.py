"""Checks that a folder holds exactly the weights of the model that its `config.json` describes, all finite.

transformers initializes missing weights randomly and drops unknown ones, and only prints a table of them. With a
`config.json` of another model, training would go on without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from posttrain.models.paths import ModelError

# Buffers that old folders store and newer code computes, and value heads of other trainers.
_NO_WEIGHTS = re.compile(
    r"(\.|^)(masked_bias|inv_freq|position_ids|attn\.bias|attention\.bias)$|^(v_head|value_head)\."
)


class WeightsError(ModelError):
    """The folder's weights do not match its config.json."""


def check_weights(
    report: Mapping[str, Any], what: str, *, setting: str | None = None, ignore: Callable[[str], bool] | None = None
) -> None:
    """Reject weights that are missing, unknown, or of another shape, by transformers' loading report.

    `ignore` selects names that do not matter here: those of an unused head. `setting` is the key that lets a run
    continue nevertheless.
    """
    missing = [name for name in sorted(report["missing_keys"]) if not (ignore and ignore(name))]
    others = [name for name in sorted(report["unexpected_keys"]) if not _NO_WEIGHTS.search(name)]
    others = [name for name in others if not (ignore and ignore(name))]
    shapes = [_shapes(*entry) for entry in sorted(report["mismatched_keys"])]
    problems = [
        f"it lacks weights, which would begin random ({few(missing)})" if missing else "",
        f"it holds weights that the model has no place for ({few(others)})" if others else "",
        f"weights have another shape ({few(shapes)})" if shapes else "",
    ]
    if not any(problems):
        return
    advice = "Is its config.json that of these weights, and is nothing wrong laid over it (override_config)?"
    if setting is not None:
        advice += f" {setting}=True trains nevertheless."
    wrong = "; ".join(words for words in problems if words)
    raise WeightsError(f"{what}: the folder does not hold the weights of this model: {wrong}.\n  {advice}")


def _shapes(name: str, stored: Any, wanted: Any) -> str:
    return f"{name} is {tuple(stored)} there and {tuple(wanted)} by config.json"


def is_outside_decoder(model: Any) -> Callable[[str], bool]:
    """Return a test for names outside the decoder: those of a head that is unused, or not there yet."""
    prefix = f"{model.base_model_prefix}."
    return lambda name: not name.startswith(prefix)


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors that hold NaN or infinity."""
    return [name for name, weight in named if weight.is_floating_point() and not bool(torch.isfinite(weight).all())]


def few(names: list[str], most: int = 3) -> str:
    """Return `a, b and 5 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
