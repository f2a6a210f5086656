"""The worker groups of a run: actor with rollout and reference; a critic and a reward model where they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.tracking.progress import say
from posttrain.trainer.ppo.model_reward import ModelReward
from posttrain.trainer.ppo.sizes import critic_updates

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
    trainer.actor_rollout_wg = actor = trainer.workers.create(
        "actor",
        trainer.actor_class,
        *(trainer.config, trainer.tokenizer, trainer.device),
        total_updates=trainer.sizes.total_updates,
        reference=trainer.use_reference,
    )
    actor.init_model()
    say(f"Rollout engine: {actor.rollout_engine()}")
    trainer.said = actor.notes()
    for note in trainer.said:
        say(f"note: {note}")


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
