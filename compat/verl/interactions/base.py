"""The base of interactions: what a conversation calls, and what it does unless it is overridden."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """A subclass overrides `generate_response`, and what else it needs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Opens a conversation; `kwargs` are its row's `interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the conversation is over, what the model reads next, the score of its turn, anything else)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """For `generate_response` to call."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """The conversation has ended."""
