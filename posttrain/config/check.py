"""Checks of meaning: ranges, names, settings that contradict each other; and the notes that a run prints first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES
from posttrain.config.checked import Checked, Finding, check_choice, nearest_name
from posttrain.config.choices import CRITIC_ESTIMATORS, GROUP_ESTIMATORS, LOGGERS, NOT_BUILT_VALUES, REJECTIONS
from posttrain.config.rollout import UNFILTERED
from posttrain.config.schema import leaves, lookup
from posttrain.config.trainer import (
    COLOCATED_WORKERS,
    REFERENCE_WORKERS,
    ROLLOUT_WORKERS,
    continues_responses,
    divisors_of_fewer_workers,
    divisors_of_own_workers,
    divisors_of_workers,
    one_worker,
    own_workers_of,
    rollout_workers_of,
    workers_of,
)
from posttrain.config.values import split_hint

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_OVERSAMPLE = f"{_ROLLOUT}.oversample"
_MINI, _BATCH = f"{_ACTOR}.ppo_mini_batch_size", "data.train_batch_size"
_FSDP = {f"{_ACTOR}.strategy": ("fsdp2", "fsdp")}


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
    for key, leaf in leaves(type(checked.config)).items():
        value, limits = lookup(checked.config, key), leaf.range
        if value is None:
            continue
        # NaN is in no range, and is reported as a number that is not finite.
        if limits is not None and value == value and not limits.allows(value):
            do = f"give a value that is {limits.words} ({leaf.sentence})"
            yield checked.problem(f"`{key}={value}` is out of range: it must be {limits.words}.", do, key)
            continue
        unlimited = limits is not None and limits.may_be_infinite
        if split_hint(leaf.hint)[0] is float and not unlimited and not math.isfinite(value):
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


# Arguments of `ray.init` that are not settings -> what serves instead.
RAYS_PLACE = {
    "address": "set RAY_ADDRESS=HOST:6379 before the command",
    "_temp_dir": "set TMPDIR before the command: Ray's folder is made there, and removed with the run",
}


def check_ray(checked: Checked) -> Iterator[Finding]:
    """Where Ray runs is the environment's; all else Ray checks itself."""
    key = "trainer.ray_init"
    for name in RAYS_PLACE.keys() & checked.config.trainer.ray_init.keys():
        yield checked.problem(f"`{key}.{name}` is not a setting here.", RAYS_PLACE[name], key)


def check_one_process(checked: Checked) -> Iterator[Finding]:
    """A strategy that shards over workers is accepted, with a note that nothing is sharded."""
    named = sorted(key for key in checked.explicit if key.endswith(".strategy"))
    if named and one_worker(checked.config):
        yield f"{', '.join(named)}: one process holds the whole model, nothing is sharded."


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
    if algorithm.use_kl_in_reward and ADV_ESTIMATORS[name].kl_belongs_in_loss:
        yield f"KL is in the reward under {name}; the usual place is the loss ({_ACTOR}.use_kl_loss=True)."
    elif not (actor.use_kl_loss or algorithm.use_kl_in_reward):
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
    if config.algorithm.adv_estimator == "grpo" and started and missing:
        rest = " and ".join(missing)
        yield f"This is a part of DrGRPO; the whole of it also has {rest} (`algorithm=drgrpo` sets all)."


def _estimator(checked: Checked) -> Iterator[Finding]:
    if checked.config.algorithm.adv_estimator == "gae" and "algorithm.adv_estimator" not in checked.explicit:
        yield "The estimator was not set: the default gae builds a critic; for GRPO set algorithm.adv_estimator=grpo."
    warmup, steps = checked.config.trainer.critic_warmup, checked.config.trainer.total_training_steps
    if checked.config.algorithm.adv_estimator == "gae" and steps is not None and warmup >= steps > 0:
        yield f"trainer.critic_warmup={warmup} covers all {steps} steps of the run: the actor never changes."


def _losses_and_shaping(checked: Checked) -> Iterator[Finding]:
    config, actor = checked.config, checked.config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    loss, estimator = POLICY_LOSSES.get(name), ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    if loss is not None and loss.loss_agg_mode not in (None, actor.loss_agg_mode):
        usual = f"{_ACTOR}.loss_agg_mode={loss.loss_agg_mode}"
        yield f"{name} is usually aggregated by {usual}; here: {actor.loss_agg_mode}."
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if loss is not None and loss.clips_ratio and low > 1:
        key = f"{_ACTOR}.clip_ratio" if actor.clip_ratio_low is None else f"{_ACTOR}.clip_ratio_low"
        what = f"`{key}={low:g}` would let the ratio fall to {1 - low:g}; a ratio of probabilities is never below 0."
        yield checked.problem(what, f"set {_ACTOR}.clip_ratio_low to at most 1, which never clips; 0.2 is usual", key)
    if estimator is not None and estimator.reads_reward_parts and config.algorithm.use_kl_in_reward:
        what = f"{estimator.name} learns from the parts of the reward, so KL in the reward would be lost."
        do = f"set algorithm.use_kl_in_reward=False, and {_ACTOR}.use_kl_loss=True for KL in the loss"
        yield checked.problem(what, do, "algorithm.use_kl_in_reward", "algorithm.adv_estimator")
    buffer, limit = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len is not None and buffer.len > limit:
        what = f"reward.overlong_buffer.len={buffer.len} is more than data.max_response_length={limit}."
        yield checked.problem(what, f"set it to at most {limit}", "reward.overlong_buffer.len")
    early = {
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        _staleness_key(config): config.trainer.max_staleness,
    }
    for key, is_on in early.items():
        if is_on and estimator is not None and estimator.prompts_to_repeat is not None:
            what = f"{estimator.name} chooses the next step's prompts by this step's scores; {key} needs them before."
            off = 0 if key == "trainer.max_staleness" else False
            yield checked.problem(what, f"set {key}={off}", key, "algorithm.adv_estimator")
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        what = "algorithm.filter_groups looks for groups whose responses differ, but there is one response per prompt."
        do = "set actor_rollout_ref.rollout.n to 2 or more, or algorithm.filter_groups.enable=False"
        yield checked.problem(what, do, "algorithm.filter_groups.enable", "actor_rollout_ref.rollout.n")


def _sampling(checked: Checked) -> Iterator[Finding]:
    """Filters and penalties make what is sampled from another policy; a ratio to the rollout needs no weights."""
    section, rollout = checked.config.algorithm.rollout_correction, checked.config.actor_rollout_ref.rollout
    actor = checked.config.actor_rollout_ref.actor
    there = [f"{name}={rollout[name]:g}" for name, value in UNFILTERED.items() if rollout[name] != value]
    named = [name for name in ("rollout_is", "rollout_rs") if section[name] is not None]
    if there and not named:
        yield (
            f"Responses are sampled with {', '.join(there)}, but trained as if from the whole policy: log-probs are "
            "those before filters and penalties. algorithm.rollout_correction.rollout_is=token weighs by that."
        )
    name = actor.policy_loss.loss_mode
    loss = POLICY_LOSSES.get(name)
    has_ratio = loss is None or loss.has_ratio
    if "rollout_is" in named and not there and actor.old_log_probs == "rollout" and has_ratio:
        yield (
            f"Importance weights (rollout_is={section.rollout_is}) are measured and not applied: with "
            f"{_ACTOR}.old_log_probs=rollout the ratio of the loss {name} is already the one to the rollout. "
            f"{_ACTOR}.policy_loss.loss_mode=gpg is multiplied by them."
        )


def _rollout_correction(checked: Checked) -> Iterator[Finding]:
    section, key = checked.config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if section.rollout_is is not None and not _is_threshold(section.rollout_is_threshold):
        what = f"`{key}.rollout_is_threshold={section.rollout_is_threshold}` is not a threshold."
        do = "give a number above 0, or a range as low_high, e.g. 0.5_5.0"
        yield checked.problem(what, do, f"{key}.rollout_is_threshold")
    if section.rollout_rs is None:
        return
    names = [name.strip() for name in section.rollout_rs.split(",")]
    for name in names:
        if name not in REJECTIONS:
            what = f"`{key}.rollout_rs`: `{name}` is not known; known: {', '.join(REJECTIONS)}."
            yield checked.problem(what, nearest_name(name, REJECTIONS), f"{key}.rollout_rs")
    given = section.rollout_rs_threshold
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    if len(names) == 1 and isinstance(given, list):
        parts = [given]
    if len(parts) != len(names) or not all(_is_threshold(part) for part in parts):
        what = f"`{key}.rollout_rs={section.rollout_rs}` needs one threshold per name, but there is {given}."
        do = f"set {key}.rollout_rs_threshold, e.g. 0.5_2.0 for k1 or 0.01 for seq_mean_k3"
        yield checked.problem(what, do, f"{key}.rollout_rs_threshold", f"{key}.rollout_rs")


def _is_threshold(value: Any) -> bool:
    """A number above 0, or a pair low < high as text or list."""
    parts = value.split("_") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        return False
    return (len(numbers) == 1 and numbers[0] > 0) or (len(numbers) == 2 and 0 <= numbers[0] < numbers[1])


def _staleness_key(config: Any) -> str:
    """The setting by which the user asked for asynchronous training."""
    return "trainer.one_step_off" if config.trainer.one_step_off else "trainer.max_staleness"


def check_staleness(checked: Checked) -> Iterator[Finding]:
    """Workers that train cannot generate at the same time; one-step-off is a staleness of exactly one."""
    trainer, key = checked.config.trainer, _staleness_key(checked.config)
    if trainer.one_step_off and trainer.max_staleness != 1:
        what = f"`trainer.one_step_off=True` is a staleness of 1, but `trainer.max_staleness={trainer.max_staleness}`."
        do = "remove trainer.one_step_off; trainer.max_staleness alone says how old responses may be"
        yield checked.problem(what, do, "trainer.one_step_off", "trainer.max_staleness")
    elif trainer.max_staleness > 0 and not rollout_workers_of(checked.config):
        value, off = (True, False) if trainer.one_step_off else (trainer.max_staleness, 0)
        what = f"`{key}={value}` generates while it trains, but the same workers do both."
        do = f"set {ROLLOUT_WORKERS}=1 or more, which only generate, or {key}={off}"
        yield checked.problem(what, do, key)
    roles = getattr(checked.config, "actor_rollout_ref", None)
    if roles and roles.rollout.oversample > 0 and not continues_responses(trainer):
        what = f"`{_OVERSAMPLE}={roles.rollout.oversample:g}` leaves responses under way when weights change."
        do = "set trainer.max_staleness to 2 or more (or to 1 with trainer.partial_rollout=True), or oversample=0"
        yield checked.problem(what, do, _OVERSAMPLE)


def check_colocated_workers(checked: Checked) -> Iterator[Finding]:
    """More workers that generate than there are, or two settings that choose them."""
    colocated, workers = lookup(checked.config, COLOCATED_WORKERS), workers_of(checked.config)
    if colocated and rollout_workers_of(checked.config):
        what = (
            f"`{COLOCATED_WORKERS}={colocated}` has workers that train generate, but {ROLLOUT_WORKERS} has others do."
        )
        yield checked.problem(what, "set one of the two to 0", COLOCATED_WORKERS)
    elif colocated > workers:
        what = f"`{COLOCATED_WORKERS}={colocated}`: only {workers} worker(s) train (trainer.n_gpus_per_node x nnodes)."
        yield checked.problem(what, f"set it to {workers} or less, or 0 for all of them", COLOCATED_WORKERS)


def check_sizes(checked: Checked) -> Iterator[Finding]:
    """Sizes that do not divide the workers. One worker has nothing to cut its weights over, which is only noted."""
    workers = workers_of(checked.config)
    for key, size in divisors_of_workers(checked.config).items():
        if workers % size == 0:
            continue
        what = f"`{key}={size}` does not divide the {workers} worker(s) of the run (trainer.n_gpus_per_node x nnodes)."
        fitting = ", ".join(str(count) for count in range(1, workers + 1) if workers % count == 0)
        yield checked.problem(what, f"set {key} to one of {fitting}, or another number of workers", key)


def check_own_workers(checked: Checked) -> Iterator[Finding]:
    """Roles that cannot have workers of their own in this run, and sizes that do not divide those."""
    config = checked.config
    own = own_workers_of(config)
    if "reference" in own and config.actor_rollout_ref.model.lora_rank > 0:
        key = REFERENCE_WORKERS
        what = f"`{key}={own['reference']}` with adapters: the reference is the policy's own base, and takes no memory."
        yield checked.problem(what, f"set {key}=0, or {_MODEL}.lora_rank=0", key, f"{_MODEL}.lora_rank")
    for key, size, workers in divisors_of_own_workers(config):
        if (count := lookup(config, workers)) % size:
            what = f"`{key}={size}` does not divide the {count} worker(s) of {workers}."
            fitting = ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
            yield checked.problem(what, f"set {key} to one of {fitting}, or {workers} to a multiple", key, workers)


def check_fewer_machines(checked: Checked) -> Iterator[Finding]:
    """A layout that the fewest machines of the run could not have."""
    key, trainer = "trainer.min_nnodes", checked.config.trainer
    least = trainer.min_nnodes
    if least is None:
        return
    workers, name = least * trainer.n_gpus_per_node, f"`{key}={least}`"
    if least > trainer.nnodes:
        what = f"{name} is more than trainer.nnodes={trainer.nnodes}."
        yield checked.problem(
            what, "set it to the fewest machines that the run may continue with", key, "trainer.nnodes"
        )
    if trainer.max_restarts == 0:
        what = f"{name} continues after a lost machine, but trainer.max_restarts=0 ends the run."
        yield checked.problem(what, "remove one of them", key, "trainer.max_restarts")
    sizes = divisors_of_fewer_workers(checked.config)
    if hasattr(checked.config, "actor_rollout_ref") and lookup(checked.config, COLOCATED_WORKERS) > workers:
        sizes[COLOCATED_WORKERS] = lookup(checked.config, COLOCATED_WORKERS)
    for other, size in sizes.items():
        if workers % size:
            what = f"{name} leaves {workers} worker(s), too few for {other}={size} or no multiple of it."
            yield checked.problem(what, f"raise {key}, or lower {other}", key, other)


def check_quantization(checked: Checked) -> Iterator[Finding]:
    """4-bit weights cannot be trained, multiplied in float64, or moved between devices."""
    is_rl, moves = hasattr(checked.config, "actor_rollout_ref"), f"{_ACTOR}.fsdp_config.param_offload"
    section = _MODEL if is_rl else "model"
    model, key = lookup(checked.config, section), f"{section}.quantization"
    if model.quantization is None:
        return
    name = f"`{key}={model.quantization}`"
    if model.lora_rank == 0:
        what = f"{name} without adapters: weights of 4 bits cannot be trained."
        yield checked.problem(what, f"set {section}.lora_rank, e.g. to 16, or remove quantization", key)
    if model.dtype == "float64":
        what = f"{name} with {section}.dtype=float64: products with 4-bit weights are computed in float32 or bfloat16."
        yield checked.problem(what, f"set {section}.dtype=auto", key, f"{section}.dtype")
    if is_rl and lookup(checked.config, moves):
        what = f"{name} with {moves}=True: weights of 4 bits stay on their device."
        yield checked.problem(what, "remove one of them", key, moves)


def check_fp8_base(checked: Checked) -> Iterator[Finding]:
    """What a base in fp8 is not built for; the loaded model and the device are checked in `models/layer_weights.py`."""
    key, config = f"{_ACTOR}.quantization", checked.config
    if lookup(config, key) is None:
        return
    name = f"`{key}={lookup(config, key)}`"
    if config.actor_rollout_ref.model.lora_rank == 0:
        what = f"{name} without adapters: 8-bit copies of weights that are trained would have to be made in every step."
        yield checked.problem(what, f"set {_MODEL}.lora_rank, e.g. to 32, or remove {key}", key)
    if workers_of(config) > 1:
        what = f"{name} with {workers_of(config)} workers that train: their weights are sharded."
        yield checked.problem(what, f"train on one worker, or remove {key}", key, "trainer.n_gpus_per_node")
    others = {
        **_FSDP,
        f"{_MODEL}.quantization": None,
        f"{_MODEL}.use_remove_padding": True,
        f"{_ACTOR}.fsdp_config.param_offload": False,
        "trainer.exact": False,
    }
    yield from _needs(checked, key, others, do=f", or remove {key}")
    if (dtype := config.actor_rollout_ref.model.dtype) in ("float64", "float16"):
        what = f"{name} with {_MODEL}.dtype={dtype}: its products have bfloat16 results, or float32 on a CPU."
        yield checked.problem(what, f"set {_MODEL}.dtype=auto", key, f"{_MODEL}.dtype")


def check_exact(checked: Checked) -> Iterator[Finding]:
    """What `trainer.exact` is not built for; what only the loaded model and the device can tell is checked there."""
    config = checked.config
    if not config.trainer.exact:
        return
    ours = {
        f"{_ROLLOUT}.name": "native",
        f"{_ROLLOUT}.quantization": None,
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_MODEL}.quantization": None,
        f"{_MODEL}.use_remove_padding": True,
        f"{_ACTOR}.ulysses_sequence_parallel_size": 1,
    }
    yield from _needs(checked, "trainer.exact", ours, ": log-probs would not be bitwise equal")
    yield from _needs(checked, "trainer.exact", _FSDP)


def _needs(checked: Checked, key: str, values: dict[str, Any], why: str = "", do: str = "") -> Iterator[Finding]:
    """Settings that `key` needs at these values, or at one of several."""
    for other, wanted in values.items():
        fitting = wanted if isinstance(wanted, tuple) else (wanted,)
        if (found := lookup(checked.config, other)) not in fitting:
            what = f"`{key}={lookup(checked.config, key)}` is not built for {other}={found}{why}."
            value = "null" if fitting[0] is None else fitting[0]
            yield checked.problem(what, f"set {other}={value}{do}", key, other)


def check_router_replay(checked: Checked) -> Iterator[Finding]:
    """Routes of experts are recorded by the native rollout or by the old log-probs, and replayed by the torch engine;
    whether the model has routers that are known is checked when it is loaded."""
    actor, rollout = checked.config.actor_rollout_ref.actor, checked.config.actor_rollout_ref.rollout
    mode_key, record_key = f"{_ACTOR}.router_replay.mode", f"{_ROLLOUT}.enable_rollout_routing_replay"
    mode, recorded = actor.router_replay.mode, rollout.enable_rollout_routing_replay
    coefficient = f"{_ACTOR}.router_aux_loss_coef"
    if mode == "R3" and not recorded:
        what = f"`{mode_key}=R3` replays the routes of the rollout, and `{record_key}=False` does not record them."
        yield checked.problem(what, f"remove {record_key}, or set it to True", mode_key, record_key)
    if mode == "R2" and recorded:
        what = (
            f"`{mode_key}=R2` replays the routes of the old log-probs, and `{record_key}=True` records the rollout's."
        )
        yield checked.problem(what, f"set {mode_key}=R3, or {record_key}=False", mode_key, record_key)
    if mode == "R2" and actor.old_log_probs == "rollout":
        what = f"`{mode_key}=R2` replays the routes of the old log-probs, which the trainer does not compute."
        yield checked.problem(what, f"set {_ACTOR}.old_log_probs=trainer, or {mode_key}=R3", mode_key)
    if recorded and rollout.name != "native":
        what = f"`{record_key}=True` is not built for {_ROLLOUT}.name={rollout.name}: it gives no routes of experts."
        yield checked.problem(what, f"set {_ROLLOUT}.name=native, or {mode_key}=R2 without it", record_key)
    if actor.router_aux_loss_coef > 0 and mode == "disabled" and not recorded:
        what = f"`{coefficient}={actor.router_aux_loss_coef:g}` needs the load of the experts before the update."
        yield checked.problem(what, f"set {record_key}=True, or {mode_key}=R2", coefficient)
    used = {mode_key: mode != "disabled", record_key: recorded, coefficient: actor.router_aux_loss_coef > 0}
    for key, is_on in used.items():
        if is_on and (strategy := actor.strategy) not in _FSDP[f"{_ACTOR}.strategy"]:
            what = f"`{key}` is not built for {_ACTOR}.strategy={strategy}, whose routers take no given routes."
            yield checked.problem(what, f"set {_ACTOR}.strategy=fsdp2, or remove it", key, f"{_ACTOR}.strategy")


# Those of every program.
COMMON_CHECKS = (
    check_choices,
    check_ranges,
    check_resume,
    check_quantization,
    check_sizes,
    check_fewer_machines,
    check_ray,
)
# Those of a run of the PPO family.
PPO_CHECKS = (
    *COMMON_CHECKS,
    _batches,
    _kl,
    _drgrpo,
    _estimator,
    _losses_and_shaping,
    _sampling,
    _rollout_correction,
    _critic,
    _reward_model,
    _data,
    check_own_workers,
    check_staleness,
    check_fp8_base,
    check_exact,
    check_router_replay,
    check_colocated_workers,
)
