"""The tool `python`: a program that the model wrote, run in the sandbox and nowhere else (docs/sandbox.md)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from posttrain.config.rollout import SandboxConfig
from posttrain.conversations.tools.base import Tool, ToolAnswer
from posttrain.conversations.tools.schema import schema_of
from posttrain.conversations.tools.threads import Threads
from posttrain.cores import usable
from posttrain.errors import UserError
from posttrain.sandbox import Result, Sandbox, SandboxError
from posttrain.sandbox.sandbox import LIMITS


class PythonTool(Tool):
    """One program per core at a time. UserError at once where the kernel does not let programs be isolated."""

    name = "python"
    isolated = False  # the program has a process of its own

    def __init__(self, timeout_s: float | None = None, memory_mb: int | None = None) -> None:
        """Seconds and megabytes of one program; None for the sandbox's own limits."""
        given = {"timeout_s": timeout_s, "memory_mb": memory_mb}
        config = SandboxConfig(**{key: value for key, value in given.items() if value is not None})
        if config.timeout_s <= 0 or config.memory_mb < 16:
            raise UserError("the tool python needs timeout_s above 0 and memory_mb of at least 16.")
        self.at_once, self._config, self._threads = usable(), config, Threads()
        self.schema, self._sandbox = schema_of(self.run, self.name), self._started()

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> ToolAnswer:
        return await self.run(**arguments)

    async def run(self, code: str) -> ToolAnswer:
        """Runs a Python program and gives what it prints, and its error if it has one. Every call starts anew: nothing
        is kept from earlier programs. There is no network.

        Args:
            code: The program; use print() to see results
        """
        if self._sandbox is None:
            self._sandbox = self._started()
        return said(await self._threads.run(self._sandbox.run, code), self._config)

    def shutdown(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def _started(self) -> Sandbox:
        try:
            sandbox = Sandbox(self._config)
            sandbox.start()
            return sandbox
        except SandboxError as error:
            raise UserError(_refusal(error)) from None


def said(result: Result, config: SandboxConfig) -> ToolAnswer:
    """What the model is shown: the output, then the last line of the error, or which limit was passed."""
    lines = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
    why = ""
    if result.status in LIMITS:
        bounds = {"timeout": f" ({config.timeout_s:g} seconds)", "memory": f" ({config.memory_mb} MB)"}
        why = f"The program {LIMITS[result.status]}{bounds.get(result.status, '')} and was ended."
    elif not result.ok:
        errors = result.stderr.strip().splitlines()
        why = errors[-1].strip() if errors else f"The program ended with exit code {result.exit_code}."
    if why:
        lines.append(why)
    text = "\n".join(lines) or "(The program printed nothing. Use print() to see results.)"
    return ToolAnswer(text, error=f"{result.status}: {why}" if why else None)


def _refusal(error: SandboxError) -> str:
    """The sandbox's own words, without its way out for rewards: a tool's programs run nowhere else."""
    lines = [line.rstrip(";") for line in str(error).splitlines() if "reward.sandbox.mode" not in line]
    return "\n".join(["the tool python runs programs in the sandbox and nowhere else, and there is none here:", *lines])
