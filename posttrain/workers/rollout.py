"""The rollout: an engine that writes responses with the policy's weights."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from posttrain.batch.columns import has_store
from posttrain.config import needs_reference
from posttrain.config.root import PPOConfig
from posttrain.config.trainer import continues_responses
from posttrain.controller.group import all_of, delegate, register, to_all, to_first, totals
from posttrain.conversations.conversation import Key, TurnRequest
from posttrain.conversations.settings import turn_settings
from posttrain.engine.ranks import team_of
from posttrain.models.loading import check_positions, end_token_ids, end_token_note, model_end_ids, positions_of
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling, digest
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import admission_deadline, advance, generate, to_batch
from posttrain.rollout.sampling import sampling_for
from posttrain.rollout.stored import keep_outputs
from posttrain.rollout.weight_buckets import Bucket, checksum_of_all
from posttrain.texts import texts_of
from posttrain.workers.policy import PolicyWorker, WeightProbe
from posttrain.workers.roles import engine_ranks, policy_notes, rollout_model
from posttrain.workers.update_plan import by_groups, in_row_order
from posttrain.workers.weight_transport import Endpoint, Place, Route, machine_address, place_of

Entry = tuple[int, str, list[Any]]
"""(steps of the engine before it; `submit`, `turns`, `end` or `weights`; of which requests, or which version)."""


class RolloutWorker:
    """Generates: with a model of its own, or with the weights of a `policy` in the same process (`build`)."""

    engine: RolloutEngine
    awake = False
    # Prompts whose responses go into the store, and whether their texts are wanted.
    stored: dict[Key, tuple[Sequence[int], bool]]
    conversations: dict[Key, list[Hashable]]  # of several turns: the requests of each whose KV cache may be kept
    # Steps of the engine so far, and what was done to it between which of them: enough to repeat it bit for bit.
    steps: int = 0
    schedule: list[Entry]

    def __init__(
        self, config: PPOConfig, tokenizer: Any, device: torch.device, policy: PolicyWorker | None = None
    ) -> None:
        self.config, self.tokenizer, self.device, self.policy = config, tokenizer, device, policy
        self.receiver = Endpoint(device)

    @register(to_all)
    def init_model(self) -> None:
        """Load a model of this worker's own, and build the engine over it."""
        self.join_team()
        self.build(rollout_model(self.config, self.device))
        self.probe = WeightProbe(self.tokenizer, len(self.tokenizer))

    def join_team(self) -> None:
        """Meet the workers that hold an engine together; all workers must do so, those without an engine too."""
        among = self.config.actor_rollout_ref.rollout.colocated_workers or None
        self.team = team_of(engine_ranks(self.config), self.device, among)

    def build(self, module: torch.nn.Module) -> None:
        """The engine over this model; it sleeps until it is asked for something."""
        data, rollout = self.config.data, self.config.actor_rollout_ref.rollout
        self.conversations, self.stored, self.schedule = {}, {}, []
        longest = data.max_prompt_length + data.max_response_length
        self.position_note = check_positions(positions_of(module), longest)
        self.end_ids = end_token_ids(self.tokenizer, model_end_ids(module))
        self._made = 0
        self.engine, self.engine_name = build_engine(
            rollout,
            module,
            self.tokenizer,
            device=self.device,
            longest=longest,
            team=self.team,
            exact=self.config.trainer.exact,
        )
        self.engine.sleep()
        self._scheduled_version = self.engine.version

    @register(to_first)
    def updates_in_flight(self) -> bool:
        """Whether a weight sync need not wait for the responses under way."""
        return self.engine.updates_in_flight

    @register(to_first)
    def rollout_engine(self) -> str:
        """Name and version of the engine that generates."""
        return self.engine_name

    @register(to_first)
    def takes_adapters(self) -> bool:
        """Whether a weight sync brings LoRA adapters alone."""
        return self.engine.takes_adapters

    @register(to_first)
    def rollout_notes(self, vocabulary: int) -> list[str]:
        """Sentences for the user on generation; the policy has weights for so many tokens."""
        no_end = end_token_note(self.end_ids, vocabulary)
        has_reference = needs_reference(self.config)
        about = policy_notes(self.config.actor_rollout_ref.model, self.engine_name, has_reference=has_reference)
        return [note for note in (self.position_note, no_end, *about) if note]

    # -- weights from others --------------------------------------------------------------------------------------
    @register(to_all, all_of)
    def receiver_place(self) -> Place:
        """Where the worker is that receives weights."""
        return place_of(self.device, machine_address())

    @register(to_all)
    def join_as_receiver(self, route: Route, rank: int) -> None:
        """Receive weights by this route from now on; the sender (rank 0) and the others join it at the same time."""
        self.receiver.join(route, rank)

    @register(to_all)
    def take_bucket(self, bucket: Bucket, version: int) -> int:
        """Load some of the weights after a look at their checksums; gives the checksum of all so far. The cache sleeps
        meanwhile."""
        bucket = self.receiver.transport.receive(bucket)
        bucket.check()  # before anything is loaded: an engine never holds half of a broken sync
        self._wake_weights()
        if bucket.first:
            self._arrived = 0
        self.engine.load_weights(bucket.tensors.items(), version)
        self._arrived = checksum_of_all(self._arrived, bucket)
        self.receiver.transport.loaded(last=bucket.last)
        return self._arrived

    def _wake_weights(self) -> None:
        # For every call of a sync: with weights in flight, decoding may end between two of them, and the engine sleeps.
        self.engine.wake("weights")

    @register(to_all, all_of)
    def rollout_scores(self) -> torch.Tensor:
        """Of the probe's rows, with the weights that arrived."""
        self._wake_weights()
        return self.probe.score_with_rollout(self.engine)

    # -- responses ------------------------------------------------------------------------------------------------
    @register(by_groups, team=engine_ranks)
    def submit(self, prompts: DataProto) -> None:
        """Queue a request for each row, its id (uid, sample).

        `meta_info["validate"]` takes the validation's sampling settings, `meta_info["greedy"]` the likeliest tokens.
        With `meta_info["store"]` the responses stay in this worker's store, where it has one; `meta_info["texts"]` has
        their texts sent.
        """
        self._note("submit", [])
        fields = prompts.non_tensor_batch
        sampling = self._sampling_of(prompts)
        columns = [fields[name].tolist() for name in ("uid", "sample", "raw_prompt_ids", "seed")]
        if not self.awake:
            self.wake()
        # With several turns the cache of a finished request stays: the next turn continues from it.
        keep = turn_settings(self.config.actor_rollout_ref.rollout.multi_turn).enable
        stores = has_store() and bool(prompts.meta_info.get("store"))
        for uid, sample, ids, seed in zip(*columns, strict=True):
            self.engine.submit(Request((uid, sample), ids, sampling, int(seed), keep=keep))
            if stores:
                self.stored[uid, sample] = ids, bool(prompts.meta_info.get("texts"))
            if keep:
                self.conversations[uid, sample] = [(uid, sample)]

    @register(to_all, team=engine_ranks)
    def continue_conversations(self, turns: Sequence[TurnRequest]) -> None:
        """Queue turns of conversations; what the turn before left in the cache serves them."""
        self._note("turns", [list(turn.id) for turn in turns])
        if not self.awake:
            self.wake()
        for turn in turns:
            turn.submit(self.engine, self._sampling_of(DataProto(meta_info=turn.how)), self.conversations)

    @register(to_all, team=engine_ranks)
    def end_conversations(self, conversations: Sequence[Key]) -> None:
        """These have had their last turn."""
        self._note("end", [list(key) for key in conversations])
        self.engine.release([id for key in conversations for id in self.conversations.pop(key)])
        self._sleep_if_idle()

    @register(to_all, team=engine_ranks)
    def advance(
        self, others_may_join: bool = False, streams: Collection[Hashable] = (), most_steps: int | None = None
    ) -> tuple[list[Output], bool, list[Output], int]:
        """(responses that ended, whether others are under way, what `streams` have so far, steps so far): decodes until
        there is news, or nothing to do; or for a moment only, where turns of others or new weights may become ready
        meanwhile, or where clients read along. `most_steps` counts steps instead of time."""
        self._note_weights()
        soon = most_steps is None and (others_may_join or streams)
        over = admission_deadline(self.engine) if soon else lambda: False
        last = None if most_steps is None else self.steps + most_steps

        def until() -> bool:
            if self.steps == last or over():
                return True
            self.steps += 1
            return False

        ended = advance(self.engine, until)
        self._check_lock_step(ended)
        self._sleep_if_idle()
        busy = self.engine.has_work()
        return self._keep(ended), busy, self.engine.so_far(streams) if streams and busy else [], self.steps

    def _note(self, what: str, ids: list[Any]) -> None:
        """Schedule an entry behind the steps so far."""
        self._note_weights()
        if continues_responses(self.config.trainer):  # others take no schedule: it would only grow
            self.schedule.append((self.steps, what, ids))

    def _note_weights(self) -> None:
        # Looked at before every other entry and step: however weights arrive, they are found between the same steps.
        if self.engine.version != self._scheduled_version and continues_responses(self.config.trainer):
            self._scheduled_version = self.engine.version
            self.schedule.append((self.steps, "weights", [self.engine.version]))

    @register(to_all, all_of, team=engine_ranks)
    def take_schedule(self) -> tuple[int, list[Entry]]:
        """Steps of the engine so far, and what was done to it since the last call."""
        self._note_weights()
        found, self.schedule = self.schedule, []
        return self.steps, found

    def _keep(self, ended: list[Output]) -> list[Output]:
        """The responses, in the store where the driver need not read them itself."""
        asked = [self.stored.pop(output.id, None) for output in ended]
        known = [one for one in asked if one is not None]
        if self.team is not None and self.team.rank > 0:
            return []  # the first of a team answers for all of it
        if not ended or len(known) < len(ended):
            return ended
        read = [output.token_ids for output, (_, text) in zip(ended, known, strict=True) if text]
        decoded = iter(texts_of(read, self.tokenizer) if read else [])
        return keep_outputs(ended, [ids for ids, _ in known], [next(decoded) if text else None for _, text in known])

    @register(to_all, totals)
    def take_counts(self) -> dict[str, float]:
        """What the engines have counted since the last call."""
        return self.engine.take_counts()

    def _check_lock_step(self, outputs: Sequence[Output]) -> None:
        # Workers that hold one engine together must sample bitwise identical tokens.
        if self.team is None:
            return
        # A checksum over everything sampled so far: ranks that drifted apart once stay different, so that the check
        # finds it at the next answer, however late it is made.
        self._made = digest(outputs, self._made)
        self.team.check_same(self._made, "what it has sampled")

    def _sleep_if_idle(self) -> None:
        """Sleep when nothing is left to do and no conversation goes on."""
        if self.awake and not self.engine.has_work() and not self.conversations:
            self.sleep()

    def wake(self) -> None:
        """Take the memory that generating needs, and the policy's weights back onto the device."""
        if self.policy is not None:
            self.policy.engine.onload()
        self.engine.wake()
        self.awake = True

    def sleep(self) -> None:
        """Give that memory to training."""
        self.engine.sleep()
        self.awake = False
        if self.policy is not None:
            self.policy.engine.offload()
            self.engine.let_go()

    @register(by_groups, in_row_order, team=engine_ranks)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row, in order, all at once; otherwise as `submit`. A rank without rows has none to give."""
        # Ranks without rows must not wake: it would take the memory of a cache for nothing.
        if not len(prompts):
            return DataProto()
        ids = [list(row) for row in prompts.non_tensor_batch["raw_prompt_ids"]]
        seeds = [int(seed) for seed in prompts.non_tensor_batch["seed"]]
        self.wake()
        try:
            outputs = generate(self.engine, ids, [self._sampling_of(prompts)] * len(ids), seeds)
            self._check_lock_step(outputs)
        finally:
            self.sleep()
        return to_batch(ids, outputs, self.tokenizer.pad_token_id)

    def _sampling_of(self, prompts: DataProto) -> Sampling:
        sampling = self.sampling(validate=bool(prompts.meta_info.get("validate")))
        return replace(sampling, greedy=True) if prompts.meta_info.get("greedy") else sampling

    def sampling(self, *, validate: bool) -> Sampling:
        return sampling_for(self.config, validate=validate, end_ids=self.end_ids)


class RolloutCalls:
    """The rollout's methods, of a worker that has it as `rollout` and of that worker's group."""

    updates_in_flight = delegate(RolloutWorker.updates_in_flight, to="rollout")
    take_schedule = delegate(RolloutWorker.take_schedule, to="rollout")
    rollout_engine = delegate(RolloutWorker.rollout_engine, to="rollout")
    takes_adapters = delegate(RolloutWorker.takes_adapters, to="rollout")
    rollout_notes = delegate(RolloutWorker.rollout_notes, to="rollout")
    receiver_place = delegate(RolloutWorker.receiver_place, to="rollout")
    join_as_receiver = delegate(RolloutWorker.join_as_receiver, to="rollout")
    take_bucket = delegate(RolloutWorker.take_bucket, to="rollout")
    rollout_scores = delegate(RolloutWorker.rollout_scores, to="rollout")
    submit = delegate(RolloutWorker.submit, to="rollout")
    continue_conversations = delegate(RolloutWorker.continue_conversations, to="rollout")
    end_conversations = delegate(RolloutWorker.end_conversations, to="rollout")
    advance = delegate(RolloutWorker.advance, to="rollout")
    take_counts = delegate(RolloutWorker.take_counts, to="rollout")
    generate_sequences = delegate(RolloutWorker.generate_sequences, to="rollout")
