"""The base of tools: a schema, and `create`, `execute`, `calc_reward`, `release` for one conversation."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A subclass overrides what it needs."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(tool_schema or self.get_openai_tool_schema())
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """The tool as chat templates see it."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """(the name of a conversation's instance, what the tool says at its start)."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """(what the tool answers, a reward for the step, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """The conversation has ended."""
