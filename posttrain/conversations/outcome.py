"""How the agent of a conversation ended, wherever it ran."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.conversations.chat import ChatFull, Generate
from posttrain.conversations.tools.answers import describe_error
from posttrain.texts import well_formed


@dataclass(frozen=True)
class Ended:
    """How a conversation ended: what the agent returned, or why it failed."""

    value: Any = None
    error: str | None = None


Event = Generate | Ended


async def run_to_end(lead: Awaitable[Any]) -> Ended:
    """Awaits an agent to its end, which nothing that it raises can prevent."""
    try:
        return Ended(await lead)
    except ChatFull:
        return Ended()
    except asyncio.CancelledError:
        return Ended(error="it was cancelled")
    except Exception as error:
        return Ended(error=well_formed(f"{describe_error(error)}{_place(error)}"))
    except BaseException as error:  # exit() in an agent ends its conversation, not the run
        return Ended(error=f"it raised {type(error).__name__}")


def describe_late(timeout_s: float) -> str:
    return f"it took longer than {timeout_s:g} seconds between two turns (agent.timeout_s)"


_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent.parent))


def _place(error: BaseException) -> str:
    """Where an error was raised, by file and line: the last place that is not in a library."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            found = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
