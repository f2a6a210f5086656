"""How rows go through a loaded model, as `proof.py` found it to be right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    """What of a model may be used because it gives what transformers' own forward pass gives.

    `packed`: rows end to end, and prompts shared by their responses. `padded`: several rows in one pass, padded on the
    right; otherwise each goes alone. `split_head`: hidden states first, then logits of the wanted ones; otherwise the
    model computes all logits itself. `note` tells the user what is not used, and why.
    """

    packed: bool = False
    padded: bool = False
    split_head: bool = True
    note: str | None = None


def way_of(model: Any) -> Way:
    """The way of a model from `posttrain.models`; one that was not proved goes row by row."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "way", Way())
