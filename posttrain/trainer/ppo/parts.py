"""The parts of a run of the PPO family: sizes and memory decided first, then worker groups by role, and what the loop
calls beside them. A lost worker that does not train is replaced here: of rollout, of a reward model, of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from posttrain.algorithms import get_adv_estimator, get_kl_controller
from posttrain.config.root import PPOConfig
from posttrain.controller.group import WorkerGroup
from posttrain.controller.incidents import WorkerDied
from posttrain.controller.pool import ROLLOUT, LocalWorkers, Workers
from posttrain.conversations.loop import ConversationLoop
from posttrain.data.dataset import PromptDataset
from posttrain.data.sampler import PromptSampler, make_sampler
from posttrain.errors import UserError
from posttrain.kernels.quantized import FP8
from posttrain.planning.budgets import check_group_size, critic_updates, fit_sizes
from posttrain.tracking.progress import say, waiting
from posttrain.tracking.rundir import RunDirectory
from posttrain.trainer.ppo.dynamic_sampling import GroupFilter
from posttrain.trainer.ppo.experience import Experience
from posttrain.trainer.ppo.first_batch import FirstBatchChecks
from posttrain.trainer.ppo.group_scores import GroupScores
from posttrain.trainer.ppo.own_roles import OwnRole, RoleStates
from posttrain.trainer.ppo.pending import PendingBatches
from posttrain.trainer.ppo.recorder import Checkpoints, Recorder
from posttrain.trainer.ppo.reward import ModelReward, RewardManager
from posttrain.trainer.ppo.validate import Validator
from posttrain.trainer.run.memory import named_stage, plan_memory
from posttrain.workers.fsdp_workers import (
    ActorRefWorker,
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RolloutWorker,
)
from posttrain.workers.groups import (
    ActorRolloutGroup,
    ColocatedGroup,
    CriticGroup,
    DisaggregatedGroup,
    PolicyGroup,
    ReferenceGroup,
    RewardModelGroup,
    RolloutGroup,
)
from posttrain.workers.policy import ReferenceWorker
from posttrain.workers.roles import engine_ranks

REWARD_MODEL, REFERENCE = "reward_model", "reference"


class WorkerClasses:
    """The classes that a trainer makes its workers of. A subclass of it may name its own, derived from these."""

    actor_class: type[ActorRolloutRefWorker] = ActorRolloutRefWorker
    # With `rollout_class`, in place of `actor_class` where rollout is disaggregated.
    policy_class: type[ActorRefWorker] = ActorRefWorker
    rollout_class: type[RolloutWorker] = RolloutWorker
    critic_class: type[CriticWorker] = CriticWorker
    reward_model_class: type[RewardModelWorker] = RewardModelWorker
    # Where the reference has workers of its own.
    reference_class: type[ReferenceWorker] = ReferenceWorker
    # Roles that only a subclass has: name -> its workers. The loop calls `self.own_wg[name]`.
    own_roles: ClassVar[Mapping[str, OwnRole]] = {}


class TrainingGroups:
    """A run's worker groups by role. `load_models` loads what they need, and tells the user what only the workers know.

    Rollout is disaggregated where `workers` has processes for it alone, and colocated otherwise. Any role is made in
    its own processes, where `workers` has some for it."""

    actor_rollout: ActorRolloutGroup
    rollout: RolloutGroup  # the workers that generate, colocated or not
    reference: ReferenceGroup | None = None  # where it has workers of its own
    critic: CriticGroup | None = None
    reward_model: RewardModelGroup | None = None
    notes: list[str]  # of the policy; the user has seen them

    def __init__(
        self,
        workers: Workers,
        classes: type[WorkerClasses],
        config: PPOConfig,
        tokenizer: Any,
        device: torch.device,
        *,
        total_updates: int,
        reference: bool,
        critic_updates: int | None,
    ) -> None:
        """`critic_updates` is None where the run has no critic."""
        self._workers, self._classes, self._config = workers, classes, config
        self._tokenizer, self._device = tokenizer, device
        self._total_updates, self._reference, self._critic_updates = total_updates, reference, critic_updates
        self.own: dict[str, WorkerGroup] = {}  # roles of the trainer's class

    def load_models(self) -> None:
        """Create the workers role by role, each with its model."""
        roles = ", reference" * self._reference + ", critic" * (self._critic_updates is not None)
        roles += ", reward model" * self._config.reward_model.enable
        say(f"Creating workers on {self._device}: actor, rollout{roles} ({self._workers.words()})")
        # The actor first: the critic's check needs the policy's vocabulary.
        self._load_actor()
        if self._critic_updates is not None:
            self.critic = self._load_critic(self._critic_updates)
        if self._config.reward_model.enable:
            made = self._workers.create(REWARD_MODEL, self._classes.reward_model_class, *self._of_policy())
            self.reward_model = RewardModelGroup(made)
            self.reward_model.init_model()
        for name, role in self._classes.own_roles.items():
            self.own[name] = self._workers.create(name, role.marked(), self._config)

    def is_apart(self, role: str) -> bool:
        """Whether the role has workers of its own, so that it computes while others do."""
        return self._workers.own_size(role) > 0

    def training(self) -> Iterator[WorkerGroup]:
        """Those that work while others generate."""
        for role in (self.actor_rollout, self.reference, self.critic, self.reward_model):
            if role is not None:
                yield role.group
        yield from self.own.values()

    def _load_actor(self) -> None:
        separate = self._workers.own_size(ROLLOUT)
        with waiting("loading the model"):
            if self._reference and self.is_apart(REFERENCE):
                self.reference = self._load_reference()
            actor, self.rollout = self._disaggregated() if separate else self._colocated()
            self.actor_rollout = actor
            actor.init_model()
        say(f"Rollout engine: {actor.rollout_engine()}")
        if (size := engine_ranks(self._config)) > 1:
            say(_engines_words(self.rollout.world_size, size, "rollout " * bool(separate)))
        if engine := actor.train_engine():
            say(f"Train engine: {engine}")
        self.notes = actor.notes()
        for note in self.notes:
            say(f"note: {note}")

    def _colocated(self) -> tuple[ColocatedGroup, RolloutGroup]:
        for sentence in self._workers.places(self._config.actor_rollout_ref.rollout.colocated_workers):
            say(sentence)
        colocated = ColocatedGroup(self._policy(self._classes.actor_class), self.reference)
        return colocated, colocated.rollout

    def _disaggregated(self) -> tuple[DisaggregatedGroup, RolloutGroup]:
        classes, separate = self._classes, self._workers.own_size(ROLLOUT)
        if classes.actor_class is not ActorRolloutRefWorker:
            raise UserError(
                f"actor_rollout_ref.rollout.n_workers={separate} has others generate than train, "
                f"but {classes.__name__} names one class for both (actor_class = {classes.actor_class.__name__}): "
                "give it policy_class and rollout_class, derived from ActorRefWorker and RolloutWorker, or set "
                "n_workers=0"
            )
        for sentence in self._workers.places():
            say(sentence)
        training = PolicyGroup(self._policy(classes.policy_class))
        rollout = RolloutGroup(self._workers.create(ROLLOUT, classes.rollout_class, *self._of_policy()))
        rounding = FP8 if self._config.actor_rollout_ref.rollout.quantization == "fp8" else None
        return DisaggregatedGroup(training, rollout, rounding, self.reference), rollout

    def _load_reference(self) -> ReferenceGroup:
        made = self._workers.create(REFERENCE, self._classes.reference_class, self._config, self._device)
        reference = ReferenceGroup(made)
        reference.init_model()
        made.once("engine_facts")  # known from here on: to begin a call never waits for a worker that may be lost
        return reference

    def _policy(self, worker: type) -> WorkerGroup:
        reference = self._reference and self.reference is None
        named = {"total_updates": self._total_updates, "reference": reference}
        return self._workers.create("actor", worker, *self._of_policy(), **named)

    def _of_policy(self) -> tuple[PPOConfig, Any, torch.device]:
        return self._config, self._tokenizer, self._device

    def _load_critic(self, updates: int) -> CriticGroup:
        tokens = min(len(self._tokenizer), self.actor_rollout.vocabulary())
        made = self._workers.create(
            "critic", self._classes.critic_class, self._config, self._device, total_updates=updates, tokens=tokens
        )
        critic = CriticGroup(made)
        critic.init_model()
        for note in critic.notes():
            say(f"note: {note}")
        return critic


def _engines_words(workers: int, size: int, kind: str) -> str:
    held = "; ".join(", ".join(map(str, range(first, first + size))) for first in range(0, workers, size))
    return f"Engines: {workers // size}, each held by {size} {kind}workers: {held}."


class TrainerParts(WorkerClasses):
    """Makes the parts of a run, and holds them for its loop (`RayPPOTrainer`)."""

    actor_rollout_wg: ActorRolloutGroup  # policy, reference and rollout
    rollout_wg: RolloutGroup  # the workers that generate, colocated or not
    ref_wg: ActorRolloutGroup | ReferenceGroup  # the workers that hold the reference
    critic_wg: CriticGroup | None
    own_wg: dict[str, WorkerGroup]  # of `own_roles`
    rm_wg: RewardModelGroup | None
    model_reward: ModelReward | None = None
    replace_reference: Callable[[WorkerDied], int] | None = None  # where its lost workers are replaced alone

    def __init__(
        self,
        config: PPOConfig,
        *,
        tokenizer: Any,
        run: RunDirectory,
        train_dataset: PromptDataset,
        val_dataset: PromptDataset | None,
        reward_fn: RewardManager,
        device: torch.device,
        explicit: set[str] | None = None,
        stored_config: PPOConfig | None = None,
        workers: Workers | None = None,
        turns: ConversationLoop | None = None,
    ) -> None:
        self.workers = workers or LocalWorkers()
        self.config, self.tokenizer, self.device, self.run = config, tokenizer, device, run
        self.train_dataset, self.reward_fn, self.turns = train_dataset, reward_fn, turns
        self.estimator = get_adv_estimator(config.algorithm.adv_estimator)
        say(f"Using advantage estimator: {config.algorithm.adv_estimator}")
        actor = config.actor_rollout_ref.actor
        kl_loss = actor.use_kl_loss and actor.kl_loss_coef > 0
        self.use_critic = self.estimator.needs_critic
        self.use_reference = kl_loss or config.algorithm.use_kl_in_reward
        self._plan(explicit or set())
        self.recorder = Recorder(
            config,
            run,
            self.sizes.total_steps,
            stored_config=stored_config or config,
            workers=self.workers,
            grouped=self.estimator.compares_group,
            kl_on=kl_loss,
        )
        self.step, self.bad_steps = 0, 0
        self.init_workers()
        self._make_parts(val_dataset)

    def _plan(self, explicit: set[str]) -> None:
        """Decide sizes, memory and the order of prompts before models are loaded; `explicit` settings stay."""
        if self.estimator.compares_group:
            check_group_size(self.config, explicit)
        self.sizes, notes = fit_sizes(self.config, explicit, len(self.train_dataset), critic=self.use_critic)
        for sentence in (*notes, self.sizes.words()):
            say(sentence)
        plan_memory(self.config, self.device, explicit, self.workers)
        self.sampler: PromptSampler = make_sampler(
            self.train_dataset, self.config.data, batch_size=self.sizes.prompts, seed=self.config.trainer.seed
        )

    def _make_parts(self, val_dataset: PromptDataset | None) -> None:
        """Everything that the loop calls beside the worker groups."""
        config, turns = self.config, self.turns
        self.group_filter = GroupFilter(config.algorithm.filter_groups, config.reward.failure_score)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.experience = Experience(
            config, self.tokenizer, self.rollout_wg, self.reward_fn, model_reward=self.model_reward, turns=turns
        )
        self._replace_lost_workers()
        training = self.groups.training() if config.trainer.max_staleness else ()
        self.pending = PendingBatches(
            config, self.experience, self.recorder.stage, training, prompts=self.sizes.prompts
        )
        self.pending.log_events(self.run.path, say)
        beside = (turns, self.reward_fn.pool)  # what works while the loop does something else
        self.recorder.lanes += [part.lane for part in beside if part is not None]
        self.validator = None
        if val_dataset is not None:
            n = config.actor_rollout_ref.rollout.val_kwargs.n
            self.validator = Validator(config.data, n, self.tokenizer, val_dataset, self.experience, self.recorder)
        self.first_batch = FirstBatchChecks(
            config, self.sizes, self.actor_rollout_wg, self.device, one_prompt=not (turns and turns.changes_prompts)
        )
        self.checkpoints = Checkpoints(
            self.recorder,
            self.sizes,
            actor=self.actor_rollout_wg,
            critic=self.critic_wg,
            # The names are those of `state.json`, which checkpoints of earlier versions have, too.
            parts={
                "sampler": self.sampler,
                "prompts": self.experience,
                "kl_controller": self.kl_controller,
                "old_from_rollout": self.first_batch,
            },
            batches={"surplus": self.group_filter, "ahead": self.pending},
            own=RoleStates(self.own_wg, type(self).__name__),
        )

    def init_workers(self) -> None:
        """Create the workers and load their models; no step is made."""
        self.groups = groups = TrainingGroups(
            self.workers,
            type(self),
            self.config,
            self.tokenizer,
            self.device,
            total_updates=self.sizes.total_updates,
            reference=self.use_reference,
            critic_updates=critic_updates(self.config, self.sizes) if self.use_critic else None,
        )
        with named_stage("load"):
            groups.load_models()
            self.actor_rollout_wg, self.rollout_wg = groups.actor_rollout, groups.rollout
            self.ref_wg = groups.reference or groups.actor_rollout
            self.critic_wg, self.rm_wg, self.own_wg = groups.critic, groups.reward_model, groups.own
            if self.rm_wg is not None:
                self.model_reward = self._join_reward_model(self.rm_wg)

    def _join_reward_model(self, scorer: RewardModelGroup) -> ModelReward:
        # Before anything is generated: a chat template that cannot render the data is rejected here.
        scorer.check_prompt(self.train_dataset[0]["raw_prompt"])
        joined = ModelReward(
            self.config.reward_model,
            scorer,
            failure_score=self.config.reward.failure_score,
            functions=self.reward_fn.pool is not None,
            named=self.reward_fn.named,
            groups=GroupScores(scorer, self.tokenizer.pad_token_id) if self.groups.is_apart(REWARD_MODEL) else None,
        )
        if joined.function_weight == 0:
            self.reward_fn.watch = None  # the functions only tell which responses are right
        for sentence in (*scorer.notes(), joined.words()):
            say(sentence)
        return joined

    # -- lost workers ---------------------------------------------------------------------------------------------
    def _replace_lost_workers(self) -> None:
        """From now on a worker that is lost is replaced alone, if it only generates, or only holds a reward model or
        the reference, and where that changes no number. Other losses start all workers again (`run/recovery.py`)."""
        config = self.config
        if self.run.note_replacement is None:
            return
        scores = self.model_reward.groups if self.model_reward is not None else None
        if scores is not None and self.workers.replace_alone(REWARD_MODEL):
            scores.replace = self._replace_scorer
        if self.groups.reference is not None and self.workers.replace_alone(REFERENCE):
            self.replace_reference = self._replace_reference
        # In asynchronous training the weights that the lost responses began with are gone; a conversation's tools may
        # have been called; and workers that hold one engine together meet in collectives.
        changes_no_number = not config.trainer.max_staleness and self.turns is None and engine_ranks(config) == 1
        if changes_no_number and self.workers.replace_alone(ROLLOUT):
            self.experience.replace = self._replace_rollout

    def _replace_scorer(self, death: WorkerDied) -> int:
        """A new process in the place of a lost worker of the reward model; its number. Raises `death` where it was
        another worker, or has been replaced too often."""
        scorer = self.rm_wg
        assert scorer is not None
        return self._replace(REWARD_MODEL, death, lambda number: scorer.init_model.on(number).result())

    def _replace_reference(self, death: WorkerDied) -> int:
        """A new process in the place of a lost worker of the reference, and of all that hold it with that one."""
        reference = self.groups.reference
        assert reference is not None
        return self._replace(REFERENCE, death, lambda number: reference.init_model())

    def _replace_rollout(self, death: WorkerDied, version: int | None = None) -> int:
        """A new process in the place of a lost rollout worker, with the policy's weights; its number. Raises `death`
        where it was another worker, or has been replaced too often."""
        group = self.actor_rollout_wg
        assert isinstance(group, DisaggregatedGroup)
        return self._replace(
            ROLLOUT, death, lambda number: group.admit(number, self.step if version is None else version)
        )

    def _replace(self, role: str, death: WorkerDied, load: Callable[[int], None]) -> int:
        """`load` gives the new process its model."""
        assert self.run.note_replacement is not None
        while True:
            number = self.workers.number_of_lost(role, death)
            self.run.note_replacement(death, self.step)
            try:
                self.workers.replace(role, number)
                load(number)
                return number
            except WorkerDied as another:
                if another.worker != death.worker:
                    raise  # what two workers were asked for is lost: all are started again
                death = another
