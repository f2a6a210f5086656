"""Interactions written for verl: classes that answer the model's turns as a user would, named in a YAML file.

interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {...}

A row chooses one in `extra_info.interaction_kwargs.name`. One object of a class serves all conversations of a process;
`start_interaction` opens one, `generate_response` answers a turn, `finalize_interaction` closes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from posttrain.conversations.conversation import ChatError
from posttrain.conversations.tools.lookup import find_named, read_entries
from posttrain.errors import UserError, first_line
from posttrain.spelling import closest


class Interactions:
    """The interactions of a run, by name."""

    def __init__(self, path: str) -> None:
        self.path, self.by_name = path, dict[str, Any]()
        for number, entry in enumerate(read_entries(path, "interactions", "interaction")):
            name, made = _made(entry, f"interaction[{number}] of {path}")
            if name in self.by_name:
                raise UserError(f"two interactions of {path} are called {name}: rows could not choose one.")
            self.by_name[name] = made

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    @property
    def isolated(self) -> bool:
        """Whether they run in worker processes; one class that says no keeps all of them in the trainer."""
        return all(getattr(one, "isolated", True) for one in self.by_name.values())

    def name_of(self, info: Any) -> str:
        """The interaction that a row with this `extra_info` chooses; UserError if there is none."""
        given = info.get("interaction_kwargs") if isinstance(info, Mapping) else None
        name = given.get("name") if isinstance(given, Mapping) else None
        if name is None and len(self.by_name) == 1:
            return self.names[0]
        if name is None:
            raise UserError(
                f"a row names no interaction, and {self.path} has {', '.join(self.by_name)}.\n"
                "  to do:  name one in each row: extra_info.interaction_kwargs.name"
            )
        if name not in self.by_name:
            near = closest(str(name), self.by_name)
            hint = f" Did you mean {near}?" if near else ""
            raise UserError(
                f"rows name the interaction {name} (extra_info.interaction_kwargs.name), and {self.path} has "
                f"{', '.join(self.by_name)}.{hint}"
            )
        return str(name)

    def of(self, info: Any) -> Any:
        return self.by_name[self.name_of(info)]


class InteractionEnvironment:
    """A conversation with an interaction, as an environment."""

    takes_messages = True
    gives_score = False  # as in verl, where reward functions score

    def __init__(self, interactions: Interactions) -> None:
        self._interactions, self._inner = interactions, None
        self._scores = list[float]()

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        info = row.get("extra_info")
        self._inner = self._interactions.of(info)
        self._given = dict((info or {}).get("interaction_kwargs") or {})
        self._id = uuid4().hex
        started = await self._inner.start_interaction(self._id, **self._given)
        self._id = started if isinstance(started, str) else self._id

    async def step(self, messages: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        assert self._inner is not None
        said = await self._inner.generate_response(self._id, messages, **self._given)
        if not isinstance(said, tuple) or len(said) != 4:
            raise ChatError("generate_response gives (should_terminate, response, score, metadata)")
        is_over, response, score, metadata = said
        if score is not None:
            self._scores.append(float(score))
        facts = dict(metadata) if isinstance(metadata, Mapping) else {}
        return response, float(score or 0.0), bool(is_over), facts | {"turn_scores": list(self._scores)}

    async def close(self) -> None:
        if self._inner is None or not hasattr(self._inner, "finalize_interaction"):
            return
        finalize = self._inner.finalize_interaction
        ended = finalize(self._id) if inspect.signature(finalize).parameters else finalize()
        if inspect.isawaitable(ended):
            await ended


def _made(entry: Any, where: str) -> tuple[str, Any]:
    """(its name, the object)."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise UserError(f"{where} has no class_name.")
    class_name = entry["class_name"]
    make: Any = find_named(class_name, "interaction", _could_be)
    missing = [name for name in ("start_interaction", "generate_response") if not _is_async(make, name)]
    if missing:
        raise UserError(f"{where}: {class_name} is no interaction: it has no `async def {missing[0]}`.")
    last = class_name.rpartition(".")[2].rpartition(":")[2]
    name = str(entry.get("name") or last.removesuffix("Interaction").lower() or last.lower())
    try:
        return name, make(config={**(entry.get("config") or {}), "name": name})
    except Exception as error:
        raise UserError(f"{where}: {class_name} cannot be made: {type(error).__name__}: {first_line(error)}") from error


def _could_be(value: Any) -> bool:
    return inspect.isclass(value) and _is_async(value, "generate_response")


def _is_async(kind: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(kind, method, None))
