"""Experience turns prompts into scored samples, for training, validation and greedy baselines.

    rows = experience.ask(prompts, n)    requests go to the rollout, each known by (uid, sample)
    experience.wait_for_responses(rows)  rows with their responses; each went to the rewards when it ended
    experience.wait_for_scores(rows)     rows with their scores
    experience.complete(rows)            both, and the reward model's

Any number of batches may be under way; a prompt may give any number of rows. There are no callbacks: waiting for one
batch polls the rollout and the reward workers, and so advances all batches. Synchronous and asynchronous training
differ only in when they ask and when they wait (`pending.py`).

A prompt's uid and the seeds of its samples follow from its serial number, counted over the whole run and saved with it:
what is sampled depends neither on the step, nor on the size of batches, nor on who decodes it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import pulse
from posttrain.batch.compact import compact
from posttrain.batch.samples import last_rows
from posttrain.config.root import PPOConfig
from posttrain.controller.group import Future
from posttrain.controller.incidents import WorkerDied
from posttrain.conversations.loop import ConversationLoop, begin_conversations, join_rows
from posttrain.protocol import DataProto
from posttrain.rewards.types import RewardResult
from posttrain.rollout.base import Output
from posttrain.rollout.generate import no_garbage_collection, to_batch
from posttrain.rollout.sampling import sample_seeds
from posttrain.rollout.stored import StoredOutput
from posttrain.trainer.ppo.events import Due, EngineClock, ReplayError
from posttrain.trainer.ppo.reward import (
    AgentWatch,
    Key,
    ModelReward,
    RewardManager,
    add_overlong_penalty,
    feed_turns,
    keys_of,
    place_scores,
)
from posttrain.workers.groups import RolloutGroup

STILL_S = 0.01  # between two looks at a replay that stands still
PROMPT_TENSORS, PROMPT_FIELDS = ["prompts", "attention_mask", "position_ids"], ["raw_prompt_ids"]


class Experience:
    """Asks `rollout` for responses and `rewards` for their scores. `serial` counts the prompts of the whole run."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        rollout: RolloutGroup,
        rewards: RewardManager,
        *,
        model_reward: ModelReward | None = None,
        turns: ConversationLoop | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.rollout, self.rewards, self.model_reward, self.turns = rollout, rewards, model_reward, turns
        self.serial, self.last_ended = 0, 0.0
        self._prompts: dict[Key, Sequence[int]] = {}
        self._outputs: dict[Key, Output] = {}
        self._scores: dict[Key, RewardResult] = {}
        self._ended_at: dict[Key, float] = {}
        self._engine_of: dict[Key, int] = {}  # of requests that were placed by the engines' loads
        self._advancing: dict[int, Future[tuple[list[Output], bool, list[Output], int]]] = {}
        self._busy: set[int] = set()
        # Ranks that got requests while they were at work: that they had none left, as they say next, is no news.
        self._asked_while_busy: set[int] = set()
        self._pending_calls: list[Future[None]] = []
        self._watch = AgentWatch()
        # Where weights change while responses are under way: counts the engines' steps, and replays them.
        self.clock: EngineClock | None = None
        # Replaces a rollout worker that was lost, and gives its number; raises the loss where that cannot be done.
        self.replace: Callable[[WorkerDied], int] | None = None
        self._still_since: float | None = None  # of a replay in which nothing happens
        self._asked: list[DataProto] = []  # what was submitted and is under way, where workers are replaced

    def number(self, prompts: DataProto) -> DataProto:
        """Gives each prompt its serial number, its uid (the same as text)."""
        serials = range(self.serial, self.serial + len(prompts))
        prompts.non_tensor_batch["serial"] = np.array(serials, dtype=object)
        prompts.non_tensor_batch["uid"] = np.array([str(serial) for serial in serials], dtype=object)
        self.serial += len(prompts)
        return prompts

    def state_dict(self) -> int:
        return self.serial

    def load_state_dict(self, state: int) -> None:
        self.serial = int(state)

    # -- asking ---------------------------------------------------------------------------------------------------
    def ask(self, prompts: DataProto, n: int | Sequence[int], *, stream: int | None = None, **how: bool) -> DataProto:
        """Rows under way: `n` of each prompt (or so many of each), in order. `prompts` is left without its prompts.

        A sample's seed is made of the run's seed, `stream` (of others than training), the prompt's `serial` and its
        own number. `how`: `validate` takes the validation's sampling settings, `greedy` the likeliest tokens.
        """
        counts = [n] * len(prompts) if isinstance(n, int) else list(n)
        repeated = np.repeat(np.arange(len(prompts)), counts)
        asked = take_prompts(prompts).select([])[repeated]
        rows = prompts[repeated]
        serials = [int(serial) for serial in rows.non_tensor_batch.pop("serial")]
        samples = [sample for count in counts for sample in range(count)]
        rows.non_tensor_batch["sample"] = np.array(samples, dtype=object)
        parts = (self.config.trainer.seed, *(() if stream is None else (stream,)))
        rows.non_tensor_batch["seed"] = np.array(sample_seeds(serials, samples, *parts), dtype=object)
        asked.non_tensor_batch.update({name: rows.non_tensor_batch[name] for name in ("uid", "sample", "seed")})
        # A conversation is continued here, from its tokens, and those of a validation are written to its samples; any
        # other response stays where it was written.
        asked.meta_info = dict(how)
        if self.turns is None and not how.get("validate"):
            asked.meta_info |= {"store": True, "texts": self.rewards.pool is not None}
        engines = self._place(keys_of(rows))
        self._prompts.update(zip(keys_of(rows), asked.non_tensor_batch["raw_prompt_ids"], strict=True))
        self.rewards.expect(rows)
        # Conversations are scored when their rows are composed; other batches than those trained on, as one.
        if self.model_reward and self.model_reward.groups and self.turns is None and not any(how.values()):
            self.model_reward.groups.expect(rows)
        if self.turns:
            asked = asked[begin_conversations(self.turns, keys_of(rows), asked, rows, engines)]
        if len(asked):
            self.reach("submit")
            self._submit(asked, engines)
            self._have_work(range(self._engines))
        return rows

    def _place(self, keys: Sequence[Key]) -> dict[Any, int]:
        """The engine of each prompt. It follows from the prompts alone, so that runs can be repeated; only where a
        clock decides anyway, and the event log has it, it is the least loaded one."""
        groups = Counter(uid for uid, _ in keys)
        if self.clock is None or self._engines == 1:
            return {uid: number * self._engines // len(groups) for number, uid in enumerate(groups)}
        under_way = Counter(engine for key, engine in self._engine_of.items() if key not in self._outputs)
        loads = [under_way[engine] for engine in range(self._engines)]
        placed = dict(zip(groups, self.clock.place(loads, list(groups.values())), strict=True))
        self._engine_of.update((key, placed[key[0]]) for key in keys)
        return placed

    def _submit(self, asked: DataProto, engines: Mapping[Any, int]) -> None:
        if self.clock is None or self._engines == 1:
            return self._submit_in_order(asked)  # spread by groups, in equal numbers of tokens
        sent, uids = compact(asked), asked.non_tensor_batch["uid"].tolist()
        # Engines without rows are called, too: a replay finds this place in the schedule of every one.
        by_engine = [[row for row, uid in enumerate(uids) if engines[uid] == own] for own in range(self._engines)]
        for call in [self.rollout.submit.on(engine, sent[own]) for engine, own in enumerate(by_engine)]:
            call.result()

    def _submit_in_order(self, asked: DataProto) -> None:
        if self.replace is None:
            self.rollout.submit(asked)
            return
        self._asked.append(asked)
        # Each is waited for: behind the loss of one worker an error of another would go unseen.
        calls = [self.rollout.submit.on(engine, *own) for engine, own in enumerate(self._spread(asked))]
        for engine, call in enumerate(calls):
            try:
                call.result()
            except WorkerDied as death:
                self._issue_again(engine, death)

    def _spread(self, asked: DataProto) -> list[tuple[Any, ...]]:
        """The arguments of `submit` for each engine."""
        group = self.rollout.submit.group.teams("submit")
        return group.marked("submit").spread(group, asked).arguments

    def _issue_again(self, engine: int, death: WorkerDied) -> None:
        """Have the worker replaced that was lost before it answered, and ask the new one for all that the lost one was
        asked for in the batches under way. Responses that it had given are kept: seeds decide what is written."""
        while True:
            if self.replace is None or self.replace(death) != engine:
                raise death  # the answer was lost with another worker, and would never be asked for again
            self._advancing.pop(engine, None)
            self._asked_while_busy.discard(engine)
            try:
                # All of them, though some have ended: rows that decode together round together, bit-for-bit.
                for asked in self._asked:
                    self.rollout.submit.on(engine, *self._spread(asked)[engine]).result()
            except WorkerDied as another:
                death = another
                continue
            self._busy.add(engine)
            return

    @property
    def _engines(self) -> int:
        # Not the number of ranks: several ranks may hold one engine together.
        return self.rollout.submit.world_size

    def forget(self, uids: Iterable[Any]) -> None:
        """Groups that will not be trained on."""
        if self.model_reward and self.model_reward.groups:
            self.model_reward.groups.forget(uids)

    def _have_work(self, ranks: Iterable[int]) -> None:
        asked = set(ranks)
        self._busy |= asked
        self._asked_while_busy |= self._advancing.keys() & asked

    def reach(self, what: str) -> None:
        """In a replay: decode up to where the recorded run did this, `submit` or `weights`, to the engines."""
        if self.clock is not None:
            while not self.clock.is_due(what):
                self._poll_replay()
            self.clock.done(what)

    def settle(self) -> None:
        """In a replay: do all that was done to the engines before they were drained."""
        while self.clock is not None and any(self.clock.expected):
            self._poll_replay()

    def _poll_replay(self) -> list[Output]:
        """As `poll`; an error if everything stands still, as the run is another than the recorded one."""
        clock = self.clock
        place = lambda: None if clock is None else (list(clock.steps), [len(rest) for rest in clock.expected])  # noqa: E731
        before, ended = place(), self.poll()
        if clock is None or ended or self._advancing or place() != before or self._agents_go_on():
            self._still_since = None
            return ended
        now = time.monotonic()
        self._still_since = self._still_since or now
        if now - self._still_since < (self.turns.silent_s if self.turns else 0.0):
            time.sleep(STILL_S)  # a program may ask for another turn while it awaits one, and no event announces that
            return ended
        raise ReplayError("This run does not do what the replayed run did: its settings, data or tools differ.")

    def _agents_go_on(self) -> bool:
        """Whether an agent may still act although no engine makes a step. In a replay an engine waits until it has the
        turns with which it made its next step; an agent at work may ask for one of them."""
        if self.turns is None or self.clock is None:
            return False
        stands = self.clock.log.replayed is not None and self.clock.holds(self._busy)
        return self.turns.is_at_work if stands else self.turns.waits()

    # -- waiting --------------------------------------------------------------------------------------------------
    def wait_for_responses(self, rows: DataProto) -> DataProto:
        """The samples with their responses; each of these goes to the reward workers as soon as it ends. A conversation
        with several branches gives as many rows."""
        keys = keys_of(rows)
        wanted = set(keys)
        longest = self.config.data.max_response_length
        with no_garbage_collection(), pulse.work("responses", len(keys), most_tokens=longest) as work:
            while not wanted <= self._outputs.keys():
                ended = self._poll_replay()
                work.advance(len(ended), sum(len(output.token_ids) for output in ended), work.running_tokens)
        prompts, outputs = [self._prompts.pop(key) for key in keys], [self._outputs.pop(key) for key in keys]
        self._asked = [asked for asked in self._asked if any(key in self._prompts for key in keys_of(asked))]
        for key in keys:
            self._engine_of.pop(key, None)
        self.last_ended = max(self._ended_at.pop(key) for key in keys)
        if self.turns:
            if self.turns.has_agents:
                self._watch.look([self.turns.records[key] for key in keys])
            rows = join_rows(self.turns, rows, outputs)
        else:
            rows.union(to_batch(prompts, outputs, self.tokenizer.pad_token_id))
        return rows.set_decoder(self.decode)  # `response` is decoded when it is first read

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Advance everything until then."""
        with no_garbage_collection():
            while not is_over():
                self._poll_replay()

    def has_ended(self, keys: Iterable[Key]) -> bool:
        """Whether all of these responses are whole."""
        return self._outputs.keys() >= set(keys)

    def wait_for_scores(self, rows: DataProto) -> DataProto:
        """The rows with `reward_score`, `reward_parts` and `reward_error` by the reward functions; waits for what is
        still being scored."""
        keys = keys_of(rows)
        wanted = set(keys)
        self._scores.update(self.rewards.poll())
        with no_garbage_collection(), pulse.work("scores", len(wanted - self._scores.keys())) as work:
            while not wanted <= self._scores.keys():
                new = self.rewards.wait()
                self._scores.update(new)
                work.advance(len(new))
        found = {key: self._scores.pop(key) for key in wanted}
        return rows.union(self.rewards.fields([found[key] for key in keys]))

    def complete(self, rows: DataProto, *, validation: bool = False) -> DataProto:
        """The rows with responses and scores, those of a reward model among them."""
        rows = self.wait_for_scores(self.wait_for_responses(rows))
        if self.model_reward:
            self.model_reward.join(rows, validation=validation, at_once=True)
        return rows

    def with_token_scores(self, rows: DataProto) -> DataProto:
        """The rows with `token_level_scores`: each score on the last token of its sample, the rewards of turns that add
        up to one at the ends of these turns; too long ones punished."""
        scores_B = np.array([float(score) for score in rows.non_tensor_batch["reward_score"]], np.float32)
        scores_B[last_rows(rows) != np.arange(len(rows))] = 0.0
        add_overlong_penalty(scores_B, rows, self.config.reward.overlong_buffer, self.config.data.max_response_length)
        placed = place_scores(scores_B, rows)
        rows.batch["token_level_scores"] = rows.batch["token_level_rewards"] = placed
        return rows

    def begin(self) -> None:
        """Start generating what was asked for, where the rollout has processes of its own."""
        if self.rollout.group.overlaps:
            self._advance()

    def poll_until(self, call: Future[Any]) -> None:
        """Poll while a call to other workers is under way; returns early if no response is missing."""
        while len(self._outputs) < len(self._prompts) and not call.done():
            self.poll(call)
            if self.clock is not None and not self._advancing:
                return  # a replay holds all engines until the call is done

    def poll(self, *others: Future[Any]) -> list[Output]:
        """Advance everything that is under way. Responses that ended go to the rewards, and are returned. Returns when
        a rank has answered, or one of the `others`."""
        # All ranks are asked before any is waited for: the slowest of them never keeps another one idle.
        self._advance()
        if self._advancing:
            self.rollout.group.wait_any([*self._advancing.values(), *others])
        ended: list[Output] = []
        for rank, future in list(self._advancing.items()):
            if rank in self._advancing and future.done():
                try:
                    answer = self._advancing.pop(rank).result()
                except WorkerDied as death:
                    self._issue_again(rank, death)
                    continue
                outputs, busy = answer[:2]  # of a worker of the user's own there may be no more
                if self.clock is not None:
                    self.clock.note_steps(rank, answer[3])
                if self.turns and any(answer[2:3]):
                    self.turns.show(rank, answer[2])
                ended += self.turns.receive(rank, outputs) if self.turns else outputs
                # "Idle" may be older than requests that were sent while the rank answered: then it is busy after all.
                if not busy and rank not in self._asked_while_busy:
                    self._busy.discard(rank)
                self._asked_while_busy.discard(rank)
        if self.turns:
            ended += self._continue_conversations(self.turns)
        if self.rollout.group.overlaps:
            self._advance()
        if self.replace is not None:  # a response that was issued again may have been given before
            ended = [output for output in ended if output.id in self._prompts and output.id not in self._outputs]
        self._outputs.update((output.id, output) for output in ended)
        self._ended_at.update((output.id, time.perf_counter()) for output in ended)
        if self.turns:
            feed_turns(self.rewards, self.turns, ended, failed=self.config.reward.failure_score, alone=self._no_reward)
        else:
            texts = {output.id: output.text for output in ended if isinstance(output, StoredOutput) and output.text}
            self.rewards.feed([(output.id, output.token_ids) for output in ended], texts=texts)
        if self.model_reward and self.model_reward.groups:
            self.model_reward.groups.feed(ended, self._prompts)
        return ended

    @property
    def _no_reward(self) -> bool:
        """Whether only an agent could give a reward."""
        return self.rewards.has_no_function and self.model_reward is None

    def _continue_conversations(self, turns: ConversationLoop) -> list[Output]:
        """Submit the next turns of conversations; gives responses that are whole because no tokens are left."""
        clock = self.clock
        # A replay may hold all engines until a turn comes: then there is nothing else to wait for.
        at_rest = not self._busy or (clock is not None and clock.holds(self._busy))
        following, full = turns.next(wait=at_rest) if at_rest or not turns.in_rounds else ({}, [])
        due: list[Due] = [("turns", rank, own) for rank, own in following.items()]
        due += [("end", rank, keys) for rank, keys in turns.ended().items()]
        if clock is not None:
            due = clock.admit(due)
        calls = {"turns": self.rollout.continue_conversations, "end": self.rollout.end_conversations}
        self._pending_calls += [calls[what].on(rank, own) for what, rank, own in due]
        for call in [call for call in self._pending_calls if call.done()]:
            self._pending_calls.remove(call)
            call.result()  # raises the worker's error, if there was one
        self._have_work(rank for what, rank, _ in due if what == "turns")
        return full

    def _advance(self) -> None:
        """Let every rank decode that has requests and is not decoding."""
        idle = self._busy - self._advancing.keys()
        turns = self.turns
        for rank in sorted(idle):
            if self.clock is not None:
                # For a moment only, so that new weights need not wait; in a replay as many steps as were made then.
                streams = turns.streams(rank) if turns else ()
                if (most := self.clock.steps_left(rank)) != 0:
                    self._advancing[rank] = self.rollout.advance.on(rank, True, streams, most)
            elif turns is None:  # without arguments: a worker of the user's own may know nothing of conversations
                self._advancing[rank] = self.rollout.advance.on(rank)
            else:
                self._advancing[rank] = self.rollout.advance.on(rank, turns.others_may_join, turns.streams(rank))

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def take_prompts(batch: DataProto) -> DataProto:
    """The prompt's fields only; everything else stays in `batch`, same rows, same order."""
    return batch.pop([name for name in PROMPT_TENSORS if name in batch.batch], PROMPT_FIELDS)
