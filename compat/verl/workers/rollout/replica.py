"""What a model wrote, as agent loops get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TokenOutput:
    """One turn of the model."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
