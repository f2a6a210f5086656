"""The process of a program: started with limits, and ended with all that it started itself."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Self

from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import AgentSettings
from posttrain.errors import UserError
from posttrain.texts import well_formed

_SHOWN = 300  # characters of a program's last line that its error shows
_READ = 8192


def find_command(settings: AgentSettings) -> list[str]:
    """The words of `agent.program`; UserError if there is no such program."""
    words = shlex.split(settings.program or "")
    if words and words[0] in ("python", "python3") and settings.python:
        words[0] = settings.python
    if not words or shutil.which(words[0]) is None:
        what = f"{KEY}.python={settings.python}" if settings.python else f"{KEY}.program={settings.program!r}"
        raise UserError(
            f"{what}: there is no program {words[0] if words else ''!r} here.\n"
            f'  to do:  give a command that a shell would find, such as {KEY}.program="python agent.py"'
        )
    for word in words[1:]:
        if word.endswith(".py") and not os.path.isfile(word):
            raise UserError(f"{KEY}.program={settings.program!r}: there is no file {word} in {os.getcwd()}.")
    return words


class Program:
    """One run of a program, with a file for its output. Leaving `async with` ends its whole process group."""

    def __init__(
        self, command: list[str], variables: dict[str, str], output: Path, *, memory_gb: float | None = None
    ) -> None:
        self.command, self.variables, self.output, self.memory_gb = command, variables, output, memory_gb

    async def __aenter__(self) -> Self:
        # A file and no pipe: a process that the program leaves behind would hold a pipe open.
        with self.output.open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env={**os.environ, **self.variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a group of its own, with which all that it starts is ended
            )
        if self.memory_gb is not None:
            most = int(self.memory_gb * 2**30)
            with suppress(ProcessLookupError):  # it may have ended already
                resource.prlimit(self.process.pid, resource.RLIMIT_AS, (most, most))
        return self

    async def wait(self) -> int:
        """Its exit status."""
        return await self.process.wait()

    def last_words(self) -> str:
        """The last line of its output, which of a Python program is its error."""
        with self.output.open("rb") as file:
            file.seek(max(0, self.output.stat().st_size - _READ))
            lines = well_formed(file.read().decode("utf-8", "replace")).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:_SHOWN]}" if last else ""

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(asyncio.CancelledError):
            await asyncio.shield(self.process.wait())
