"""The process of a program: started with limits and addresses, and ended with all that it started itself."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import shlex
import shutil
import signal
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from posttrain.conversations.serving.requests import ApiError
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import AgentSettings
from posttrain.errors import UserError
from posttrain.texts import well_formed

KEY_VARIABLE = "POSTTRAIN_API_KEY"
_SHOWN = 300  # characters of a program's last line that its error shows
_READ = 8192
_MOST_OUTPUT = 64 * 2**20  # bytes of a program's output that are kept on the disk
_TRIM_S = 1.0


class ProgramFailed(Exception):
    """A program that ended with an error; the message is for its author."""


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


def addresses(base: str, key: str) -> dict[str, str]:
    """Variables that clients read: where the model is, and their key."""
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        KEY_VARIABLE: key,
    }


class Program:
    """One run of a program, with a file for its output. Leaving `async with` ends its whole process group."""

    def __init__(
        self, command: list[str], variables: dict[str, str], output: Path, *, memory_gb: float | None = None
    ) -> None:
        self.command, self.variables, self.output, self.memory_gb = command, variables, output, memory_gb

    async def __aenter__(self) -> Self:
        # A file and no pipe: a process that the program leaves behind would hold a pipe open.
        with self.output.open("ab") as output:  # appended to, so that what is written goes on where it was emptied
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
        """Its exit status. Meanwhile its output is emptied where it grows: only its end is read."""
        ended = asyncio.ensure_future(self.process.wait())
        try:
            while not (await asyncio.wait([ended], timeout=_TRIM_S))[0]:
                if self.output.stat().st_size > _MOST_OUTPUT:
                    os.truncate(self.output, 0)
            return ended.result()
        finally:
            ended.cancel()

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


def describe_status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def parse_reward(body: Any) -> float:
    """The number of `0.5` or `{"reward": 0.5}`; ApiError otherwise."""
    value = body.get("reward") if isinstance(body, dict) else body
    wrong = ApiError('A reward is a finite number: {"reward": 0.5}.', param="reward")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong
    try:
        reward = float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise wrong from None
    if not math.isfinite(reward):
        raise wrong
    return reward


def read_reward(path: Path) -> float:
    """The reward that a program wrote into its file."""
    try:
        return parse_reward(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, ApiError, OSError, RecursionError):
        raise ProgramFailed("POSTTRAIN_REWARD_FILE has no finite number in it") from None


class Slots:
    """Room for so many programs at once. Whoever waits is counted as waiting until the moment in which a place is free,
    so that turns in rounds (`loop.py`) depend on no clock."""

    def __init__(self, most: int) -> None:
        self.free, self._queue = most, deque[asyncio.Future[None]]()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def take(self) -> None:
        if self.free:
            self.free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in self._queue:
                self._queue.remove(place)
            else:
                self.give_back()
            raise

    def give_back(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self.free += 1
