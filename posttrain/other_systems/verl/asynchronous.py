"""verl's fully asynchronous trainer in posttrain's settings.

There a trainer's step takes `require_batches` mini-batches, weights are synced every `trigger_parameter_sync_step` of
them, and `staleness_threshold` is how much may be generated ahead, as a share of what is trained between two syncs.
Here what is trained between two syncs is a step, of `data.train_batch_size` prompts in mini-batches of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from posttrain.config.merge import Entry, Merged
from posttrain.other_systems.verl.rule import ON, given, is_empty, number, plain, refuse

_SECTION, _ACTOR, _BATCH = "async_training", "actor_rollout_ref.actor", "data.train_batch_size"


def _staleness(merged: Merged, key: str, entry: Entry) -> None:
    """A share of a step counts as a whole one: the bound here is in policy versions."""
    if is_empty(entry):
        return
    try:
        bound = math.ceil(float(str(entry.value)))
    except ValueError:
        refuse(merged, entry, "it is no number", "set trainer.max_staleness")
        return
    merged.put("trainer.max_staleness", bound, entry)


def _partial(merged: Merged, key: str, entry: Entry) -> None:
    if not is_empty(entry):
        merged.put("trainer.partial_rollout", plain(entry.value) in ON, entry)


def _prompts_between_syncs(merged: Merged) -> int:
    said = (given(merged, f"{_SECTION}.{name}") for name in ("require_batches", "trigger_parameter_sync_step"))
    counts = [float(text) if text.replace(".", "").isdigit() else 1.0 for text in said]
    return int(number(merged, f"{_ACTOR}.ppo_mini_batch_size", 1) * counts[0] * counts[1])


def _sync_step(merged: Merged, key: str, entry: Entry) -> None:
    """As many prompts in a step as verl trains between two syncs; verl's scripts have a batch size of 0."""
    old = merged.entries.get(_BATCH)
    if is_empty(entry):
        return
    if old is not None and old.explicit and plain(old.value) not in ("0", str(_prompts_between_syncs(merged))):
        merged.note(f"`{entry.spelling}={entry.value}`: weights are synced after every {_BATCH}={old.value} prompts.")
        return
    merged.entries.pop(_BATCH, None)
    merged.put(_BATCH, _prompts_between_syncs(merged), entry)


def _old_policy(merged: Merged, key: str, entry: Entry) -> None:
    """The rollout's log-probs are the old ones, unless the trainer is to compute those of the policy that learns."""
    prox = given(merged, f"{_SECTION}.compute_prox_log_prob") in ON
    if given(merged, f"{_SECTION}.use_rollout_log_probs") in ON and not prox:
        merged.put(f"{_ACTOR}.old_log_probs", "rollout", entry)


def _total_prompts(merged: Merged, key: str, entry: Entry) -> None:
    if is_empty(entry):
        return
    size = number(merged, _BATCH, 0) or _prompts_between_syncs(merged)
    try:
        merged.put("trainer.total_training_steps", max(1, int(float(str(entry.value)) // size)), entry)
    except ValueError:
        refuse(merged, entry, "it is no number", "set trainer.total_training_steps")


def _of_trainer(merged: Merged, key: str, entry: Entry) -> None:
    if not is_empty(entry):
        merged.put(f"trainer.{key.rpartition('.')[2]}", entry.value, entry)


# Name in a rule -> its function.
ASYNCHRONOUS: dict[str, Callable[[Merged, str, Entry], None]] = {
    "staleness": _staleness,
    "partial": _partial,
    "sync_step": _sync_step,
    "old_policy": _old_policy,
    "total_prompts": _total_prompts,
    "of_trainer": _of_trainer,
}
