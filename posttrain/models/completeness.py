"""Whether a folder held the weights of the model that was made from its `config.json`: all of them, and no others.

transformers fills what is missing with random numbers and leaves out what it has no place for, and says so in a table
only. A `config.json` of another model would then be trained without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.models.errors import ModelError
from posttrain.models.finite import few

# Tables that old folders hold and newer code computes, and value heads beside a language model: no weights of it.
_NO_WEIGHTS = re.compile(
    r"(\.|^)(masked_bias|inv_freq|position_ids|attn\.bias|attention\.bias)$|^(v_head|value_head)\."
)


class WeightsError(ModelError):
    """The folder's weights are not those of its config.json."""


def check_weights(
    report: Mapping[str, Any], what: str, *, setting: str | None = None, beside: Callable[[str], bool] | None = None
) -> None:
    """Refuses weights that are missing, without a place, or of another shape, by transformers' loading report.

    `beside` tells names that do not matter here: those of a head that is not used. `setting` is the key that lets a run
    go on nevertheless.
    """
    missing = [name for name in sorted(report["missing_keys"]) if not (beside and beside(name))]
    others = [name for name in sorted(report["unexpected_keys"]) if not _NO_WEIGHTS.search(name)]
    others = [name for name in others if not (beside and beside(name))]
    shapes = [_shapes(*entry) for entry in sorted(report["mismatched_keys"])]
    told = [
        f"it lacks weights, which would begin random ({few(missing)})" if missing else "",
        f"it holds weights that the model has no place for ({few(others)})" if others else "",
        f"weights have another shape ({few(shapes)})" if shapes else "",
    ]
    if not any(told):
        return
    advice = "Is its config.json that of these weights, and is nothing wrong laid over it (override_config)?"
    if setting is not None:
        advice += f" {setting}=True trains nevertheless."
    wrong = "; ".join(words for words in told if words)
    raise WeightsError(f"{what}: the folder does not hold the weights of this model: {wrong}.\n  {advice}")


def _shapes(name: str, stored: Any, wanted: Any) -> str:
    return f"{name} is {tuple(stored)} there and {tuple(wanted)} by config.json"


def outside(model: Any) -> Callable[[str], bool]:
    """Names outside the decoder: of a head that is not used, or not yet there."""
    prefix = f"{model.base_model_prefix}."
    return lambda name: not name.startswith(prefix)
