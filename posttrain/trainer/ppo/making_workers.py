"""The worker groups of a run: actor with rollout and reference, together or apart; a critic and a reward model where
they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.controller.group import WorkerGroup
from posttrain.controller.pool import ROLLOUT
from posttrain.errors import UserError
from posttrain.planning.batch_sizes import critic_updates
from posttrain.tracking.progress import say
from posttrain.tracking.waiting import waiting
from posttrain.trainer.ppo.model_reward import ModelReward
from posttrain.workers.apart import ActorRolloutApart
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker
from posttrain.workers.roles import engine_ranks

if TYPE_CHECKING:
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer


def make_workers(trainer: RayPPOTrainer) -> None:
    """Give the trainer its groups, with their models loaded, and tell the user what only these know."""
    roles = f"actor, rollout{_other_roles(trainer)}"
    say(f"Creating workers on {trainer.device}: {roles} ({trainer.workers.words()})")
    _make_actor(trainer)
    trainer.critic_wg = None
    if trainer.use_critic:
        _make_critic(trainer)
    trainer.rm_wg = trainer.model_reward = None
    if trainer.config.reward_model.enable:
        _make_reward_model(trainer)


def _other_roles(trainer: RayPPOTrainer) -> str:
    reward_model = ", reward model" * trainer.config.reward_model.enable
    return ", reference" * trainer.use_reference + ", critic" * trainer.use_critic + reward_model


def _make_actor(trainer: RayPPOTrainer) -> None:
    """The layout is decided here: who generates is who trains, or others."""
    with waiting("loading the model"):
        trainer.actor_rollout_wg, trainer.rollout_wg = (_apart if trainer.workers.rollout_size else _together)(trainer)
        actor = trainer.actor_rollout_wg
        actor.init_model()
    say(f"Rollout engine: {actor.rollout_engine()}")
    if (size := engine_ranks(trainer.config)) > 1:
        say(_engines_words(trainer.rollout_wg.world_size, size, "rollout " * bool(trainer.workers.rollout_size)))
    if engine := actor.train_engine():
        say(f"Train engine: {engine}")
    trainer.said = actor.notes()
    for note in trainer.said:
        say(f"note: {note}")


def _engines_words(workers: int, size: int, kind: str) -> str:
    held = "; ".join(", ".join(map(str, range(first, first + size))) for first in range(0, workers, size))
    return f"Engines: {workers // size}, each held by {size} {kind}workers: {held}."


def _together(trainer: RayPPOTrainer) -> tuple[Any, WorkerGroup]:
    group = _policy(trainer, trainer.actor_class)
    return group, group


def _apart(trainer: RayPPOTrainer) -> tuple[Any, WorkerGroup]:
    if trainer.actor_class is not ActorRolloutRefWorker:
        raise UserError(
            f"actor_rollout_ref.rollout.n_workers={trainer.workers.rollout_size} has others generate than train, "
            f"but {type(trainer).__name__} names one class for both (actor_class = {trainer.actor_class.__name__}): "
            "give it policy_class and rollout_class, derived from ActorRefWorker and RolloutWorker, or set n_workers=0"
        )
    for sentence in trainer.workers.places():
        say(sentence)
    training = _policy(trainer, trainer.policy_class)
    rollout = trainer.workers.create(ROLLOUT, trainer.rollout_class, trainer.config, trainer.tokenizer, trainer.device)
    return ActorRolloutApart(training, rollout), rollout


def _policy(trainer: RayPPOTrainer, worker: type) -> WorkerGroup:
    return trainer.workers.create(
        "actor",
        worker,
        *(trainer.config, trainer.tokenizer, trainer.device),
        total_updates=trainer.sizes.total_updates,
        reference=trainer.use_reference,
    )


def _make_critic(trainer: RayPPOTrainer) -> None:
    updates = critic_updates(trainer.config, trainer.sizes)
    tokens = min(len(trainer.tokenizer), trainer.actor_rollout_wg.vocabulary())
    trainer.critic_wg = critic = trainer.workers.create(
        "critic", trainer.critic_class, trainer.config, trainer.device, total_updates=updates, tokens=tokens
    )
    critic.init_model()
    for note in critic.notes():
        say(f"note: {note}")


def _make_reward_model(trainer: RayPPOTrainer) -> None:
    reward_fn = trainer.reward_fn
    trainer.rm_wg = scorer = trainer.workers.create(
        "reward_model", trainer.reward_model_class, trainer.config, trainer.tokenizer, trainer.device
    )
    scorer.init_model()
    scorer.check_prompt(trainer.train_dataset[0]["raw_prompt"])
    trainer.model_reward = ModelReward(
        trainer.config, scorer, functions=reward_fn.pool is not None, named=reward_fn.named
    )
    if trainer.model_reward.function_weight == 0:
        reward_fn.watch = None  # it only tells which responses are right
    for sentence in (*scorer.notes(), trainer.model_reward.words()):
        say(sentence)
