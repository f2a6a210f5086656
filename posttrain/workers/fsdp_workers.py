"""The workers of one process: actor, rollout and reference together, the critic, and the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.controller.dispatch import Calls, largest, register, to_all, to_first
from posttrain.engine.base import Passes
from posttrain.engine.fsdp import FSDPEngine
from posttrain.models.adapter_targets import stacked_note
from posttrain.models.loading import check_positions, end_token_ids, end_token_note
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import advance, generate, to_batch
from posttrain.rollout.settings import sampling_for
from posttrain.workers.actor.dp_actor import DataParallelPPOActor, actor_objective, actor_schedule
from posttrain.workers.critic.dp_critic import DataParallelPPOCritic, critic_schedule, prepare_values
from posttrain.workers.engine_worker import EngineWorker, ExportingWorker
from posttrain.workers.lora_state import adapter_notes, lora_state, policy_notes
from posttrain.workers.measures import Measures
from posttrain.workers.plan import UpdatePlan, join_updates, planned
from posttrain.workers.probe import WeightProbe
from posttrain.workers.reward_model.worker import RewardModelWorker
from posttrain.workers.roles import actor_engine, check_vocabulary, critic_engine, reference_engine, rollout_model
from posttrain.workers.seen_tokens import Kept, in_batch
from posttrain.workers.spread import by_groups, by_passes, in_row_order

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]

SHARED_PROOF_FREQ = 10


def planned_actor_updates(group: Any, arguments: tuple[DataProto]) -> Calls:
    """The optimizer steps of a batch, planned for every rank by whoever calls the group."""
    objective, schedule = actor_objective(group.config), actor_schedule(group.config)
    return planned(group, arguments[0], schedule, objective.prepare)


def planned_critic_updates(group: Any, arguments: tuple[DataProto]) -> Calls:
    """As the actor's."""
    schedule = critic_schedule(group.config)
    return planned(group, arguments[0], schedule, lambda mini: prepare_values(group.config, mini))


class ActorRolloutRefWorker(ExportingWorker):
    """Trains the policy, generates with it, and holds its reference."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        device: torch.device,
        *,
        total_updates: int = 1,
        reference: bool = False,
    ) -> None:
        self.config, self.tokenizer, self.device = config, tokenizer, device
        self.total_updates, self.with_reference = total_updates, reference
        self.reference: FSDPEngine | None = None

    @register(to_all)
    def init_model(self) -> None:
        """Load weights and build the optimizer; with adapters the base itself is the reference."""
        torch.manual_seed(self.config.trainer.seed)  # what is drawn, such as adapters, is the same on every rank
        self.engine = actor_engine(self.config, self.device, self.total_updates)
        self.actor = DataParallelPPOActor(self.config, self.engine)
        model = self.config.actor_rollout_ref.model
        facts = self.engine.facts()
        self.adapters = lora_state(facts, model)
        if self.with_reference and self.adapters is None:
            self.reference = reference_engine(self.config, self.device)
        rollout, live = self.config.actor_rollout_ref.rollout, self.engine.live_model()
        self.rollout_is_apart = live is None
        module = live if live is not None else rollout_model(self.config, self.device)
        with self.engine.on_device():  # the engine is tried when it is made
            self.rollout, self.engine_name = build_engine(rollout, module, self.tokenizer, device=self.device)
            self.rollout.sleep()
        data = self.config.data
        self.position_note = check_positions(facts.positions, data.max_prompt_length + data.max_response_length)
        self.end_ids = end_token_ids(self.tokenizer, facts.end_ids)
        self.probe = WeightProbe(self.tokenizer, len(self.tokenizer))

    @register(by_groups)
    def submit(self, prompts: DataProto) -> None:
        """Queue a request for each row, its id (uid, sample).

        `meta_info["validate"]` takes the validation's sampling settings, `meta_info["greedy"]` the likeliest tokens.
        """
        fields = prompts.non_tensor_batch
        sampling = self._sampling_of(prompts)
        columns = [fields[name].tolist() for name in ("uid", "sample", "raw_prompt_ids", "seed")]
        if not self.awake:
            self._wake()
        for uid, sample, ids, seed in zip(*columns, strict=True):
            self.rollout.submit(Request((uid, sample), ids, sampling, int(seed)))

    @register(to_all)
    def advance(self) -> tuple[list[Output], bool]:
        """(responses that ended, whether others are under way): decodes until there is news, or nothing to do."""
        ended = advance(self.rollout)
        busy = self.rollout.has_work()
        if not busy and self.awake:
            self._sleep()
        return ended, busy

    awake = False

    def _wake(self) -> None:
        self.engine.onload()
        self.rollout.wake()
        self.awake = True

    def _sleep(self) -> None:
        self.rollout.sleep()
        self.engine.offload()
        self.awake = False

    @register(by_groups, in_row_order)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row, in order, all at once; otherwise as `submit`."""
        ids = [list(row) for row in prompts.non_tensor_batch["raw_prompt_ids"]]
        seeds = [int(seed) for seed in prompts.non_tensor_batch["seed"]]
        self._wake()
        outputs = generate(self.rollout, ids, [self._sampling_of(prompts)] * len(ids), seeds)
        self._sleep()
        return to_batch(ids, outputs, self.tokenizer.pad_token_id)

    def _sampling_of(self, prompts: DataProto) -> Sampling:
        sampling = self.sampling(validate=bool(prompts.meta_info.get("validate")))
        return replace(sampling, greedy=True) if prompts.meta_info.get("greedy") else sampling

    def sampling(self, *, validate: bool) -> Sampling:
        return sampling_for(self.config, validate=validate, end_ids=self.end_ids)

    @register(by_passes, in_row_order)
    def compute_log_prob(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`old_log_probs` and `entropy` under the weights as they are."""
        with self.engine.on_device():
            out = self.actor.compute_log_prob(data, passes)
        return _fields(old_log_probs=out.get("log_probs"), entropy=out.get("entropy"))

    compute_log_probs = compute_log_prob

    @register(by_passes, in_row_order)
    def compute_sum_pi_squared(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`sum_pi_squared`: the sum of the squared probabilities of all next tokens; `data` has `old_log_probs`.

        At half the temperature every probability is squared and normalised anew, so the norm is what it was divided by:
        log(sum p^2) = 2 log p - log p at half the temperature, at any token.
        """
        temperature = self.config.actor_rollout_ref.rollout.temperature
        with self.engine.on_device():
            sharper = self.engine.log_probs(data, temperature=temperature / 2, passes=passes)
            usual = self.engine.log_probs(data, temperature=temperature, passes=passes)
        if not usual:
            return DataProto()
        return _fields(sum_pi_squared=(2 * usual["log_probs"] - sharper["log_probs"]).exp())

    @register(by_passes, in_row_order)
    def compute_ref_log_prob(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`ref_log_prob`: of the frozen copy, or of the base with its adapters off."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        if self.reference is None:
            with self.engine.on_device(), self.engine.base_only():
                out = self.engine.log_probs(data, temperature=temperature, passes=passes)
        else:
            with self.reference.on_device():
                out = self.reference.log_probs(data, temperature=temperature, passes=passes)
        return _fields(ref_log_prob=out.get("log_probs"))

    @register(planned_actor_updates, join_updates)
    def update_actor(self, plan: UpdatePlan) -> list[Measures]:
        """All optimizer steps on a batch. The group takes the batch and plans them; it gives their metrics."""
        with self.engine.on_device(optimizer=True):
            return self.actor.execute(plan)

    @register(to_all, in_batch)
    def seen_tokens(self) -> Kept:
        """What the last update computed of each token of a batch whose rows are numbered."""
        return self.actor.objective.seen.take()

    @register(to_all, largest)
    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the new weights to the rollout engine, and prove that it computes with them.

        An engine that reads the trainer's own tensors is given nothing: it is tried at first and then now and again.
        Its cache sleeps until the next requests: what a sync needs does not lie in memory beside it.
        """
        shared = self.rollout.shares_weights and not self.rollout_is_apart
        with self.engine.on_device():
            self.rollout.wake("weights")
            self.rollout.load_weights(() if shared else self.engine.export_weights(), version)
            if shared and version > 1 and version % SHARED_PROOF_FREQ:
                return {}
            return self.probe.compare(self.engine, self.rollout)

    @register(to_all)
    def dry_run(self, rows: Sequence[int], prompt_length: int) -> None:
        """Forward and backward over rows of these lengths; nothing changes, but running out of memory shows."""
        with self.engine.on_device(optimizer=True):
            self.probe.dry_run(self.engine, self.actor, rows, prompt_length)

    @register(to_first)
    def rollout_engine(self) -> str:
        """Name and version of the engine that generates."""
        return self.engine_name

    @register(to_first)
    def vocabulary(self) -> int:
        """Tokens that the policy's model has weights for."""
        return self.engine.facts().vocabulary

    @register(to_first)
    def notes(self) -> list[str]:
        """Sentences for the user that only the loaded model or the first update could tell."""
        about_adapters = [
            *adapter_notes(self.engine.facts(), self.config.actor_rollout_ref.model),
            *policy_notes(self.config, self.engine_name),
        ]
        no_end = end_token_note(self.end_ids, self.engine.facts().vocabulary)
        about_model = (self.engine.facts().note, self.position_note, no_end)
        return [note for note in (*about_model, *about_adapters, *self.actor.objective.notes) if note]


class CriticWorker(EngineWorker):
    """Predicts and learns the value of each response token; the policy knows `tokens` different ones."""

    def __init__(self, config: PPOConfig, device: torch.device, *, total_updates: int = 1, tokens: int = 0) -> None:
        self.config, self.device, self.total_updates, self.tokens = config, device, total_updates, tokens

    @register(to_all)
    def init_model(self) -> None:
        torch.manual_seed(self.config.trainer.seed)  # as the actor's
        self.engine = critic_engine(self.config, self.device, self.total_updates)
        facts = self.engine.facts()
        check_vocabulary(facts.vocabulary, self.tokens, self.config.critic.model.path)
        self.critic = DataParallelPPOCritic(self.config, self.engine)
        model = self.config.actor_rollout_ref.model
        self.adapters = lora_state(facts, model, path=self.config.critic.model.path)

    @register(to_first)
    def notes(self) -> list[str]:
        """As the actor's."""
        note = stacked_note(self.engine.facts().stacked, self.config.critic.model, "critic.model.target_modules")
        return [note] if note else []

    @register(by_passes, in_row_order)
    def compute_values(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        with self.engine.on_device():
            return DataProto.from_dict(tensors={"values": self.critic.compute_values(data, passes)})

    @register(planned_critic_updates, join_updates)
    def update_critic(self, plan: UpdatePlan) -> list[Measures]:
        with self.engine.on_device(optimizer=True):
            return self.critic.execute(plan)


def _fields(**tensors: torch.Tensor | None) -> DataProto:
    """A batch of these; a rank without rows has none to give."""
    return DataProto.from_dict(tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})
