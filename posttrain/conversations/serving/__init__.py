"""A model behind HTTP, in the words of four APIs: `posttrain serve`, and a base URL for each sample of a run.

requests.py            one request and one answer: what all APIs are translated into, and back
openai_chat.py, openai_completions.py, openai_responses.py, anthropic.py, token_ids.py
                       one API each: reads a body, writes an answer, a stream and an error
turns.py               a turn of the model as thinking, words and tool calls, whole or streamed
model.py               answers requests with a rollout engine: prompts, turns, log-probs
sessions.py            who answers a request: an engine, or a session of a run; a repeated request gets its first answer
app.py                 routes, keys, streams, disconnects
process.py             the process that speaks HTTP, beside the engine's; it is replaced when it is lost
wire.py                messages between the two, many in one write
remote.py              an engine of another process, and the other end of that
"""

from __future__ import annotations

from importlib.util import find_spec

from posttrain.errors import UserError


def require_aiohttp() -> None:
    """The HTTP library is an extra: only a server needs it."""
    if find_spec("aiohttp") is None:
        raise UserError("a server needs the package aiohttp.\n  to do:  pip install 'posttrain[serve]'")
