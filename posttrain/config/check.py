"""Checks of meaning: ranges, names, settings that contradict each other; and the notes that a run prints first."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.config.choices import CHOICES, GROUP_ESTIMATORS, LOGGERS, NOT_BUILT_VALUES
from posttrain.config.problem import Problem
from posttrain.config.ranges import RANGES
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves, lookup

_ACTOR = "actor_rollout_ref.actor"
_MINI, _BATCH = f"{_ACTOR}.ppo_mini_batch_size", "data.train_batch_size"


@dataclass
class Checked:
    """A typed configuration under examination."""

    config: PPOConfig
    explicit: set[str]
    """Canonical keys that the user set."""
    where: Callable[[str], str]
    """Key -> where it was set."""

    def problem(self, what: str, do: str, *keys: str) -> Problem:
        return Problem(what, ", and ".join(dict.fromkeys(self.where(key) for key in keys)), do, keys)


Finding = Problem | str
"""A problem, or a note."""


def needs_reference(config: PPOConfig) -> bool:
    """Whether a run needs the frozen reference policy: KL in the reward, or in the loss with a coefficient above 0."""
    actor = config.actor_rollout_ref.actor
    return config.algorithm.use_kl_in_reward or (actor.use_kl_loss and actor.kl_loss_coef != 0)


def check(checked: Checked) -> tuple[list[Problem], list[str]]:
    """(problems, notes) of all checks."""
    findings = [finding for examine in _CHECKS for finding in examine(checked)]
    return [f for f in findings if isinstance(f, Problem)], [f for f in findings if isinstance(f, str)]


def _choices(checked: Checked) -> Iterator[Finding]:
    for key, known in CHOICES.items():
        value = lookup(checked.config, key)
        if value is None or value in known:
            continue
        if (key, value) in NOT_BUILT_VALUES:
            yield checked.problem(f"`{key}={value}` cannot be used.", NOT_BUILT_VALUES[key, value], key)
        else:
            what = f"`{key}={value}` is not known; known: {', '.join(known)}."
            yield checked.problem(what, _nearest(value, known), key)
    for name in checked.config.trainer.logger:
        if name not in LOGGERS:
            what = f"The logger `{name}` is not known; known: {', '.join(LOGGERS)}."
            yield checked.problem(what, _nearest(name, LOGGERS), "trainer.logger")


def _nearest(value: Any, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    return f"did you mean `{close[0]}`?" if close else "choose one of them"


def _ranges(checked: Checked) -> Iterator[Finding]:
    for key, (fits, text) in RANGES.items():
        value = lookup(checked.config, key)
        if value is not None and not fits(value):
            do = f"give a value that is {text} ({leaves()[key].sentence})"
            yield checked.problem(f"`{key}={value}` is out of range: it must be {text}.", do, key)
    for key, leaf in leaves().items():
        value = lookup(checked.config, key)
        if leaf.hint is float and not math.isfinite(value) and key not in RANGES:
            yield checked.problem(f"`{key}={value}` is not a finite number.", f"give a number ({leaf.sentence})", key)


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


def _kl(checked: Checked) -> Iterator[Finding]:
    algorithm, actor = checked.config.algorithm, checked.config.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss and not algorithm.allow_both_kl:
        what = "KL is in the reward (algorithm.use_kl_in_reward) and in the loss (use_kl_loss): it would count twice."
        do = "switch one of them off, or set algorithm.allow_both_kl=True if it is meant"
        yield checked.problem(what, do, "algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "use_kl_loss=True with kl_loss_coef=0: no KL term is added; no reference model is loaded for the loss."
    if algorithm.adv_estimator not in GROUP_ESTIMATORS:
        return
    name = algorithm.adv_estimator
    if algorithm.use_kl_in_reward:
        yield f"KL is in the reward under {name}; the usual place is the loss ({_ACTOR}.use_kl_loss=True)."
    elif not actor.use_kl_loss:
        yield f"This {name} run has no KL term and loads no reference model ({_ACTOR}.use_kl_loss=True adds one)."


def _drgrpo(checked: Checked) -> Iterator[Finding]:
    config = checked.config
    actor = config.actor_rollout_ref.actor
    parts = {
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm": actor.loss_agg_mode == "seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo=False": not config.algorithm.norm_adv_by_std_in_grpo,
        f"{_ACTOR}.use_kl_loss=False": not actor.use_kl_loss,
    }
    missing = [key for key, there in parts.items() if not there]
    started = actor.loss_agg_mode == "seq-mean-token-sum-norm" or not config.algorithm.norm_adv_by_std_in_grpo
    if config.algorithm.adv_estimator in GROUP_ESTIMATORS and started and missing:
        rest = " and ".join(missing)
        yield f"This is a part of DrGRPO; the whole of it also has {rest} (`algorithm=drgrpo` sets all)."


def _estimator(checked: Checked) -> Iterator[Finding]:
    if checked.config.algorithm.adv_estimator == "gae" and "algorithm.adv_estimator" not in checked.explicit:
        yield "The estimator was not set: the default gae builds a critic; for GRPO set algorithm.adv_estimator=grpo."
    warmup, steps = checked.config.trainer.critic_warmup, checked.config.trainer.total_training_steps
    if checked.config.algorithm.adv_estimator == "gae" and steps is not None and warmup >= steps > 0:
        yield f"trainer.critic_warmup={warmup} covers all {steps} steps of the run: the actor never changes."


def _data(checked: Checked) -> Iterator[Finding]:
    data = checked.config.data
    if data.val_files is None:
        yield "No validation file is set (data.val_files): the run makes no validation."
    if data.train_weights is not None:
        count = len(data.train_files) if isinstance(data.train_files, list) else 1
        if len(data.train_weights) != count:
            what = f"data.train_weights has {len(data.train_weights)} weights for {count} training file(s)."
            yield checked.problem(what, "give one weight per file", "data.train_weights", "data.train_files")


def _resume(checked: Checked) -> Iterator[Finding]:
    trainer = checked.config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        what = "trainer.resume_mode=resume_path, but trainer.resume_from_path names no checkpoint."
        do = "set trainer.resume_from_path=.../checkpoints/global_step_N, or trainer.resume_mode=auto"
        yield checked.problem(what, do, "trainer.resume_mode")


_CHECKS: list[Callable[[Checked], Iterator[Finding]]] = [
    _choices,
    _ranges,
    _batches,
    _kl,
    _drgrpo,
    _estimator,
    _data,
    _resume,
]
