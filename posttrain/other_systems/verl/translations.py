"""What keys of verl mean in posttrain's settings, where it is more than another name; and conditions under which a key
does nothing in verl either."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from posttrain.config.choices import CRITIC_ESTIMATORS
from posttrain.config.merge import Entry, Merged
from posttrain.other_systems.verl.rule import NOTHING, ON, given, is_empty, number, plain, refuse

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_STRATEGY, _SUPERVISED_STRATEGY = f"{_ACTOR}.strategy", "fsdp.strategy"
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "auto": "auto"}
_ENGINES = ("dp", "fsdp", "fsdp2", "legacy")
_MANAGERS = ("naive", "dapo", "gdpo", "prime")

Translation = Callable[[Merged, str, Entry], None]
TRANSLATIONS: dict[str, Translation] = {}
"""Name in a rule -> its function."""


def translation(*, of_empty: bool = False) -> Callable[[Translation], Translation]:
    """Decorator: the function `_NAME` is the translation NAME. Values that say nothing are left alone, unless
    `of_empty`."""

    def register(function: Translation) -> Translation:
        def translate(merged: Merged, key: str, entry: Entry) -> None:
            if of_empty or not is_empty(entry):
                function(merged, key, entry)

        TRANSLATIONS[function.__name__.removeprefix("_")] = translate
        return function

    return register


def _put_number(merged: Merged, target: str, entry: Entry, convert: Callable[[float], int]) -> None:
    """Set `target` to what `convert` makes of the value; a problem if that is no number."""
    try:
        merged.put(target, convert(float(str(entry.value))), entry)
    except (ValueError, OverflowError):  # no number, or an infinite one
        refuse(merged, entry, "it is no number", f"set {target}")


@translation(of_empty=True)
def _dynamic(merged: Merged, key: str, entry: Entry) -> None:
    """True: passes are bounded by tokens alone, so that a bound on rows, if there is one, does not count."""
    prefix = key.removesuffix("use_dynamic_bsz")
    micro = f"{prefix}{'' if prefix in ('data.', 'reward_model.') else 'ppo_'}micro_batch_size_per_gpu"
    if plain(entry.value) not in ON:
        merged.note(f"`{entry.spelling}=False`: passes are bounded by rows ({micro}) and by tokens.")
        return
    old = merged.entries.get(micro)
    if old is not None and old.explicit and plain(old.value) not in NOTHING:
        merged.note(f"`{entry.spelling}=True`: passes are filled by tokens; `{old.spelling}={old.value}` is not used.")
    merged.entries[micro] = replace(entry, value=None, answer=None)


@translation()
def _share(merged: Merged, key: str, entry: Entry) -> None:
    """Rows over all workers, divided by the workers."""
    # Read as text: types are given later, when all keys have been answered. A 0 is reported then.
    workers = number(merged, "trainer.n_gpus_per_node", 1) * number(merged, "trainer.nnodes", 1) or 1
    _put_number(merged, f"{key}_per_gpu", entry, lambda rows: max(1, int(rows // workers)))


@translation()
def _floor(merged: Merged, key: str, entry: Entry) -> None:
    """The last learning rate, as a share of the first."""
    section = key.rpartition(".")[0]
    rate = number(merged, f"{section}.lr", merged.names.leaves[f"{section}.lr"].default)
    try:
        merged.put(f"{section}.min_lr_ratio", float(str(entry.value)) / rate, entry)
    except (ValueError, ZeroDivisionError):
        refuse(merged, entry, f"it is no share of {section}.lr={rate:g}", f"set {section}.min_lr_ratio")


@translation()
def _cpu_optimizer(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) in ON:
        merged.put(f"{key.split('.optim.')[0]}.fsdp_config.optimizer_offload", True, entry)


@translation()
def _offload(merged: Merged, key: str, entry: Entry) -> None:
    section = key.rpartition(".")[0]
    for name in ("param_offload", "optimizer_offload"):
        if plain(entry.value) in ON and f"{section}.{name}" in merged.names.leaves:
            merged.entries[f"{section}.{name}"] = replace(entry, value=True, answer=None)


@translation()
def _deterministic(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) in ON:
        merged.put("trainer.deterministic", True, entry)


@translation()
def _dtype(merged: Merged, key: str, entry: Entry) -> None:
    target = f"{_MODEL}.dtype" if f"{_MODEL}.dtype" in merged.names.leaves else "model.dtype"
    if ".megatron" in key and plain(merged.value(_STRATEGY)) != "megatron":
        merged.note(f"`{entry.spelling}` is not needed here: {_STRATEGY} is not megatron.")
        return
    if plain(entry.value) in _DTYPES:
        merged.put(target, _DTYPES[plain(entry.value)], entry)
    else:
        refuse(merged, entry, "this type is not offered", f"set {target} to bfloat16 or float32")


@translation()
def _stored_dtype(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) in ("bf16", "bfloat16"):
        _dtype(merged, key, entry)
        merged.note(f"`{entry.spelling}={entry.value}`: computed in bfloat16; the optimizer's weights stay float32.")
    elif plain(entry.value) not in ("fp32", "float32"):
        refuse(merged, entry, "this type is not offered", "set it to fp32 or bf16")


@translation()
def _contents(merged: Merged, key: str, entry: Entry) -> None:
    # A list, but read as text: only this one entry of it has a counterpart.
    if "hf_model" in plain(entry.value):
        merged.put("trainer.export_hf", "all", entry)


@translation()
def _one_checkpoint(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) in ON:
        merged.put("trainer.max_ckpt_to_keep", 1, entry)


@translation()
def _critic(merged: Merged, key: str, entry: Entry) -> None:
    name = merged.value("algorithm.adv_estimator")
    # The estimator decides; a script that says the same is right, and one that says otherwise expects another run.
    if (plain(entry.value) in ON) == (name in CRITIC_ESTIMATORS):
        return
    has = "has a critic" if name in CRITIC_ESTIMATORS else "has none"
    refuse(merged, entry, f"the estimator {name} {has}", "remove it; algorithm.adv_estimator=gae has a critic")


@translation()
def _bypass(merged: Merged, key: str, entry: Entry) -> None:
    merged.put(f"{_ACTOR}.old_log_probs", "rollout" if plain(entry.value) in ON else "trainer", entry)


@translation()
def _loss_type(merged: Merged, key: str, entry: Entry) -> None:
    """REINFORCE or the clipped loss, in bypass mode."""
    section, loss = key.rpartition(".")[0], f"{_ACTOR}.policy_loss.loss_mode"
    if plain(entry.value) == "ppo_clip":
        return
    if plain(entry.value) != "reinforce":
        refuse(merged, entry, "it is neither ppo_clip nor reinforce", f"set {loss}")
    elif given(merged, f"{section}.bypass_mode") not in ON:
        merged.note(f"`{entry.spelling}={entry.value}` is not needed here: {section}.bypass_mode is not on.")
    else:
        # In verl this key replaces the loss; a script that also names the default loss means nothing by it.
        if plain(merged.value(loss)) == "vanilla":
            merged.entries.pop(loss, None)
        merged.put(loss, "gpg", entry)


@translation()
def _lower(merged: Merged, key: str, entry: Entry) -> None:
    target = key.removesuffix("_lower")
    upper = merged.entries.get(target)
    # `low_high` says both already.
    if upper is not None and "_" in str(upper.value):
        return
    if upper is None or plain(upper.value) in NOTHING:
        refuse(merged, entry, f"there is no {target} beside it", f"set {target}={entry.value}_HIGH")
        return
    both = f"{entry.value}_{upper.value}"
    merged.note(f"`{entry.spelling}={entry.value}` with `{upper.spelling}={upper.value}` is `{target}={both}`.")
    upper.value = both


@translation()
def _gen_batch(merged: Merged, key: str, entry: Entry) -> None:
    batch = merged.value("data.train_batch_size")
    filtered = merged.entries.get("algorithm.filter_groups.enable")
    if plain(entry.value) == plain(batch):
        return
    if any(key.startswith("async_training.") for key in merged.elsewhere):
        merged.note(f"`{entry.spelling}={entry.value}`: prompts are asked for in batches of {batch}.")
        return
    if filtered is not None and plain(filtered.value) in ON:
        merged.note(
            f"`{entry.spelling}={entry.value}`: dynamic sampling generates {batch} prompts at a time "
            "(data.train_batch_size); surplus groups serve the next step."
        )
        return
    why = f"each step generates data.train_batch_size={batch} prompts"
    refuse(merged, entry, why, "remove it, or set data.train_batch_size")


@translation(of_empty=True)
def _manager(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) in _MANAGERS or is_empty(entry):
        merged.note(
            f"`{entry.spelling}={entry.value}`: one manager does it (reward.overlong_buffer, reward.functions, the "
            "parts that a function gives)."
        )
        return
    do = (
        "write a reward function (custom_reward_function.path=FILE); one that scores all responses of a prompt at once "
        "takes (completions, ground_truths). `python3 -m verl.trainer.main_ppo` of the package posttrain-verl calls "
        "`batch` and managers of your own as verl does"
    )
    refuse(merged, entry, "there is one manager of rewards", do)


@translation()
def _reward_model_pool(merged: Merged, key: str, entry: Entry) -> None:
    """So many workers on each of so many machines, where the pool is switched on."""
    section, _, name = key.rpartition(".")
    is_on = given(merged, f"{section}.enable_resource_pool") in ON
    if name != "enable_resource_pool":
        if not is_on:
            merged.note(f"`{entry.spelling}={entry.value}` has no effect: {section}.enable_resource_pool is not on.")
        return
    if not is_on:
        return
    said = [given(merged, f"{section}.{part}") for part in ("nnodes", "n_gpus_per_node")]
    machines, each = said[0] or "1", said[1] or str(int(number(merged, "trainer.n_gpus_per_node", 1)))
    if machines.isdigit() and each.isdigit() and int(machines) * int(each):
        merged.put("reward_model.n_workers", int(machines) * int(each), entry)
    else:
        why = f"{section}.nnodes={machines} x n_gpus_per_node={each} is no number of workers"
        refuse(merged, entry, why, "set reward_model.n_workers")


@translation()
def _longest(merged: Merged, key: str, entry: Entry) -> None:
    limit = number(merged, "data.max_response_length", 0)
    if plain(entry.value) not in (plain(int(limit)), plain(limit)):
        why = f"the overlong buffer ends at data.max_response_length={limit:g}"
        refuse(merged, entry, why, "set both to the same number")


@translation(of_empty=True)
def _engine(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) == "megatron":
        if key != "optim":  # the optimizer's group is that of the engine
            merged.put(_SUPERVISED_STRATEGY if key == "engine" else _STRATEGY, "megatron", entry)
        return
    if plain(entry.value) in _ENGINES or is_empty(entry):
        merged.note(f"`{entry.spelling}={entry.value}`: FSDP is the engine.")
        return
    name = "fsdp" if key in ("engine", "optim") else "dp"
    do = f"set {key}={name}: keys of other engines then have no effect"
    refuse(merged, entry, "this engine is not built in this version", do)


@translation(of_empty=True)
def _megatron_offload(merged: Merged, key: str, entry: Entry) -> None:
    if plain(merged.value(_STRATEGY)) == "megatron":
        role, _, name = key.rpartition(".")
        merged.put(f"{role.rpartition('.')[0]}.fsdp_config.{name}", plain(entry.value) in ON, entry)
    else:
        merged.note(f"`{entry.spelling}` is not needed here: {_STRATEGY} is not megatron.")


@translation(of_empty=True)
def _megatron_sizes(merged: Merged, key: str, entry: Entry) -> None:
    name = key.rpartition(".")[2].replace("_model_", "_")
    # The dict may have been given whole or key by key, and may still be text.
    actors = merged.value(f"{_ACTOR}.megatron_config")
    wanted = actors.get(name, 1) if isinstance(actors, dict) else 1
    inside = merged.entries.get(f"{_ACTOR}.megatron_config.{name}")
    wanted = inside.value if inside is not None else wanted
    own, wanted = ("1" if plain(value) in NOTHING else plain(value) for value in (entry.value, wanted))
    if plain(merged.value(_STRATEGY)) != "megatron":
        merged.note(f"`{entry.spelling}` is not needed here: {_STRATEGY} is not megatron.")
    elif own != wanted:
        why = f"reference and critic are cut as the actor is, over {wanted}"
        refuse(merged, entry, why, f"set {_ACTOR}.megatron_config.{name}={entry.value}, which holds for all")


@translation(of_empty=True)
def _supervised_sizes(merged: Merged, key: str, entry: Entry) -> None:
    """Of SFT and reward models: the sizes by which Megatron cuts the model, where it is the engine."""
    name = key.rpartition(".")[2].replace("_model_", "_")
    if "megatron" in (given(merged, "engine"), plain(merged.value(_SUPERVISED_STRATEGY))):
        merged.add(replace(entry, spelling=f"fsdp.megatron_config.{name}", answer=None))
    else:
        merged.note(f"`{entry.spelling}` is not needed here: {_SUPERVISED_STRATEGY} is not megatron.")


@translation()
def _same_engine(merged: Merged, key: str, entry: Entry) -> None:
    """Of the reference and the critic: the actor's engine, by any of its names."""
    actors, own = plain(merged.value(_STRATEGY)), plain(entry.value)
    # All roles of a run share one engine, so that they plan the same passes.
    if own == actors or {own, actors} <= {"fsdp", "fsdp2"}:
        return
    name = "fsdp2" if actors in ("fsdp", "fsdp2") else actors
    refuse(merged, entry, f"it is computed by the actor's engine, {actors}", f"remove it, or set {key}={name}")


@translation(of_empty=True)
def _model_group(merged: Merged, key: str, entry: Entry) -> None:
    if plain(entry.value) != "hf_model":
        refuse(merged, entry, "verl's group files are not here", f"remove it; set {key}.path")


@translation()
def _user_turns(merged: Merged, key: str, entry: Entry) -> None:
    """Tool results and other words between the model's turns, which has one turn more than there are of these."""
    section, name = key.rpartition(".")[0], "max_assistant_turns"
    if plain(entry.value) == "0":  # 0 is no bound, as in verl
        return
    try:
        # The model speaks before the first and after the last of them.
        turns = int(str(entry.value)) + 1
    except ValueError:
        refuse(merged, entry, "it is no whole number", f"set {section}.{name}")
        return
    turns_set = merged.value(section)
    own = plain(turns_set.get(name) if isinstance(turns_set, dict) else None)
    if own.isdigit() and int(own) <= turns:
        merged.note(f"`{entry.spelling}={entry.value}`: `{section}.{name}={own}` ends conversations before.")
        return
    if own.isdigit():
        merged.note(f"`{entry.spelling}={entry.value}` is the lower bound: `{section}.{name}={turns}`, not {own}.")
    merged.add(replace(entry, spelling=f"{section}.{name}", value=turns, is_file=False, answer=None))


@translation()
def _sampler(merged: Merged, key: str, entry: Entry) -> None:
    """The file and the class are one name."""
    section, _, which = key.rpartition(".")
    other = merged.elsewhere.get(f"{section}.{'class_name' if which == 'class_path' else 'class_path'}")
    if other is None or is_empty(other):
        refuse(merged, entry, "a sampler has a file and a class", f"set {section}=FILE.py:CLASS")
    elif which == "class_path":
        merged.put(section, f"{entry.value}:{other.value}", entry)


# verl's fully asynchronous trainer. There a trainer's step takes `require_batches` mini-batches, weights are synced
# every `trigger_parameter_sync_step` of them, and `staleness_threshold` is how much may be generated ahead, as a share
# of what is trained between two syncs. Here that is a step, of `data.train_batch_size` prompts in mini-batches of the
# same size.
_SECTION, _BATCH = "async_training", "data.train_batch_size"


@translation()
def _staleness(merged: Merged, key: str, entry: Entry) -> None:
    """A share of a step counts as a whole one: the bound here is in policy versions."""
    _put_number(merged, "trainer.max_staleness", entry, math.ceil)


@translation()
def _partial(merged: Merged, key: str, entry: Entry) -> None:
    merged.put("trainer.partial_rollout", plain(entry.value) in ON, entry)


def _prompts_between_syncs(merged: Merged) -> int:
    said = (given(merged, f"{_SECTION}.{name}") for name in ("require_batches", "trigger_parameter_sync_step"))
    counts = [float(text) if text.replace(".", "").isdigit() else 1.0 for text in said]
    return int(number(merged, f"{_ACTOR}.ppo_mini_batch_size", 1) * counts[0] * counts[1])


@translation()
def _sync_step(merged: Merged, key: str, entry: Entry) -> None:
    """As many prompts in a step as verl trains between two syncs; verl's scripts have a batch size of 0."""
    old = merged.entries.get(_BATCH)
    if old is not None and old.explicit and plain(old.value) not in ("0", str(_prompts_between_syncs(merged))):
        merged.note(f"`{entry.spelling}={entry.value}`: weights are synced after every {_BATCH}={old.value} prompts.")
        return
    merged.entries.pop(_BATCH, None)
    merged.put(_BATCH, _prompts_between_syncs(merged), entry)


@translation(of_empty=True)
def _old_policy(merged: Merged, key: str, entry: Entry) -> None:
    """The rollout's log-probs are the old ones, unless the trainer is to compute those of the policy that learns."""
    weights = "algorithm.rollout_correction.rollout_is"
    if given(merged, f"{_SECTION}.compute_prox_log_prob") in ON:
        if not merged.is_set(weights):  # without them, a step of one update would be clipped around the rollout's
            merged.put(weights, "token", entry)
    elif given(merged, f"{_SECTION}.use_rollout_log_probs") in ON:
        merged.put(f"{_ACTOR}.old_log_probs", "rollout", entry)


@translation()
def _total_prompts(merged: Merged, key: str, entry: Entry) -> None:
    size = number(merged, _BATCH, 0) or _prompts_between_syncs(merged) or 1
    _put_number(merged, "trainer.total_training_steps", entry, lambda prompts: max(1, int(prompts // size)))


@translation()
def _of_trainer(merged: Merged, key: str, entry: Entry) -> None:
    merged.put(f"trainer.{key.rpartition('.')[2]}", entry.value, entry)


_FSDP_NAMES = ("fsdp", "fsdp2", "dp")


def _fsdp(merged: Merged, key: str) -> bool:
    """The user chose FSDP, so that settings of other engines do nothing."""
    role = next((role for role in ("critic", "reward_model") if key.startswith(f"{role}.")), _ACTOR)
    named = [given(merged, name) for name in (f"{role}.strategy", f"{_ACTOR}.strategy", "model_engine", "engine")]
    return any(name in _FSDP_NAMES for name in named)


def _constant(merged: Merged, key: str) -> bool:
    """The learning rate stays where it is, so that the shape of its schedule does nothing."""
    section = key[: key.rindex("optim.") + len("optim")]
    entry = merged.entries.get(f"{section}.lr_scheduler_type")
    return entry is None or plain(entry.value) == "constant"


CONDITIONS: dict[str, Callable[[Merged, str], bool]] = {"fsdp": _fsdp, "constant": _constant}
