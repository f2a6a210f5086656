"""The policy, whose weights are trained, and the reference, a frozen policy that it is compared with.

`WeightProbe` proves a weight sync: the rollout engine must score fixed tokens as the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.batch.columns import has_store
from posttrain.config.root import PPOConfig
from posttrain.controller.group import Calls, WorkerGroup, delegate, register, to_all, to_first
from posttrain.engine.base import Passes, TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.engine.ranks import this_rank
from posttrain.models.loading import few, not_finite
from posttrain.models.proof import beyond_rounding
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, RolloutEngine
from posttrain.rollout.generate import to_batch
from posttrain.rollout.weight_buckets import Bucket, SyncError, split_into_buckets, without_tied_copies
from posttrain.workers.actor.correction import finish_importance_metrics
from posttrain.workers.actor.dp_actor import DataParallelPPOActor, actor_objective, actor_schedule
from posttrain.workers.measures import Kept, Measures, StoredStats, join_token_stats
from posttrain.workers.roles import ExportingWorker, actor_engine, adapter_notes, lora_state, reference_engine
from posttrain.workers.update_plan import (
    UpdatePlan,
    batch_of,
    by_passes,
    by_passes_with_routes,
    in_row_order,
    in_store,
    join_updates,
    plan_updates,
    reports_rows,
    with_routes,
)
from posttrain.workers.weight_transport import Endpoint, Place, Route, machine_address, place_of

ROWS, LENGTH = 4, 12  # enough to see a wrong tensor, too little to be felt


def compare_scores(
    ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, lost: Callable[[], list[str]]
) -> dict[str, float]:
    """`sync/probe_max` of the trainer's scores and an engine's; past the tolerance of the type it is an error. `lost`
    names weights of the trainer that are not finite."""
    if differ := beyond_rounding(ours, theirs, dtype):
        # NaN differs from everything: tell an update that broke the weights from a sync that lost some.
        if not bool(torch.isfinite(ours).all()):
            names = lost()
            where = f" (NaN or infinite: {few(names)})" if names else ""
            raise SyncError(
                f"the update left weights with which the trainer itself computes no numbers{where}: it was too "
                "large. Lower actor_rollout_ref.actor.optim.lr, and continue from a checkpoint before it"
            )
        raise SyncError(
            f"after the weight sync the rollout engine's log-probs differ from the trainer's {differ}: the engine "
            "does not compute with the weights it was given"
        )
    # Below the tolerance it is a metric, so that a slow drift shows before it stops a run.
    return {"sync/probe_max": float((ours - theirs).abs().max())}


class WeightProbe:
    """Fixed token rows that trainer and rollout engine score after each sync."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        # A generator of its own: drawing from the global one would change the run.
        generator = torch.Generator().manual_seed(20240203)
        self.rows = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator).tolist()
        self.pad = tokenizer.pad_token_id
        self.batch = _rows_batch([row[:1] for row in self.rows], [row[1:] for row in self.rows], self.pad)

    def compare(self, trainer: TrainEngine, rollout: RolloutEngine | None) -> dict[str, float]:
        """`sync/probe_max`: the largest difference in log-probs; past the tolerance of the type the run must stop. A
        rank without a rollout engine only looks for weights that are not finite."""
        theirs = self.score_with_rollout(rollout) if rollout is not None else None
        ours = self.score_with_trainer(trainer)
        facts = trainer.facts()
        dtype = (rollout and rollout.rounding) or facts.rounding or facts.dtype
        theirs = ours if theirs is None else theirs
        return compare_scores(ours, theirs, dtype, lambda: not_finite(trainer.export_weights()))

    def score_with_trainer(self, engine: TrainEngine) -> torch.Tensor:
        """Log-probs of the fixed rows; all ranks compute them."""
        return engine.log_probs(self.batch)["log_probs"]

    def score_with_rollout(self, engine: RolloutEngine) -> torch.Tensor:
        return torch.stack(engine.score(self.rows))

    def dry_run(self, engine: TrainEngine, actor: Any, lengths: Sequence[int], prompt_length: int) -> None:
        prompts = [[0] * min(prompt_length, length - 1) for length in lengths]
        responses = [[0] * (length - len(prompt)) for length, prompt in zip(lengths, prompts, strict=True)]
        batch = _rows_batch(prompts, responses, self.pad)
        zeros = torch.zeros_like(batch.batch["rollout_log_probs"])
        batch.union(DataProto.from_dict(tensors={"advantages": zeros}))
        prepared = actor.objective.prepare(batch)
        engine.trial_pass(prepared, actor.objective)


def _rows_batch(prompts: list[list[int]], responses: list[list[int]], pad: int) -> DataProto:
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(responses)]
    return to_batch(prompts, outputs, pad)


def plan_actor_updates(group: WorkerGroup, batch: DataProto) -> Calls:
    """The optimizer steps of a batch, planned for every rank by the caller of the group."""
    config: PPOConfig = group.config
    actor, longest = config.actor_rollout_ref.actor, config.data.max_response_length
    objective = actor_objective(actor, config.algorithm.rollout_correction, longest)
    return plan_updates(group, batch, actor_schedule(actor, config.trainer.seed), objective.prepare)


def join_policy_updates(results: list[list[Measures]], calls: Calls) -> dict[str, float]:
    """Metrics of a batch's optimizer steps."""
    return finish_importance_metrics(join_updates(results, calls))


class PolicyWorker(ExportingWorker):
    """Trains the policy."""

    def __init__(self, config: PPOConfig, tokenizer: Any, device: torch.device, *, total_updates: int = 1) -> None:
        self.config, self.tokenizer, self.device, self.total_updates = config, tokenizer, device, total_updates
        self.sender = Endpoint(device)

    @register(to_all)
    def init_model(self) -> None:
        """Load weights and build the optimizer."""
        torch.manual_seed(self.config.trainer.seed)  # what is drawn, such as adapters, is the same on every rank
        self.engine = actor_engine(self.config, self.device, self.total_updates)
        self.actor = DataParallelPPOActor(self.config, self.engine)
        self.adapters = lora_state(self.engine.facts(), self.config.actor_rollout_ref.model)
        self.probe = WeightProbe(self.tokenizer, len(self.tokenizer))

    @register(by_passes_with_routes, in_row_order)
    def compute_log_prob(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`old_log_probs` and `entropy` under the weights as they are; with `router_replay.mode=R2` the routes of
        experts, too."""
        with self.engine.on_device():
            out = self.actor.compute_log_prob(data, passes)
        found = batch_of(old_log_probs=out.get("log_probs"), entropy=out.get("entropy"))
        records = self.config.actor_rollout_ref.actor.router_replay.mode == "R2"
        return in_store(with_routes(found, self.engine.take_routes()) if records else found, data, self.engine.facts())

    compute_log_probs = compute_log_prob

    @register(by_passes_with_routes, in_row_order)
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
        found = batch_of(sum_pi_squared=(2 * usual["log_probs"] - sharper["log_probs"]).exp())
        return in_store(found, data, self.engine.facts())

    @register(plan_actor_updates, join_policy_updates)
    def update_actor(self, plan: UpdatePlan) -> list[Measures]:
        """All optimizer steps on a batch. The group takes the batch and plans them; it gives their metrics."""
        with self.engine.on_device(optimizer=True):
            return self.actor.execute(plan)

    @register(to_all, join_token_stats)
    def token_stats(self) -> Kept | StoredStats | None:
        """What the last update computed of each token of a batch whose rows are numbered."""
        kept = self.actor.objective.seen.take()
        if not has_store():
            return kept
        return StoredStats.of(kept) if reports_rows(self.engine.facts()) else None

    @register(to_all)
    def dry_run(self, rows: Sequence[int], prompt_length: int) -> None:
        """Forward and backward over rows of these lengths; nothing changes, but running out of memory shows."""
        with self.engine.on_device(optimizer=True):
            self.probe.dry_run(self.engine, self.actor, rows, prompt_length)

    # -- weights for others ---------------------------------------------------------------------------------------
    @register(to_first)
    def sender_place(self) -> Place:
        """Where the worker is that sends the weights."""
        return place_of(self.device, machine_address())

    @register(to_first)
    def host_sync(self, route: Route) -> Route:
        """Open the place where the workers of a route meet; the route, with what they need to find it."""
        return self.sender.host(route)

    @register(to_first)
    def join_as_sender(self, route: Route) -> None:
        """Send weights by this route from now on; the receivers join it at the same time."""
        self.sender.join(route, 0)

    @register(to_first)
    def finish_sync(self) -> None:
        """All receivers have loaded the last bucket."""
        self.sender.transport.finish()

    @register(to_all)
    def next_bucket(self, first: bool, adapters: bool = False) -> Bucket:
        """The next of the weights (or of the `adapters` alone), from the beginning with `first`; all ranks must be
        asked, rank 0 gives them."""
        # A generator is kept between the calls: the driver pulls one bucket at a time, so that no worker holds two.
        if first:
            self._outgoing = self._buckets(adapters)
        self._was_last = True  # an error below must end the caller's loop over buckets, on every rank
        bucket = next(self._outgoing)
        self._was_last = bucket.last
        if bucket.last:
            self._outgoing.close()  # weights go back to where they rest
        return bucket

    def _buckets(self, adapters: bool) -> Generator[Bucket]:
        with self.engine.on_device():
            weights = self.engine.export_adapters() if adapters else self.engine.export_weights()
            # Tied weights share memory only in a whole live model. Gathered layers are copies whose memory is reused,
            # so that an address says nothing there.
            whole = self.engine.live_model() is not None
            sent = without_tied_copies(weights) if whole else weights
            limit = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * 2**20
            if this_rank() > 0:
                yield from split_into_buckets(sent, limit=limit, keep=False)
                return
            transport = self.sender.transport
            for bucket in split_into_buckets(sent, limit=limit, buffer=transport.buffer):
                yield transport.send(bucket)

    @register(to_first)
    def was_last_bucket(self) -> bool:
        return self._was_last

    @register(to_all)
    def probe_scores(self) -> torch.Tensor:
        """What the rollout's scores of the probe's rows are compared with."""
        with self.engine.on_device():
            return self.probe.score_with_trainer(self.engine)

    @register(to_all)
    def lost_weights(self) -> list[str]:
        """Weights that are not finite."""
        with self.engine.on_device():
            return not_finite(self.engine.export_weights())

    @register(to_first)
    def train_engine(self) -> str | None:
        """What trains, and its version, where it is not torch's own modules."""
        return self.engine.facts().engine

    @register(to_first)
    def vocabulary(self) -> int:
        """Tokens that the policy's model has weights for."""
        return self.engine.facts().vocabulary

    @register(to_first)
    def notes(self) -> list[str]:
        """Sentences for the user that only the loaded model or the first update could tell."""
        facts = self.engine.facts()
        about_adapters = adapter_notes(facts, self.config.actor_rollout_ref.model)
        return [note for note in (facts.note, *about_adapters, *self.actor.objective.notes) if note]


class PolicyCalls:
    """The policy's methods, of a worker that has it as `policy` and of that worker's group."""

    engine_facts = delegate(PolicyWorker.engine_facts, to="policy")
    train_engine = delegate(PolicyWorker.train_engine, to="policy")
    vocabulary = delegate(PolicyWorker.vocabulary, to="policy")
    lora_state = delegate(PolicyWorker.lora_state, to="policy")
    save = delegate(PolicyWorker.save, to="policy")
    begin_save = delegate(PolicyWorker.begin_save, to="policy")
    load = delegate(PolicyWorker.load, to="policy")
    export_hf = delegate(PolicyWorker.export_hf, to="policy")
    compute_log_prob = compute_log_probs = delegate(PolicyWorker.compute_log_prob, to="policy")
    compute_sum_pi_squared = delegate(PolicyWorker.compute_sum_pi_squared, to="policy")
    update_actor = delegate(PolicyWorker.update_actor, to="policy")
    token_stats = delegate(PolicyWorker.token_stats, to="policy")
    dry_run = delegate(PolicyWorker.dry_run, to="policy")
    sender_place = delegate(PolicyWorker.sender_place, to="policy")
    host_sync = delegate(PolicyWorker.host_sync, to="policy")
    join_as_sender = delegate(PolicyWorker.join_as_sender, to="policy")
    finish_sync = delegate(PolicyWorker.finish_sync, to="policy")
    next_bucket = delegate(PolicyWorker.next_bucket, to="policy")
    was_last_bucket = delegate(PolicyWorker.was_last_bucket, to="policy")
    probe_scores = delegate(PolicyWorker.probe_scores, to="policy")
    lost_weights = delegate(PolicyWorker.lost_weights, to="policy")


class ReferenceWorker:
    """Log-probs of the policy as it was at the start: of a frozen copy, or, without one, of the base of a `policy`
    in the same process, whose adapters are switched off for it."""

    engine: TrainEngine | None = None

    def __init__(self, config: PPOConfig, device: torch.device, policy: PolicyWorker | None = None) -> None:
        self.config, self.device, self.policy = config, device, policy

    @register(to_all)
    def init_model(self) -> None:
        """Load the frozen copy."""
        self.engine = reference_engine(self.config, self.device)

    @register(to_first)
    def engine_facts(self) -> EngineFacts:
        """About the role's model."""
        assert self.engine is not None
        return self.engine.facts()

    @contextmanager
    def _reference_engine(self) -> Iterator[TrainEngine]:
        """The engine that holds the reference, its weights where they are computed with."""
        if self.engine is not None:
            with self.engine.on_device():
                yield self.engine
            return
        # With LoRA the base never changes: without adapters it is the reference, and no second copy is held.
        assert self.policy is not None
        with self.policy.engine.on_device(), self.policy.engine.base_only():
            yield self.policy.engine

    @register(by_passes, in_row_order)
    def compute_ref_log_prob(self, data: DataProto, passes: Passes | None = None) -> DataProto:
        """`ref_log_prob`: of the frozen copy, or of the base with its adapters off."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        with self._reference_engine() as engine:
            out = engine.log_probs(data, temperature=temperature, passes=passes)
            facts = engine.facts()
        return in_store(batch_of(ref_log_prob=out.get("log_probs")), data, facts)


class ReferenceCalls:
    """The reference's methods, of a worker that has it as `reference` and of that worker's group."""

    compute_ref_log_prob = delegate(ReferenceWorker.compute_ref_log_prob, to="reference")
