"""The loop over conversations, above any rollout engine. One loop drives tools, agents and environments.

    loop.begin(...)               a conversation starts, led by its agent
    loop.receive(rank, outputs)   the model's turns: their agents continue; gives responses that are whole
    loop.next(wait)               the turns that agents want next, and responses that are whole

`begin_conversations` starts one for each row of a batch; `join_rows` gives the batch of those that have ended.

Nothing here waits for an engine, and no engine waits for an agent or a tool: each conversation continues when its agent
asks. Its turn is admitted between two decode steps of the others (`others_may_join`). With `in_rounds` conversations
continue together, when every agent has asked or ended and all engines are idle: what is batched together then does not
depend on how long a tool or an environment took, and the run is bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from posttrain import pulse
from posttrain.conversations.agents import Agents
from posttrain.conversations.chat import Chat, Ended, Event, Generate, Setup
from posttrain.conversations.conversation import ChatError, Conversation, Key, TurnRequest, request_number
from posttrain.conversations.runner import Runner
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.rollout.sampling import combine_seeds


class ConversationLoop:
    """The conversations of a run. `agents` gives the agent of a row."""

    def __init__(self, agents: Agents, runner: Runner, setup: Setup, *, in_rounds: bool) -> None:
        self.agents, self.runner, self.setup, self.in_rounds = agents, runner, setup, in_rounds
        self.tokenizer = setup.template.tokenizer
        self.lane = pulse.Lane("agents", "agents, tools")
        self._open: dict[Key, Conversation] = {}
        # Turns that the engines generate, and the branches that they are for, by the numbers of their requests: a
        # program may await several at once.
        self._generating: dict[Key, dict[int, tuple[Generate, int]]] = {}
        self._streams: dict[int, dict[Hashable, Callable[[Output], None]]] = {}
        # What agents did that was not processed yet.
        self._events: dict[Any, list[Event]] = {}
        self._ended: dict[int, list[Key]] = {}
        self.records: dict[Key, Conversation] = {}
        """Of whole responses, until the caller pops them."""

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """Of the tools, as chat templates show them."""
        return self.setup.schemas

    @property
    def unrepeatable(self) -> set[str]:
        """Tools whose calls must not be made a second time."""
        return {name for name, tool in self.runner.tools.tools.items() if not tool.repeatable}

    @property
    def has_agents(self) -> bool:
        """Whether agents of the user lead conversations: they may give rewards, fail, and replace prompts."""
        return self.agents.settings.enable

    @property
    def changes_prompts(self) -> bool:
        """Whether rows of a sample may have other prompts than the data's."""
        return self.has_agents or self.setup.thinking is not None

    def close(self) -> None:
        """Ends agents, then tools. Nothing may call them afterwards; closing again does nothing."""
        self.runner.close()
        self.runner.tools.close()

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
        request = partial(self.runner.request, key)
        chat = Chat(conversation, own.get("raw_prompt") or (), self.setup, ask, request)
        self.runner.tools.open(key, tool_arguments(row.get("extra_info")))
        first = self.runner.start(key, agent, chat, own)
        if isinstance(first, Generate) and not first.stop:
            self._generating[key] = {conversation.begin_request(conversation.main): (first, 0)}
            return True
        if first is not None:
            self._events[key] = [first]
        self._note_lane()
        return False

    def receive(self, rank: int, outputs: Sequence[Output]) -> list[Output]:
        """Hands turns of the model to their agents. Gives the responses that are whole with them."""
        whole = []
        for output in outputs:
            key: Key = output.id[:2]  # a request of a later turn has its number behind
            conversation, pending = self._open[key], self._generating[key]
            self._streams.get(rank, {}).pop(output.id, None)
            request, number = pending.pop(request_number(output.id))
            conversation.rank = rank
            branch = conversation.branches[number]
            # An agent may have failed while the model generated: then its end is here already.
            end = _end_of(self._events.get(key, ()))
            if end is not None and request.branch is None:  # no client of the program gets it
                conversation.give_up(branch)
            else:
                conversation.end_request(branch, request.prompt_ids, output, kept=request.kept)
            if pending:
                self.runner.give(key, request, output)
                continue
            del self._generating[key]
            event = end or self.runner.give(key, request, output)
            if isinstance(event, Ended):
                self._events.pop(key, None)
                whole.append(self._end(key, event))
                continue
            if event is not None:
                self._events[key] = [event]
            if self.runner.is_inline(key):  # continues in the order in which tools were called
                self._open[key] = self._open.pop(key)
        self._note_lane()
        return whole

    @property
    def _thinking(self) -> int:
        """Conversations that do not wait for the model, whether their agents are at work or ready."""
        return len(self._open) - len(self._generating) - self.agents.waiting

    @property
    def _ready(self) -> int:
        """Conversations whose agents want a turn that was not submitted yet, or have ended."""
        return len(self._events.keys() - self._generating.keys())

    def _note_lane(self) -> None:
        # In rounds an agent may be ready long before its turn is submitted: that time is not spent in agents or tools.
        self.lane.note(self._thinking > self._ready + self.runner.unread)

    def streams(self, rank: int) -> list[Hashable]:
        """Requests of a rank whose clients read them while they are sampled; `show` takes what they have so far."""
        return list(self._streams.get(rank, ()))

    def show(self, rank: int, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if (on_progress := self._streams.get(rank, {}).get(output.id)) is not None:
                on_progress(output)

    def waits(self) -> bool:
        """Whether a conversation is under way."""
        return bool(self._open)

    @property
    def is_at_work(self) -> bool:
        """Whether an agent or a tool may do something before an engine gives another turn."""
        return self.runner.is_at_work

    @property
    def silent_s(self) -> float:
        """For how many seconds an agent that awaits a turn may still ask for another one, unannounced: a program may,
        within its time limit."""
        return self.agents.settings.timeout_s if self._open and self.agents.settings.uses_http else 0.0

    @property
    def others_may_join(self) -> bool:
        """Whether turns that are not ready yet are to be admitted between two decode steps of those that are."""
        asks_again = self.agents.settings.uses_http  # a program may want a turn while it awaits another
        return not self.in_rounds and (bool(self._open) if asks_again else len(self._open) > len(self._generating))

    def next(self, *, wait: bool) -> tuple[dict[int, list[TurnRequest]], list[Output]]:
        """(by rank, the turns that come next; responses that are whole). With `wait`, at least one conversation
        continues."""
        self._add_events(self.runner.poll())
        following: dict[int, list[TurnRequest]] = {}
        whole = []
        rejected = True
        while rejected:
            while wait and self._must_wait():
                self._add_events(self.runner.wait())
            wanted = self._take_wanted(whole)
            rejected = [key for key, one in wanted if not self._admit(key, one, following)]
            # An agent whose turn was rejected may want another one.
            rejected = rejected and wait and not following and not whole
        self._note_lane()
        return following, whole

    def _take_wanted(self, whole: list[Output]) -> list[tuple[Key, Generate]]:
        """The turns that agents want, by conversation. Those that have ended are added to `whole`."""
        found = []
        for key in [key for key in self._open if key in self._events]:
            end = _end_of(self._events[key])
            if end is None:
                # Turns that are wanted at once are numbered by their tokens, not by the order in which they came.
                wanted = [one for one in self._events.pop(key) if isinstance(one, Generate)]
                found += [(key, one) for one in sorted(wanted, key=lambda one: one.prompt_ids)]
            elif key not in self._generating:
                del self._events[key]
                whole.append(self._end(key, end))
        return found

    def _add_events(self, found: Mapping[Any, list[Event]]) -> None:
        for key, events in found.items():
            self._events.setdefault(key, []).extend(events)

    def _must_wait(self) -> bool:
        return self._ready < self._thinking if self.in_rounds else bool(self._thinking) and not self._ready

    def _admit(self, key: Key, wanted: Generate, following: dict[int, list[TurnRequest]]) -> bool:
        """Adds the request for a turn to its rank's; False if the conversation has no room for it, as its agent is
        told."""
        conversation, pending = self._open[key], self._generating.get(key, {})
        prompt, most = wanted.prompt_ids, wanted.max_tokens
        if wanted.branch is None:
            try:
                branch = conversation.branch_behind(
                    prompt, self.setup.limits, {number for _, number in pending.values()}
                )
            except ChatError as error:
                self.runner.give(key, wanted, error)
                return False
            most = min(self.setup.limits.response - branch.length, most)
        else:
            branch = conversation.branches[wanted.branch]
        after, number = branch.last_request, conversation.begin_request(branch)
        self._generating[key] = {**pending, number: (wanted, branch.number)}
        # Every turn draws with a seed of its own: with the prompt's, turns of equal length would draw alike.
        seed = combine_seeds(conversation.seed, number) if number else conversation.seed
        fresh = prompt[: len(branch.cached_ids)] != branch.cached_ids
        made = TurnRequest(key, number, prompt, most, seed, conversation.how, wanted.stop, fresh, after)
        if wanted.on_progress is not None:
            self._streams.setdefault(conversation.rank, {})[made.id] = wanted.on_progress
        following.setdefault(conversation.rank, []).append(made)
        return True

    def _end(self, key: Key, ended: Ended) -> Output:
        conversation, tools = self._open.pop(key), self.runner.tools
        conversation.score, conversation.error = ended.value, ended.error
        last = conversation.rows[-1]
        conversation.reward += tools.reward(key)
        tools.close_conversation(key)
        if conversation.requests:
            self._ended.setdefault(conversation.rank, []).append(key)
        if not last.length and ended.error is None:
            conversation.error = "it ended before the model had said anything"
        self.records[key] = conversation
        reason = "error" if conversation.error else conversation.stopped_by or last.finish_reason
        if not last.length:  # a response has a token at least: one that was not sampled, so it is not trained
            last.add_observation([self.tokenizer.eos_token_id or 0])
        return last.output(key, reason)

    def ended(self) -> dict[int, list[Key]]:
        """By rank, conversations that have ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended


def _end_of(events: Sequence[Event]) -> Ended | None:
    return next((one for one in events if isinstance(one, Ended)), None)


def tool_arguments(info: Any) -> dict[str, Any]:
    """What a row's `extra_info` gives its tools, by their names: verl's `tools_kwargs[NAME]["create_kwargs"]`."""
    given = info.get("tools_kwargs") if isinstance(info, dict) else None
    if not isinstance(given, dict):
        return {}
    return {name: (own or {}).get("create_kwargs") or {} for name, own in given.items()}


ROW_FIELDS = ("raw_prompt", "data_source", "ground_truth", "extra_info", "index")
"""Fields of a row that its agent and its tools may read."""


def begin_conversations(
    loop: ConversationLoop, keys: Sequence[Key], asked: DataProto, rows: DataProto, ranks: Mapping[Any, int]
) -> list[int]:
    """Starts a conversation for each row. Gives the rows whose first turn the caller submits, with their prompts; the
    others' agents ask for theirs. `ranks` has the rank of each prompt: its conversations share its prefix there."""
    prompts, seeds = asked.non_tensor_batch["raw_prompt_ids"], asked.non_tensor_batch["seed"]
    fields = {name: rows.non_tensor_batch[name] for name in ROW_FIELDS if name in rows.non_tensor_batch}
    to_submit = []
    for number, (key, ids, seed) in enumerate(zip(keys, prompts, seeds, strict=True)):
        row = {name: values[number] for name, values in fields.items()}
        if loop.begin(key, ids, int(seed), dict(asked.meta_info), row, ranks[key[0]]):
            to_submit.append(number)
    return to_submit


def reward_info(record: Conversation) -> dict[str, Any]:
    """What reward functions find in `extra_info` of a whole response."""
    counts = {"num_turns": record.turns, "tool_calls": len(record.calls), "tool_reward": record.reward}
    given = {"turn_rewards": [reward for _, reward in record.turn_rewards]} if record.turn_rewards else {}
    return {**record.facts, **given, **counts, "num_rows": len(record.rows)}


def join_rows(loop: ConversationLoop, samples: DataProto, ended: Sequence[Output]) -> DataProto:
    """The batch of these conversations, which have ended so: a row for each branch, the rows of a sample together."""
    records = [loop.records.pop(output.id) for output in ended]
    branches = [(record, branch) for record in records for branch in record.rows]
    counts = [len(record.rows) for record in records]
    rows = samples if len(branches) == len(samples) else samples[np.repeat(np.arange(len(samples)), counts)]
    outputs = []
    for record, output in zip(records, ended, strict=True):
        outputs += [branch.output(output.id, branch.finish_reason) for branch in record.rows[:-1]] + [output]
    pad = loop.tokenizer.pad_token_id
    rows.union(to_batch([list(branch.prompt_ids) for _, branch in branches], outputs, pad))
    if "prompt" in rows.non_tensor_batch:
        texts = np.array(rows.non_tensor_batch["prompt"], dtype=object)
        for number, (_, branch) in enumerate(branches):
            if branch.own_prompt:
                texts[number] = loop.tokenizer.decode(list(branch.prompt_ids), skip_special_tokens=False)
        rows.non_tensor_batch["prompt"] = texts
    parents = [record.parent_row(branch) for record, branch in branches]
    fields = {
        "num_turns": [record.turns for record, _ in branches],
        "tool_calls": [record.calls for record, _ in branches],
        "tool_reward": [record.reward for record, _ in branches],
        "call_seconds": [record.call_seconds for record, _ in branches],
        "turn_rewards": [record.turn_rewards for record, _ in branches],
        "branch": [branch.number for _, branch in branches],
        "parent": [parent for parent, _ in parents],
        "fork": [fork for _, fork in parents],
        "turn_ends": [branch.turn_ends for _, branch in branches],
    }
    return rows.union(DataProto.from_dict(non_tensors=fields))
