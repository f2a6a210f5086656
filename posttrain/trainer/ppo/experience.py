"""Experience turns prompts into scored samples, for training, validation and greedy baselines.

    rows = experience.ask(prompts, n)    requests go to the rollout, each known by (uid, sample)
    experience.wait_for_responses(rows)  rows with their responses; each went to the rewards when it ended
    experience.wait_for_scores(rows)     rows with their scores
    experience.complete(rows)            both, and the reward model's

Any number of batches may be under way; a prompt may give any number of rows. There are no callbacks: waiting for one
batch polls the rollout and the reward workers, and so advances all batches. Synchronous and one-step-off training
differ only in when they ask and when they wait.

A prompt's uid and the seeds of its samples follow from its serial number, counted over the whole run and saved with it:
what is sampled depends neither on the step, nor on the size of batches, nor on who decodes it.

One-step-off training: the next step's responses are generated while this one trains.

    step 1: generate 1 | train on 1, generate 2 | sync
    step 2:              train on 2, generate 3 | sync         (2 was sampled before step 1's update)

Weights go to the rollout only when the batch under way is whole. So each batch is sampled by one policy, which is one
update older than the one that learns from it, and what is sampled depends on no clock: a run is the same every time,
and continues bit-for-bit from a checkpoint, which holds the batch.

The old policy of such a batch is the one that begins to learn from it, not the one that sampled it: clipping then holds
the policy near where it stands. Clipped around where it was, what the last update moved has no gradient any more, and a
run learns less (docs/layouts.md). The difference from the sampling policy is corrected by importance weights
(`algorithm.rollout_correction.rollout_is`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from posttrain import pulse
from posttrain.batch.samples import last_rows
from posttrain.config.root import PPOConfig
from posttrain.controller.group import Future, WorkerGroup
from posttrain.conversations.batch import begin_conversations, join_rows
from posttrain.conversations.loop import ConversationLoop
from posttrain.protocol import DataProto
from posttrain.rewards.types import RewardResult
from posttrain.rollout.base import Output
from posttrain.rollout.generate import no_garbage_collection, to_batch
from posttrain.rollout.sampling import sample_seeds
from posttrain.rollout.stored import StoredOutput
from posttrain.tracking.metrics import GENERATED_S
from posttrain.trainer.ppo.reward import (
    AgentWatch,
    Key,
    ModelReward,
    RewardManager,
    add_overlong_penalty,
    feed_turns,
    keys_of,
    on_last_token,
)
from posttrain.workers.groups import RolloutGroup

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
        self._advancing: dict[int, Future[tuple[list[Output], bool, list[Output]]]] = {}
        self._busy: set[int] = set()
        # Ranks that got requests while they were at work: that they had none left, as they say next, is no news.
        self._asked_while_busy: set[int] = set()
        self._pending_calls: list[Future[None]] = []
        self._watch = AgentWatch()

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
        stays = self.turns is None and not how.get("validate")
        asked.meta_info = {**how, "store": stays, "texts": self.rewards.pool is not None}
        self._prompts.update(zip(keys_of(rows), asked.non_tensor_batch["raw_prompt_ids"], strict=True))
        self.rewards.expect(rows)
        if self.turns:
            asked = asked[begin_conversations(self.turns, keys_of(rows), asked, rows, self._engines)]
        if len(asked):
            self.rollout.submit(asked)
            self._have_work(range(self._engines))
        return rows

    @property
    def _engines(self) -> int:
        # Not the number of ranks: several ranks may hold one engine together.
        return self.rollout.submit.world_size

    def _have_work(self, ranks: Iterable[int]) -> None:
        self._busy |= set(ranks)
        self._asked_while_busy |= self._advancing.keys() & set(ranks)

    # -- waiting --------------------------------------------------------------------------------------------------
    def wait_for_responses(self, rows: DataProto) -> DataProto:
        """The samples with their responses; each of these goes to the reward workers as soon as it ends. A conversation
        with several branches gives as many rows."""
        keys = keys_of(rows)
        wanted = set(keys)
        longest = self.config.data.max_response_length
        with no_garbage_collection(), pulse.work("responses", len(keys), most_tokens=longest) as work:
            while not wanted <= self._outputs.keys():
                ended = self.poll()
                work.advance(len(ended), sum(len(output.token_ids) for output in ended), work.running_tokens)
        prompts, outputs = [self._prompts.pop(key) for key in keys], [self._outputs.pop(key) for key in keys]
        if self.turns:
            if self.turns.has_agents:
                self._watch.look([self.turns.records[key] for key in keys])
            rows = join_rows(self.turns, rows, outputs)
        else:
            rows.union(to_batch(prompts, outputs, self.tokenizer.pad_token_id))
        return rows.set_decoder(self.decode)  # `response` is decoded when it is first read

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
            self.model_reward.join(rows, validation=validation)
        return rows

    def with_token_scores(self, rows: DataProto) -> DataProto:
        """The rows with `token_level_scores`: each score on the last token of its sample, too long ones punished."""
        scores_B = np.array([float(score) for score in rows.non_tensor_batch["reward_score"]], np.float32)
        scores_B[last_rows(rows) != np.arange(len(rows))] = 0.0
        add_overlong_penalty(scores_B, rows, self.config.reward.overlong_buffer, self.config.data.max_response_length)
        placed = on_last_token(scores_B, rows)
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

    def poll(self, *others: Future[Any]) -> list[Output]:
        """Advance everything that is under way. Responses that ended go to the rewards, and are returned. Returns when
        a rank has answered, or one of the `others`."""
        # All ranks are asked before any is waited for: the slowest of them never keeps another one idle.
        self._advance()
        if self._advancing:
            self.rollout.group.wait_any([*self._advancing.values(), *others])
        ended: list[Output] = []
        for rank, future in list(self._advancing.items()):
            if future.done():
                outputs, busy, *so_far = self._advancing.pop(rank).result()
                if self.turns and any(so_far):
                    self.turns.show(rank, so_far[0])
                ended += self.turns.receive(rank, outputs) if self.turns else outputs
                # "Idle" may be older than requests that were sent while the rank answered: then it is busy after all.
                if not busy and rank not in self._asked_while_busy:
                    self._busy.discard(rank)
                self._asked_while_busy.discard(rank)
        if self.turns:
            ended += self._continue_conversations(self.turns)
        if self.rollout.group.overlaps:
            self._advance()
        self._outputs.update((output.id, output) for output in ended)
        self.last_ended = time.perf_counter() if ended else self.last_ended
        if self.turns:
            feed_turns(self.rewards, self.turns, ended, failed=self.config.reward.failure_score, alone=self._no_reward)
        else:
            texts = {output.id: output.text for output in ended if isinstance(output, StoredOutput) and output.text}
            self.rewards.feed([(output.id, output.token_ids) for output in ended], texts=texts)
        return ended

    @property
    def _no_reward(self) -> bool:
        """Whether only an agent could give a reward."""
        return self.rewards.has_no_function and self.model_reward is None

    def _continue_conversations(self, turns: ConversationLoop) -> list[Output]:
        """Submit the next turns of conversations; gives responses that are whole because no tokens are left."""
        at_rest = not self._busy
        following, full = turns.next(wait=at_rest) if at_rest or not turns.in_rounds else ({}, [])
        self._pending_calls += [self.rollout.continue_conversations.on(rank, own) for rank, own in following.items()]
        self._pending_calls += [self.rollout.end_conversations.on(rank, keys) for rank, keys in turns.ended().items()]
        for call in [call for call in self._pending_calls if call.done()]:
            self._pending_calls.remove(call)
            call.result()  # raises the worker's error, if there was one
        self._have_work(following)
        return full

    def _advance(self) -> None:
        """Let every rank decode that has requests and is not decoding."""
        idle = self._busy - self._advancing.keys()
        turns = self.turns
        for rank in sorted(idle):
            if turns is None:  # without arguments: a worker of the user's own may know nothing of conversations
                self._advancing[rank] = self.rollout.advance.on(rank)
            else:
                self._advancing[rank] = self.rollout.advance.on(rank, turns.others_may_join, turns.streams(rank))

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def take_prompts(batch: DataProto) -> DataProto:
    """The prompt's fields only; everything else stays in `batch`, same rows, same order."""
    return batch.pop([name for name in PROMPT_TENSORS if name in batch.batch], PROMPT_FIELDS)


FOLDER, AGE = "ahead", "rollout/age"


def staleness(batch: DataProto, version: int) -> dict[str, float]:
    """By how many updates the weights are newer that learn from these tokens than those that sampled them."""
    spans = [span for row in batch.non_tensor_batch["policy_versions"] for span in row]
    tokens = sum(count for _, count in spans)
    return {AGE: sum((version - sampled) * count for sampled, count in spans) / tokens if tokens else 0.0}


Stage = Callable[[str], AbstractContextManager[None]]  # names a stage of the step, and takes its time


class OneStepOff:
    """Holds the batch that is generated ahead of its step. Calls to `training` move it on while they are waited for;
    these workers must be others than those that generate."""

    def __init__(self, experience: Experience, stage: Stage, training: Iterable[WorkerGroup] = ()) -> None:
        self.experience, self._stage = experience, stage
        self.rows: DataProto | None = None
        self._asked: float | None = None  # when the responses were asked for; None where they are there
        for group in training:
            # One thread drives everything: while it waits for the trainer it polls the rollout, so that finished
            # responses go to the reward workers and the ranks that generate never stand idle.
            group.meanwhile = experience.poll_until

    @property
    def is_empty(self) -> bool:
        return self.rows is None

    def start(self, prompts: DataProto, n: int) -> None:
        """Begin to generate the responses of the next step, without waiting for them."""
        self.rows, self._asked = self.experience.ask(prompts, n), time.perf_counter()
        self.experience.begin()

    def finish(self) -> None:
        """Wait for the responses that are under way. New weights may go to the rollout from here on."""
        # Called before every sync, also in synchronous runs: weights must not change under a batch that is generated.
        if self._asked is None or self.rows is None:
            return
        with self._stage("gen"):
            self.rows = self.experience.wait_for_responses(self.rows)
        self.rows.meta_info[GENERATED_S] = self.experience.last_ended - self._asked
        self._asked = None

    def take(self) -> DataProto | None:
        """The batch with its responses, which `finish` has waited for, if one was asked for."""
        rows, self.rows = self.rows, None
        return rows

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Write the batch into a checkpoint's folder, with its scores: the reward workers end with the run."""
        if self.rows is not None:
            if "reward_score" not in self.rows.non_tensor_batch:
                self.experience.wait_for_scores(self.rows)
            self.rows.save_to_disk(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into a checkpoint that was verified."""
        self.rows = DataProto.load_from_disk(folder / FOLDER).set_decoder(self.experience.decode)
