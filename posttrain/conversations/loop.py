"""The loop over conversations, above any rollout engine. One loop drives tools, agents and environments.

    loop.begin(...)               a conversation starts, led by its agent
    loop.receive(rank, outputs)   the model's turns: their agents continue; gives responses that are whole
    loop.next(wait)               the turns that agents want next, and responses that are whole

Nothing here waits for an engine, and no engine waits for an agent or a tool: each conversation continues when its agent
asks. Its turn is admitted between two decode steps of the others (`others_may_join`). With `in_rounds` conversations
continue together, when every agent has asked or ended and all engines are idle: what is batched together then does not
depend on how long a tool or an environment took, and the run is bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.conversations.agents import Agents
from posttrain.conversations.chat import Chat, Generate, Setup
from posttrain.conversations.conversation import Conversation, Key, TurnRequest
from posttrain.conversations.outcome import Ended, Event
from posttrain.conversations.runner import Runner
from posttrain.rollout.base import Output
from posttrain.rollout.sampling import combine_seeds


class ConversationLoop:
    """The conversations of a run. `agents` gives the agent of a row."""

    def __init__(self, agents: Agents, runner: Runner, setup: Setup, *, in_rounds: bool) -> None:
        self.agents, self.runner, self.setup, self.in_rounds = agents, runner, setup, in_rounds
        self.tokenizer = setup.template.tokenizer
        self._open: dict[Key, Conversation] = {}
        self._chats: dict[Key, Chat] = {}
        self._generating: dict[Key, Generate] = {}
        # What agents did that was not processed yet.
        self._events: dict[Any, Event] = {}
        self._ended: dict[int, list[Key]] = {}
        self.records: dict[Key, Conversation] = {}
        """Of whole responses, until the caller pops them."""

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """Of the tools, as chat templates show them."""
        return self.setup.schemas

    @property
    def has_agents(self) -> bool:
        """Whether agents of the user lead conversations: they may give rewards, fail, and replace prompts."""
        return self.agents.settings.enable

    def begin(
        self,
        key: Key,
        prompt_ids: Sequence[int],
        seed: int,
        how: dict[str, bool],
        row: Mapping[str, Any],
        rank: int = 0,
    ) -> bool:
        """Starts a conversation. True: its first turn is a plain response to its prompt, for the caller to submit."""
        agent, own = self.agents(row), {**row, "uid": key[0], "sample": key[1]}
        conversation = self._open[key] = Conversation(key, list(prompt_ids), seed, how, rank)
        ask = self.runner.ask(key, inline=agent.inline)
        chat = self._chats[key] = Chat(conversation, own.get("raw_prompt") or (), self.setup, ask)
        self.runner.tools.open(key, tool_arguments(row.get("extra_info")))
        first = self.runner.start(key, agent, chat, own)
        if isinstance(first, Generate) and not first.stop:
            self._generating[key] = first
            conversation.begin_request(conversation.main)
            return True
        if first is not None:
            self._events[key] = first
        return False

    def receive(self, rank: int, outputs: Sequence[Output]) -> list[Output]:
        """Hands turns of the model to their agents. Gives the responses that are whole with them."""
        whole = []
        for output in outputs:
            key: Key = output.id[:2]  # a request of a later turn has its number behind
            request, conversation = self._generating.pop(key), self._open[key]
            conversation.rank = rank
            branch = conversation.branches[request.branch]
            conversation.end_request(branch, request.prompt_ids, output, kept=request.kept)
            # An agent may have failed while the model generated: then its end is here already.
            event = self._events.pop(key, None) or self.runner.give(key, output)
            if isinstance(event, Ended):
                whole.append(self._end(key, event))
                continue
            if event is not None:
                self._events[key] = event
            if self.runner.is_inline(key):  # continues in the order in which tools were called
                self._open[key] = self._open.pop(key)
        return whole

    def waits(self) -> bool:
        """Whether a conversation is under way."""
        return bool(self._open)

    @property
    def others_may_join(self) -> bool:
        """Whether turns that are not ready yet are to be admitted between two decode steps of those that are."""
        return not self.in_rounds and len(self._open) > len(self._generating)

    def next(self, *, wait: bool) -> tuple[dict[int, list[TurnRequest]], list[Output]]:
        """(by rank, the turns that come next; responses that are whole). With `wait`, at least one conversation
        continues."""
        self._events |= self.runner.poll()
        while wait and self._must_wait():
            self._events |= self.runner.wait()
        following: dict[int, list[TurnRequest]] = {}
        whole = []
        for key in [key for key in self._open if key in self._events and key not in self._generating]:
            event = self._events.pop(key)
            if isinstance(event, Ended):
                whole.append(self._end(key, event))
            else:
                following.setdefault(self._open[key].rank, []).append(self._request(key, event))
        return following, whole

    def _must_wait(self) -> bool:
        thinking = len(self._open) - len(self._generating) - self.agents.waiting
        ready = len(self._events.keys() - self._generating.keys())
        return ready < thinking if self.in_rounds else bool(thinking) and not ready

    def _request(self, key: Key, wanted: Generate) -> TurnRequest:
        conversation = self._open[key]
        branch, self._generating[key] = conversation.branches[wanted.branch], wanted
        after, number = branch.last_request, conversation.begin_request(branch)
        # Every turn draws with a seed of its own: with the prompt's, turns of equal length would draw alike.
        seed = combine_seeds(conversation.seed, number) if number else conversation.seed
        fresh = wanted.prompt_ids[: len(branch.cached_ids)] != branch.cached_ids
        return TurnRequest(
            key, number, wanted.prompt_ids, wanted.max_tokens, seed, conversation.how, wanted.stop, fresh, after
        )

    def _end(self, key: Key, ended: Ended) -> Output:
        conversation, chat, tools = self._open.pop(key), self._chats.pop(key), self.runner.tools
        conversation.facts, conversation.score, conversation.error = dict(chat.facts), ended.value, ended.error
        last = conversation.rows[-1]
        conversation.reward += tools.reward(key)
        tools.close_conversation(key)
        if conversation.requests:
            self._ended.setdefault(conversation.rank, []).append(key)
        if not last.length and ended.error is None:
            conversation.error = "it ended before the model had said anything"
        self.records[key] = conversation
        reason = "error" if conversation.error else "length" if last.full else last.finish_reason
        if not last.length:  # a response has a token at least: one that was not sampled, so it is not trained
            last.add_observation([self.tokenizer.eos_token_id or 0])
        return last.output(key, reason)

    def ended(self) -> dict[int, list[Key]]:
        """By rank, conversations that have ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended


def tool_arguments(info: Any) -> dict[str, Any]:
    """What a row's `extra_info` gives its tools, by their names: verl's `tools_kwargs[NAME]["create_kwargs"]`."""
    given = info.get("tools_kwargs") if isinstance(info, dict) else None
    if not isinstance(given, dict):
        return {}
    return {name: (own or {}).get("create_kwargs") or {} for name, own in given.items()}
