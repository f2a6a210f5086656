"""Environments of an OpenEnv server: `actor_rollout_ref.rollout.agent=openenv:http://127.0.0.1:8000`.

A conversation is one session of the server. What the model says becomes the action: the text itself where the action
has one field, otherwise the JSON object in it. The package is imported in the worker processes of agents alone.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from posttrain.errors import UserError

PREFIX = "openenv:"
_WAIT_S = 5.0


def check_server(name: str) -> str:
    """The address of a server that answers; UserError if the package or the server is missing."""
    url = name.removeprefix(PREFIX).rstrip("/")
    if importlib.util.find_spec("openenv") is None:
        raise UserError(
            f"the environment {name} needs the package openenv.\n  to do:  pip install 'posttrain[openenv]'"
        )
    if not url.startswith(("http://", "https://")):
        raise UserError(f"the environment {name} has no address.\n  to do:  {PREFIX}http://HOST:PORT")
    try:
        read_schema(url)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"no OpenEnv server answers at {url}: {reason}.\n"
            "  to do:  start it, for example: uvicorn my_env:app --port 8000"
        ) from None
    return url


def read_schema(url: str) -> dict[str, Any]:
    """The JSON schemas of the server's action and observation."""
    with urllib.request.urlopen(f"{url}/schema", timeout=_WAIT_S) as answer:
        return json.load(answer)


class OpenEnv:
    """One session. `action_field` and `observation_field` name what the model's text is, and what it reads, where the
    schema leaves a choice."""

    imports = "openenv.core"

    def __init__(self, url: str, action_field: str | None = None, observation_field: str | None = None) -> None:
        self.url, self.action_field, self.observation_field = url, action_field, observation_field
        self._client: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        from openenv.core import GenericEnvClient  # pyright: ignore

        properties = read_schema(self.url).get("action", {}).get("properties", {})
        self._fields = {name: one for name, one in properties.items() if name != "metadata"}
        self._client = GenericEnvClient(base_url=self.url)
        await self._client.__aenter__()
        result = await self._client.reset(seed=seed)
        return self._show(result.observation) or None  # without one the row's prompt stays

    async def step(self, action: str) -> tuple[str, float, bool]:
        try:
            result = await self._client.step(self._read(action))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            fields = ", ".join(f"{name} ({one.get('type', 'any')})" for name, one in self._fields.items())
            return f"This is no action. It has: {fields}.", 0.0, False
        return self._show(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)

    def _read(self, text: str) -> dict[str, Any]:
        """The action of a text; ValueError if it is none."""
        field = self.action_field or (next(iter(self._fields)) if len(self._fields) == 1 else None)
        if field is None:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
            return found if isinstance(found, dict) else {}
        kind = self._fields.get(field, {}).get("type")
        value = {"integer": int, "number": float, "boolean": json.loads}.get(kind, str)(text.strip())
        return {field: value}

    def _show(self, observation: Mapping[str, Any]) -> str:
        if self.observation_field:
            return str(observation.get(self.observation_field, ""))
        shown = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 == len(shown) else json.dumps(shown) if shown else ""
