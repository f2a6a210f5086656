"""Checks of meaning: ranges, names, settings that contradict each other; and the notes that a run prints first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.config.algorithm_checks import ALGORITHM_CHECKS
from posttrain.config.checked import Checked, Finding, check_choice, checks_of_packages, nearest_name
from posttrain.config.choices import CRITIC_ESTIMATORS, LOGGERS, NOT_BUILT_VALUES
from posttrain.config.lora import check_quantization, check_quantized_offload
from posttrain.config.parallel import check_one_step_off, check_sizes, one_worker
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves, lookup
from posttrain.config.values import split_hint
from posttrain.settings import Range

_ACTOR = "actor_rollout_ref.actor"
_MINI, _BATCH = f"{_ACTOR}.ppo_mini_batch_size", "data.train_batch_size"


def needs_reference(config: PPOConfig) -> bool:
    """Whether a run needs the frozen reference policy: KL in the reward, or in the loss with a coefficient above 0."""
    actor = config.actor_rollout_ref.actor
    return config.algorithm.use_kl_in_reward or (actor.use_kl_loss and actor.kl_loss_coef != 0)


def check(checked: Checked) -> Iterator[Finding]:
    """All checks of a run of the PPO family."""
    for examine in (*_CHECKS, *checks_of_packages("check"), one_process):
        yield from examine(checked)


def check_choices(checked: Checked) -> Iterator[Finding]:
    """Names that are not among those that a field declares."""
    for key, leaf in leaves(type(checked.config)).items():
        if leaf.choices:
            yield from check_choice(checked, key, leaf.choices, NOT_BUILT_VALUES)
    for name in checked.config.trainer.logger:
        if name not in LOGGERS:
            what = f"The logger `{name}` is not known; known: {', '.join(LOGGERS)}."
            yield checked.problem(what, nearest_name(name, LOGGERS), "trainer.logger")


def check_ranges(checked: Checked) -> Iterator[Finding]:
    """Numbers out of the range that their field declares, or not finite."""
    table = leaves(type(checked.config))
    values = {key: lookup(checked.config, key) for key in table}
    outside = [key for key, leaf in table.items() if leaf.range is not None and _is_outside(values[key], leaf.range)]
    for key in outside:
        leaf = table[key]
        assert leaf.range is not None
        do = f"give a value that is {leaf.range.words} ({leaf.sentence})"
        yield checked.problem(f"`{key}={values[key]}` is out of range: it must be {leaf.range.words}.", do, key)
    for key, leaf in table.items():
        value, unlimited = values[key], leaf.range is not None and leaf.range.may_be_infinite
        if split_hint(leaf.hint)[0] is not float or value is None or unlimited or key in outside:
            continue
        if not math.isfinite(value):
            yield checked.problem(f"`{key}={value}` is not a finite number.", f"give a number ({leaf.sentence})", key)


def _is_outside(value: Any, limits: Range) -> bool:
    # NaN is in no range, and is reported as a number that is not finite
    return value is not None and value == value and not limits.allows(value)


def _batches(checked: Checked) -> Iterator[Finding]:
    batch, mini = lookup(checked.config, _BATCH), lookup(checked.config, _MINI)
    if mini > batch:
        what = f"The mini-batch ({_MINI}={mini}) is larger than the batch ({_BATCH}={batch})."
        yield checked.problem(what, f"set {_MINI} to at most {batch}, or raise {_BATCH}", _MINI, _BATCH)
    elif batch > 0 and mini > 0 and batch % mini:
        yield f"{_BATCH}={batch} is no multiple of {_MINI}={mini}: the last mini-batch has {batch % mini} prompts."
    critic = checked.config.critic.ppo_mini_batch_size
    if critic is not None and critic > batch:
        key = "critic.ppo_mini_batch_size"
        what = f"The critic's mini-batch ({key}={critic}) is larger than the batch ({_BATCH}={batch})."
        yield checked.problem(what, f"set {key} to at most {batch}", key, _BATCH)


def _critic(checked: Checked) -> Iterator[Finding]:
    config = checked.config
    if config.algorithm.adv_estimator in CRITIC_ESTIMATORS and config.critic.model.path is None:
        yield "critic.model.path is not set: the critic starts from the actor's model, with a value head of zeros."


def _reward_model(checked: Checked) -> Iterator[Finding]:
    config = checked.config.reward_model
    if not config.enable:
        return
    if config.model.path is None:
        what = "A reward model is asked for (reward_model.enable=True), but none is named."
        do = "set reward_model.model.path to a folder or hub id, or reward_model.enable=False for a function reward"
        yield checked.problem(what, do, "reward_model.enable", "reward_model.model.path")
    if config.weight == 0:
        what = "reward_model.weight=0: the reward model would be computed and would not count."
        yield checked.problem(what, "give another weight, or reward_model.enable=False", "reward_model.weight")


def _data(checked: Checked) -> Iterator[Finding]:
    data = checked.config.data
    if data.val_files is None:
        yield (
            "No validation file is set (data.val_files): the run makes no validation. data.val_files=held_out takes "
            "some of the training rows for it."
        )
    if data.train_weights is not None:
        count = len(data.train_files) if isinstance(data.train_files, list) else 1
        if len(data.train_weights) != count:
            what = f"data.train_weights has {len(data.train_weights)} weights for {count} training file(s)."
            yield checked.problem(what, "give one weight per file", "data.train_weights", "data.train_files")


def check_resume(checked: Checked) -> Iterator[Finding]:
    trainer = checked.config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        what = "trainer.resume_mode=resume_path, but trainer.resume_from_path names no checkpoint."
        do = "set trainer.resume_from_path=.../checkpoints/global_step_N, or trainer.resume_mode=auto"
        yield checked.problem(what, do, "trainer.resume_mode")


RAYS_PLACE = {
    "address": "set RAY_ADDRESS=HOST:6379 before the command",
    "_temp_dir": "set TMPDIR before the command: Ray's folder is made there, and removed with the run",
}
"""Arguments of `ray.init` that are not settings -> what serves instead."""


def check_ray(checked: Checked) -> Iterator[Finding]:
    """Where Ray runs is the environment's; all else Ray checks itself."""
    key = "trainer.ray_init"
    for name in RAYS_PLACE.keys() & checked.config.trainer.ray_init.keys():
        yield checked.problem(f"`{key}.{name}` is not a setting here.", RAYS_PLACE[name], key)


def one_process(checked: Checked) -> Iterator[Finding]:
    """A strategy that shards over workers is taken, and said to have nothing to share out."""
    named = sorted(key for key in checked.explicit if key.endswith(".strategy"))
    if named and one_worker(checked.config):
        yield f"{', '.join(named)}: one process holds the whole model, nothing is sharded."


_CHECKS: list[Callable[[Checked], Iterator[Finding]]] = [
    check_choices,
    check_ranges,
    _batches,
    *ALGORITHM_CHECKS,
    _critic,
    _reward_model,
    _data,
    check_resume,
    check_quantization,
    check_quantized_offload,
    check_sizes,
    check_one_step_off,
    check_ray,
]
