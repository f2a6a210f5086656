"""Environments: classes with `reset` and `step`, as agents. One object plays one conversation.

class Guess:
    def __init__(self, top: int = 9): ...

    def reset(self, row, seed):
        self.secret = random.Random(seed).randint(1, self.top)
        return "Guess my number."                    # the prompt; None keeps the row's

    def step(self, action):
        right = action.strip() == str(self.secret)
        return "Wrong, try again.", float(right), right

An observation is a text (a message of the user), a message, a list of messages, or a list of token ids, which the model
reads as they are. The response's score is the sum of the rewards. Classes in Gymnasium's form work too: `reset(*, seed,
options)` gives (observation, info), and `step` five values; `options` is the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from posttrain.conversations.chat import Chat
from posttrain.conversations.conversation import ChatError
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.tools.threads import Threads
from posttrain.errors import UserError

Message = Mapping[str, Any]
Observation = str | Message | Sequence[Message] | Sequence[int] | None
Step = (
    tuple[Observation, float, bool]
    | tuple[Observation, float, bool, Mapping[str, Any]]
    | tuple[Observation, float, bool, bool, Mapping[str, Any]]
)
"""(observation, reward, whether it is over), and facts for reward functions and samples if there are any. Or as in
Gymnasium: (observation, reward, terminated, truncated, facts)."""


Lead = Callable[[Chat, dict[str, Any]], Coroutine[Any, Any, Any]]


class Environment(Protocol):
    """What a class has; methods may be `async def`. Others run in threads, so they may block."""

    takes_token_ids: bool = False
    """Whether `step` is given the model's token ids instead of its text. Optional."""

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begins an episode. Random choices follow from `seed`, so that the run can be repeated."""
        ...

    def step(self, action: Any) -> Step:
        """The model's turn, and what comes of it."""
        ...


def is_environment(source: Any) -> bool:
    return inspect.isclass(source) and all(callable(getattr(source, name, None)) for name in ("reset", "step"))


def play(kind: type, name: str, config: Mapping[str, Any]) -> Lead:
    """The agent that plays this environment, made anew with `config` for each conversation."""
    try:
        inspect.signature(kind).bind(**config)
    except TypeError as error:
        raise UserError(
            f"the environment {name} cannot be made with {dict(config)}: {error}.\n"
            f"  to do:  {KEY}.config has the parameters of its __init__"
        ) from None
    threads = Threads()

    async def call(method: Callable[..., Any], *args: Any) -> Any:
        is_async = inspect.iscoroutinefunction(getattr(method, "func", method))
        made = method(*args) if is_async else await threads.run(method, *args)
        return await made if inspect.isawaitable(made) else made

    async def lead(chat: Chat, row: dict[str, Any]) -> float:
        environment = await call(lambda: kind(**config))
        try:
            observation = await call(_bind_reset(environment.reset, row, chat.seed))
            if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
                observation, facts = observation  # as in Gymnasium
                chat.facts.update(facts)
            _start(chat, observation)
            total, done = 0.0, False
            while not done and not chat.over:
                text = await chat.say()
                assert chat.last is not None
                ids = getattr(environment, "takes_token_ids", False)
                observation, reward, done, *rest = await call(environment.step, chat.last.token_ids if ids else text)
                if rest and not isinstance(rest[0], Mapping):  # as in Gymnasium: terminated, truncated
                    truncated = rest.pop(0)
                    done = bool(done or truncated)
                total += float(reward)
                chat.facts.update(*rest)
                if not done:
                    _tell(chat, observation)
            return total
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return lead


def _bind_reset(reset: Callable[..., Any], row: dict[str, Any], seed: int) -> Callable[[], Any]:
    """`reset(row, seed)`, or `reset(seed=..., options=row)` where its parameters are named as in Gymnasium."""
    named = inspect.signature(reset).parameters
    first = next(iter(named.values()), None)
    if first is None or (first.name != "seed" and first.kind is not first.KEYWORD_ONLY):
        return partial(reset, row, seed)
    given = {"seed": seed, "options": row}
    return partial(reset, **{name: value for name, value in given.items() if name in named})


def _start(chat: Chat, observation: Observation) -> None:
    if isinstance(observation, str):
        chat.start([{"role": "user", "content": observation}], chat.tools)
    elif observation is not None and (messages := _messages(observation)) is not None:
        chat.start(messages, chat.tools)
    elif observation is not None:
        chat.start_ids(observation)  # pyright: ignore (token ids)


def _tell(chat: Chat, observation: Observation) -> None:
    if observation is None:
        raise ChatError("the environment is not over, and `step` gave no observation for the model's next turn")
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else _messages(observation)
    if messages is None:
        chat.tell_ids(observation)  # pyright: ignore (token ids)
        return
    for message in messages:
        chat.tell(message["content"], role=message.get("role", "user"))


def _messages(observation: Message | Sequence[Any]) -> list[Message] | None:
    """Messages of an observation; None for token ids."""
    if isinstance(observation, Mapping):
        return [observation]
    return list(observation) if all(isinstance(one, Mapping) for one in observation) else None
