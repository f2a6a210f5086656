"""Where things lie in a house: the tool that knows it, and the reward that asks for it."""

from typing import Any, ClassVar

from posttrain.conversations.tools.base import Tool


class Where(Tool):
    """Each conversation has its own house, given by its row, so the places of things cannot be memorized.

    A function would do too (docs/own_tool.md); the class has the shorter schema, which a small model reads sooner."""

    name = "where"
    schema: ClassVar = {"type": "function", "function": {"name": "where", "parameters": {"properties": {"is": {}}}}}

    def __init__(self) -> None:
        self.houses: dict[Any, dict[str, str]] = {}

    async def open(self, conversation, house=None):
        self.houses[conversation] = house or {}

    async def call(self, conversation, arguments):
        return self.houses[conversation].get(str(arguments.get("is")), "no such thing")

    async def close(self, conversation):
        self.houses.pop(conversation, None)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the last words are the place; what the tool said before them earns nothing."""
    return float(solution_str.rpartition("</tool_response>")[2].strip() == ground_truth)
