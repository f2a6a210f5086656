"""Settings that follow from others: keys that act on several settings, and defaults that depend on the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.algorithms.registry import ADV_ESTIMATORS, LOSS_KEY, POLICY_LOSSES, LossDeclaration
from posttrain.config.choices import DEFAULT_GROUP_SIZE, EMBEDDED, EMBEDDED_SIZES, GROUP_ESTIMATORS
from posttrain.config.merge import Entry, Merged
from posttrain.config.model import ADAPTER_CONFIG, read_adapter_config, stored_names
from posttrain.config.rollout import UNFILTERED
from posttrain.config.trainer import (
    AS_THE_ACTOR,
    DRY_RUN,
    HELD_OUT,
    NODE_RANK,
    ROLLOUT_EACH,
    ROLLOUT_MACHINES,
    ROLLOUT_WORKERS,
    TOGETHER,
    TORCHRUN,
)

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_MINI, _MICRO = f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_BATCH = "data.train_batch_size"


def derive(merged: Merged, provided: frozenset[str]) -> None:
    """Resolve every derived key; `provided` are keys whose value a Python caller hands over as an object."""
    _reward_kind(merged)
    _kl_coefficient(merged)
    _lora(merged)
    _reference_sizes(merged)
    derive_command(merged)
    _layout(merged)
    _staleness(merged)
    _recorded_routes(merged)
    _embedded(merged, provided)
    _held_out(merged, provided)
    _group_size(merged)
    _aggregation(merged)
    _accumulation(merged)
    _fit_mini_batch(merged)
    _old_log_probs(merged)  # behind the sizes: it depends on the updates of a step
    _importance_weights(merged)


def derive_command(merged: Merged) -> None:
    """Which of the machines this is, and whether it is only looked at."""
    dry = merged.take(DRY_RUN)
    merged.dry_run = dry is not None and dry.value
    entry, machines = merged.take(NODE_RANK), merged.value("trainer.nnodes")
    if entry is None:
        return
    if 0 <= entry.value < machines or entry.source == TORCHRUN:  # check_torchrun reports what contradicts torchrun
        merged.node_rank = entry.value
        return
    what = f"`{entry.spelling}={entry.value}`: trainer.nnodes={machines}, and the machines are 0 to {machines - 1}."
    do = f"give one of them on each machine, each its own, or set trainer.nnodes to {max(entry.value, 0) + 1} or more"
    merged.refuse(what, entry.source, do, "trainer.nnodes")


def _layout(merged: Merged) -> None:
    """Workers that only generate, in verl's words: so many on each of so many machines, and that there are any."""
    machines, each = merged.take(ROLLOUT_MACHINES), merged.take(ROLLOUT_EACH)
    given = [entry for entry in (machines, each) if entry is not None]
    if given:
        count = (1 if machines is None else machines.value) * (
            merged.value("trainer.n_gpus_per_node") if each is None else each.value
        )
        merged.put(ROLLOUT_WORKERS, count, max(given, key=lambda entry: entry.rank))
    entry, apart = merged.take(TOGETHER), merged.value(ROLLOUT_WORKERS)
    if entry is None or entry.value == (not apart):
        return
    if entry.value:
        what = f"`{entry.spelling}=True` has the same workers train and generate, but `{ROLLOUT_WORKERS}={apart}`."
        do = f"remove {entry.spelling}, or set {ROLLOUT_WORKERS}=0"
    else:
        what = f"`{entry.spelling}=False` has other workers generate than train, but nothing says how many."
        do = f"set {ROLLOUT_WORKERS}"
    merged.refuse(what, entry.source, do, ROLLOUT_WORKERS)


def _reference_sizes(merged: Merged) -> None:
    """The reference's sizes may be written, but not differ from the actor's."""
    for key, actors in AS_THE_ACTOR.items():
        entry = merged.take(key)
        if entry is not None and entry.value != merged.value(actors):
            what = (
                f"`{entry.spelling}={entry.value}`: the reference is cut as the actor is, over {merged.value(actors)}."
            )
            do = f"set {actors}={entry.value}, which holds for both, or remove {entry.spelling}"
            merged.refuse(what, entry.source, do, actors)


def _reward_kind(merged: Merged) -> None:
    for key in ("reward.type", "trainer.reward_fn.type"):
        kind = merged.take(key)
        if kind is None:
            continue
        if kind.value in ("function", "model"):
            merged.put("reward_model.enable", kind.value == "model", kind)
        else:
            what = f"`{kind.spelling}={kind.value}` is not known; known: function, model."
            merged.refuse(what, kind.source, f"set {kind.spelling}=function")


def _kl_coefficient(merged: Merged) -> None:
    entry = merged.take("algorithm.kl_coef")
    if entry is None:
        return
    if entry.value < 0:
        what = f"`{entry.spelling}={entry.value}`: the coefficient must not be negative."
        merged.refuse(what, entry.source, "give 0 (no KL) or a positive number")
    elif merged.value("algorithm.use_kl_in_reward"):
        merged.put("algorithm.kl_ctrl.kl_coef", entry.value, entry)
        merged.note(
            f"`algorithm.kl_coef={entry.value}` sets algorithm.kl_ctrl.kl_coef, as KL is in the reward "
            "(algorithm.use_kl_in_reward=True)."
        )
    elif entry.value > 0:
        merged.put(f"{_ACTOR}.use_kl_loss", True, entry)
        merged.put(f"{_ACTOR}.kl_loss_coef", entry.value, entry)
        merged.note(f"`algorithm.kl_coef={entry.value}` means the loss: use_kl_loss=True, kl_loss_coef={entry.value}.")
    else:
        merged.put(f"{_ACTOR}.use_kl_loss", False, entry)
        merged.note("`algorithm.kl_coef=0` means the loss: use_kl_loss=False, no KL term.")


def _embedded(merged: Merged, provided: frozenset[str]) -> None:
    """Without a model or data the embedded ones serve."""
    named = {f"{_MODEL}.path": "model", "data.train_files": "data"}
    absent = [key for key in named if merged.value(key) is None and key not in provided and key not in merged.bad]
    if not absent:
        return
    for key in absent:
        merged.set_default(key, "embedded", "nothing was named")
    what = " and ".join(named[key] for key in absent)
    keys = " and ".join(absent)
    merged.note(
        f"No {what} named: what posttrain brings along (`embedded`) serves; set {keys} to use your own. If your "
        "command does: a comment or an empty line after `\\` cut it short."
    )
    if len(absent) == len(named):
        # The general defaults are sizes for real models and data.
        fitted = [key for key in EMBEDDED_SIZES if not merged.is_set(key) and key not in merged.bad]
        sizes_by_key = {key: EMBEDDED[key] for key in fitted}
        if merged.is_set(_MINI) and _BATCH in sizes_by_key:
            sizes_by_key[_BATCH] = max(sizes_by_key[_BATCH], merged.value(_MINI))
        for key, size in sizes_by_key.items():
            merged.set_default(key, size, "the embedded task's size")
        if fitted:
            sizes = ", ".join(f"{key}={size}" for key, size in sizes_by_key.items())
            merged.note(f"Sizes that are not set are the embedded task's: {sizes}.")


def _held_out(merged: Merged, provided: frozenset[str]) -> None:
    """The embedded task's sums say nothing about a run on other rows: some of its own are held out instead."""
    val = merged.entries.get("data.val_files")
    own = "data.train_files" in provided or merged.value("data.train_files") != "embedded"
    if val is None or val.value != "embedded" or not val.source.startswith("preset") or not own:
        return
    if "data.val_files" not in provided:
        merged.set_default("data.val_files", HELD_OUT, "own training rows")


def _group_size(merged: Merged) -> None:
    estimator, key = merged.value("algorithm.adv_estimator"), f"{_ROLLOUT}.n"
    if estimator not in GROUP_ESTIMATORS or key in merged.bad or merged.value(key) != 1:
        return
    if merged.is_set(key):
        what = f"`{key}=1` under `{estimator}`: one response per prompt has no group to be compared with."
        merged.refuse(what, merged.where(key), f"set {key} to 2 or more (5 is usual)", key)
        return
    # Corrected instead of refused: 1 is PPO's default, which a group estimator never means.
    merged.set_default(key, DEFAULT_GROUP_SIZE, f"under {estimator}")
    merged.note(f"{key} was not set; under {estimator} it becomes {DEFAULT_GROUP_SIZE}.")


def _aggregation(merged: Merged) -> None:
    """Token losses are aggregated as the loss declares, unless the user or a preset says otherwise."""
    if not merged.where(f"{_ACTOR}.loss_agg_mode").startswith("preset"):
        _as_the_loss_declares(merged, "loss_agg_mode")


def _old_log_probs(merged: Merged) -> None:
    """Old log-probs come from where the loss's paper takes them, unless the user says otherwise."""
    _as_the_loss_declares(merged, "old_log_probs")
    key, loss = f"{_ACTOR}.old_log_probs", _declared_loss(merged)
    if loss is None or loss.old_log_probs is not None or merged.is_set(key) or key in merged.bad:
        return
    if not loss.clips_ratio or not _learns_from_old_samples_at_once(merged):
        return
    merged.set_default(key, "rollout", "under trainer.max_staleness")
    merged.note(
        f"{key}=rollout under trainer.max_staleness, as a step has one update: the ratio is clipped around the "
        "policies that sampled. algorithm.rollout_correction.rollout_is=token gives importance weights instead."
    )


def _as_the_loss_declares(merged: Merged, setting: str) -> None:
    key, declared = f"{_ACTOR}.{setting}", getattr(_declared_loss(merged), setting, None)
    if declared is not None and not merged.is_set(key) and key not in merged.bad:
        merged.set_default(key, declared, f"under {merged.value(LOSS_KEY)}")


def _declared_loss(merged: Merged) -> LossDeclaration | None:
    name = merged.value(LOSS_KEY)
    return POLICY_LOSSES.get(name) if isinstance(name, str) else None


def _learns_from_old_samples_at_once(merged: Merged) -> bool:
    """Whether a step has one update and its samples may be two updates old, or older.

    The ratio to the policy that begins to learn is then 1 and no clip acts, so what the updates in between have
    corrected already would be corrected again (docs/asynchronous.md has figures)."""
    bound = merged.value("trainer.max_staleness")
    batch, mini, epochs = (merged.value(key) for key in (_BATCH, _MINI, f"{_ACTOR}.ppo_epochs"))
    whole = all(isinstance(value, int) for value in (bound, batch, mini, epochs))
    if not (whole and bound > 1 and batch <= mini and epochs == 1):
        return False
    corrected = any(merged.is_set(key) for key in merged.entries if key.startswith("algorithm.rollout_correction."))
    # The ratio is to the policy without filters and penalties, which only importance weights correct for.
    filtered = any(merged.value(f"{_ROLLOUT}.{name}") != value for name, value in UNFILTERED.items())
    # What the trainer computes beside old log-probs must be of the same policy: routes, sums of squared probabilities.
    name = merged.value("algorithm.adv_estimator")
    estimator = ADV_ESTIMATORS.get(name) if isinstance(name, str) else None
    replayed = merged.value(f"{_ACTOR}.router_replay.mode") == "R2"
    computed = replayed or (estimator is not None and estimator.needs_sum_pi_squared)
    return not (corrected or filtered or computed)


def _staleness(merged: Merged) -> None:
    """One-step-off is a staleness of one; a contradiction is left for the checks."""
    if merged.value("trainer.one_step_off") is True and not merged.is_set("trainer.max_staleness"):
        merged.set_default("trainer.max_staleness", 1, "under trainer.one_step_off")


def _importance_weights(merged: Merged) -> None:
    """Samples of another policy than the one that learns get importance weights, unless the user says what else is
    done about them: in asynchronous training that policy is older, with fp8 it is rounded otherwise."""
    section, rounding = "algorithm.rollout_correction", [f"{role}.quantization" for role in (_ROLLOUT, _ACTOR)]
    said = (f"{section}.rollout_is", f"{section}.rollout_rs", f"{_ACTOR}.old_log_probs")
    if any(merged.is_set(key) or key in merged.bad for key in said) or merged.value(said[2]) == "rollout":
        return
    bound = merged.value("trainer.max_staleness")
    if isinstance(bound, int) and bound > 0:
        one = merged.value("trainer.one_step_off") is True
        switch, why = "trainer.one_step_off" if one else "trainer.max_staleness", "as responses are older than a step"
    elif rounded := [key for key in rounding if merged.value(key) is not None]:
        switch, why = rounded[0], "as its log-probs differ from the trainer's"
    else:
        return
    merged.set_default(said[0], "token", f"under {switch}")
    merged.note(f"{said[0]}=token under {switch}, {why}; null leaves that alone.")


def _recorded_routes(merged: Merged) -> None:
    """Replaying the rollout's routes records them, unless the user says otherwise, which is then rejected."""
    mode, key = f"{_ACTOR}.router_replay.mode", f"{_ROLLOUT}.enable_rollout_routing_replay"
    if merged.value(mode) == "R3" and not merged.is_set(key) and key not in merged.bad:
        merged.set_default(key, True, f"under {mode}=R3")


def _accumulation(merged: Merged) -> None:
    """Rows per optimizer step as micro-batch x accumulation x workers, turned into prompts."""
    entry = merged.take("trainer.gradient_accumulation")
    if entry is None:
        return
    # Both would say the same thing in different units; which one is meant cannot be known.
    if merged.is_set(_MINI):
        what = f"`{entry.spelling}` and `{_MINI}` both say how many responses one optimizer step takes."
        where = f"{entry.source}, and {merged.where(_MINI)}"
        merged.refuse(what, where, "keep one of them", _MINI)
        return
    micro, n = merged.value(_MICRO), merged.value(f"{_ROLLOUT}.n")
    workers = merged.value("trainer.n_gpus_per_node") * merged.value("trainer.nnodes")
    if micro is None or entry.value < 1:
        what = f"`{entry.spelling}={entry.value}` needs a micro-batch size to count with, and a value of at least 1."
        merged.refuse(what, entry.source, f"set trainer.micro_batch_size, or set {_MINI} instead")
        return
    rows = micro * entry.value * workers
    arithmetic = f"{micro} (micro-batch) x {entry.value} (accumulation) x {workers} (workers) = {rows} responses"
    if rows % n:
        what = f"{arithmetic}, but rollout.n is {n}, and {rows} / {n} = {rows / n:g} is not a whole number of prompts."
        do = f"choose micro-batch x accumulation x workers as a multiple of {n}, or set {_MINI}"
        merged.refuse(what, entry.source, do, _MINI)
        return
    merged.put(_MINI, rows // n, entry)
    merged.note(f"{_MINI}={rows // n} prompts: {arithmetic}, by {n} responses per prompt.")


def _fit_mini_batch(merged: Merged) -> None:
    """A mini-batch that is not set is at most as large as the batch."""
    batch, mini = merged.value("data.train_batch_size"), merged.value(_MINI)
    if mini > batch >= 1 and not merged.is_set(_MINI) and _MINI not in merged.bad:
        merged.set_default(_MINI, batch, "the whole batch")
        merged.note(f"{_MINI} was not set; it becomes {batch}, the whole batch (data.train_batch_size).")


def _lora(merged: Merged) -> None:
    """Keys of other systems that are checked against what the run does by itself."""
    kind = merged.take(f"{_ACTOR}.peft_config.peft_type")
    enable = merged.take(f"{_ROLLOUT}.enable_lora")
    rank = merged.value(f"{_MODEL}.lora_rank")
    if kind is not None and kind.value.lower() != "lora":
        what = f"`{kind.spelling}={kind.value}` is not known; known: lora."
        merged.refuse(what, kind.source, "set it to lora, or remove it to train all weights")
    elif kind is not None and rank == 0:
        what = f"`{kind.spelling}=lora`, but the rank is 0, so that there would be no adapters."
        merged.refuse(what, kind.source, f"set {_MODEL}.lora_rank (or lora_r), e.g. to 16")
    if enable is not None and enable.value != (rank > 0):
        what = f"`{enable.spelling}={enable.value}`, but {_MODEL}.lora_rank={rank}: the rollout follows the actor."
        do = "remove it" if rank > 0 else f"set {_MODEL}.lora_rank above 0, or remove it"
        merged.refuse(what, enable.source, do)


def take_adapter(merged: Merged, cwd: Path, section: str, heads: Sequence[str]) -> None:
    """Rank, alpha and targets from the adapter that the run starts from; other values given for them are errors.

    `section` holds the settings of the trained model; `heads` are modules that an adapter may hold whole there.
    """
    path = f"{section}.lora_adapter_path"
    entry = merged.entries.get(path)
    if entry is None or entry.value is None or path in merged.bad:
        return
    settings = read_adapter_config(cwd / entry.value, heads)
    if isinstance(settings, str):
        return  # the checks of this machine report what is wrong with the folder
    for name in ("r", "lora_alpha", "target_modules", "exclude_modules"):
        key = f"{section}.{'lora_rank' if name == 'r' else name}"
        value = stored_names(settings) if name == "target_modules" else settings.get(name)
        given = merged.entries.get(key)
        if given is not None and given.explicit and not _same(given.value, value):
            what = f"`{given.spelling}={given.value}`, but the adapter in {entry.value} has {name}={value} "
            what += f"({ADAPTER_CONFIG})."
            do = f"remove {key}, which the adapter decides, or remove {path}"
            merged.refuse(what, f"{given.where(key)}, and {entry.where(path)}", do, key)
            merged.bad.add(key)
        elif given is None or not given.explicit:
            merged.entries[key] = Entry(value, key, f"{entry.value}/{ADAPTER_CONFIG}", explicit=False)


def _same(given: Any, stored: Any) -> bool:
    if isinstance(given, list) and isinstance(stored, list):
        return set(given) == set(stored)
    return given == stored
