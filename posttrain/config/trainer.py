"""Sections `data`, `trainer` and `tracking`: what is trained on, how long, where it is written, saved and logged.

Also where a run runs: its workers, keys that count them, and the GPUs of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from posttrain.algorithms.registry import critic_estimators
from posttrain.config.model import NO_ADAPTERS
from posttrain.config.schema import Section, lookup, section
from posttrain.cores import gpus_present
from posttrain.settings import (
    COUNT_OR_ALL,
    ONE_OR_MORE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SEED,
    STEPS,
    WEIGHTS,
    ZERO_OR_MORE,
    Idle,
    at_least,
    setting,
)

HELD_OUT = "held_out"
"""The word for `data.val_files` that stands for some of the training rows."""
NO_VALIDATION = Idle("there is no validation file (data.val_files)", lambda c: c.data.val_files is None)
TOO_LONG_DROPPED = Idle(
    "data.filter_overlong_prompts drops prompts that are too long", lambda c: c.data.filter_overlong_prompts
)
# A sampler of the user's own may read the key too.
NO_CURRICULUM = Idle("data.sampler is not curriculum", lambda c: c.data.sampler == "default")


@section
class DataConfig(Section):
    """Prompts. Example: `data.train_files=data/train.parquet`."""

    train_files: Any = setting(None, is_path=True)
    """One path or a list of paths: parquet, json or jsonl; unset, the embedded arithmetic data serves."""
    val_files: Any = setting(None, is_path=True)
    """Validation files, as above; null means no validation. `held_out` takes a tenth of the training rows (256 at most,
    none of fewer than 20), which are then not trained on."""
    train_weights: list[float] | None = setting(None, range=WEIGHTS)
    """One weight per training file: how often its rows are drawn relative to the others; null draws every row once
    per epoch."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages."""
    data_source: str | None = None
    """Data source of rows that do not name one; it chooses the built-in scorer."""
    train_batch_size: int = setting(1024, range=ONE_OR_MORE)
    """Prompts per step, over all workers."""
    val_batch_size: int | None = setting(None, range=ONE_OR_MORE, idle=NO_VALIDATION)
    """Prompts per validation batch; null takes the whole file."""
    max_prompt_length: int = setting(512, range=ONE_OR_MORE)
    """Longest prompt in tokens."""
    max_response_length: int = setting(1024, range=ONE_OR_MORE)
    """Longest response in tokens."""
    filter_overlong_prompts: bool = True
    """Drop prompts that are too long, and say how many; false handles them by `truncation`."""
    truncation: str = setting("error", choices=("error", "left", "right", "middle"), idle=TOO_LONG_DROPPED)
    """What happens to a prompt that is too long and not dropped: `error`, or cut `left`, `right` or in the `middle`."""
    train_max_samples: int = setting(-1, range=COUNT_OR_ALL)
    """Use at most this many training rows; -1 takes all."""
    val_max_samples: int = setting(-1, range=COUNT_OR_ALL, idle=NO_VALIDATION)
    """Use at most this many validation rows; -1 takes all."""
    shuffle: bool = True
    """Draw the rows of an epoch in random order."""
    seed: int | None = setting(None, range=SEED, idle=".shuffle is False")
    """Seed of the order of rows; null takes `trainer.seed`."""
    sampler: str = "default"
    """Order of rows: `default`, `curriculum`, one registered by your own file, or a class of it (`FILE.py:CLASS`)."""
    curriculum_key: str = setting("difficulty", idle=NO_CURRICULUM)
    """Column that `sampler=curriculum` sorts by, easy (small) first."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    custom_cls: dict[str, Any] = field(default_factory=dict)
    """Your own data set class, which makes the rows: `{path: FILE.py, name: CLASS, config: {...}}` (docs/data.md)."""
    system_prompt: str | None = setting(None, is_literal=True)
    """Put before prompts that are plain strings, as a system message."""


_ACTOR = "actor_rollout_ref.actor"
# The source of settings that torchrun decides.
TORCHRUN = "torchrun"
COLOCATED_WORKERS = "actor_rollout_ref.rollout.colocated_workers"
ENGINE_SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
ENGINE_STAGES = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
SHARD_SIZES = (f"{_ACTOR}.fsdp_config.fsdp_size", "critic.fsdp_config.fsdp_size")
SEQUENCE_SIZES = (f"{_ACTOR}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")
_REF = "actor_rollout_ref.ref"
# Keys of the reference -> the actor's, which it has too: both compute the same rows in the same passes.
AS_THE_ACTOR: dict[str, str] = {
    f"{_REF}.fsdp_config.fsdp_size": f"{_ACTOR}.fsdp_config.fsdp_size",
    f"{_REF}.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_REF}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
}

NODE_RANK, DRY_RUN = "trainer.node_rank", "trainer.dry_run"
# What belongs to the command and not to the run: it is not stored with it.
OF_THE_COMMAND: dict[str, Any] = {NODE_RANK: int, DRY_RUN: bool}
TOGETHER, ROLLOUT_MACHINES, ROLLOUT_EACH = (
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
)


# Roles of an RL run that may have workers of their own, beside those that train: one line for each. A role is a name, a
# worker class (`trainer/ppo/parts.py`) and a pool of processes. Without workers of its own it is on every worker that
# trains.
ROLLOUT_WORKERS = "actor_rollout_ref.rollout.n_workers"
REWARD_MODEL_WORKERS = "reward_model.n_workers"
CRITIC_WORKERS = "critic.n_workers"
REFERENCE_WORKERS = "actor_rollout_ref.ref.n_workers"


def needs_reference(config: Any) -> bool:
    """Whether a run needs the frozen reference policy: KL in the reward, or in the loss with a coefficient above 0."""
    actor = config.actor_rollout_ref.actor
    return config.algorithm.use_kl_in_reward or (actor.use_kl_loss and actor.kl_loss_coef != 0)


def needs_critic(config: Any) -> bool:
    """Whether the estimator needs values."""
    return config.algorithm.adv_estimator in critic_estimators()


@dataclass(frozen=True)
class OwnWorkers:
    """A role that may have workers of its own: as many as the setting `key` says, where `is_used` holds."""

    key: str
    is_used: Callable[[Any], bool]
    # Whether its workers hold one model together, cut over them; otherwise each has a whole one.
    shards: bool = False


ROLES: dict[str, OwnWorkers] = {
    "rollout": OwnWorkers(ROLLOUT_WORKERS, lambda config: True),
    "reward_model": OwnWorkers(REWARD_MODEL_WORKERS, lambda config: config.reward_model.enable),
    "critic": OwnWorkers(CRITIC_WORKERS, needs_critic, shards=True),
    "reference": OwnWorkers(REFERENCE_WORKERS, needs_reference, shards=True),
}
"""By the name that `TrainingGroups` gives the role."""


def own_workers_of(config: Any) -> dict[str, int]:
    """Roles of this run with workers of their own, and how many; none in supervised runs."""
    if not hasattr(config, "actor_rollout_ref"):
        return {}
    found = {role: lookup(config, own.key) for role, own in ROLES.items() if own.is_used(config)}
    return {role: count for role, count in found.items() if count}


def workers_of(config: Any) -> int:
    """Processes that train."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def devices_of(config: Any) -> int:
    """Processes of the run that compute on a device: those that train, and those of roles with workers of their own."""
    return workers_of(config) + sum(own_workers_of(config).values())


def continues_responses(trainer: Any) -> bool:
    """Whether responses under way continue with new weights, where the engine can do so."""
    wanted = trainer.partial_rollout
    return trainer.max_staleness > 1 if wanted is None else wanted and trainer.max_staleness > 0


def rollout_workers_of(config: Any) -> int:
    """Processes that only generate; 0 where those that train generate too."""
    return own_workers_of(config).get("rollout", 0)


def generating_workers_of(config: Any) -> int:
    """Processes that generate, whether they train too or not."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.n_workers or rollout.colocated_workers or workers_of(config)


def divisors_of_workers(config: Any) -> dict[str, int]:
    """By key, the sizes that must divide the number of workers that train: those of FSDP groups, of which a worker
    alone has none, and of sequence-parallel groups."""
    shards, sequences = SHARD_SIZES, SEQUENCE_SIZES
    if not hasattr(config, "actor_rollout_ref"):
        shards, sequences = ("fsdp.fsdp_size",), ("fsdp.ulysses_sequence_parallel_size",)
    elif "critic" in own_workers_of(config):
        shards, sequences = shards[:1], sequences[:1]
    keys = (*(() if one_worker(config) else shards), *sequences)
    return {key: size for key in keys if (size := attrgetter(key)(config)) >= 1}


def divisors_of_own_workers(config: Any) -> list[tuple[str, int, str]]:
    """(key, size, setting of the number of workers) of sizes that must divide a role's workers of its own."""
    shared = {"critic": (SHARD_SIZES[1], SEQUENCE_SIZES[1]), "reference": (SHARD_SIZES[0], SEQUENCE_SIZES[0])}
    found = []
    for role, count in own_workers_of(config).items():
        # One worker has nothing to cut its weights over.
        keys = [key for key in shared.get(role, ()) if count > 1 or key in SEQUENCE_SIZES]
        found += [(key, size, ROLES[role].key) for key in keys if (size := lookup(config, key)) >= 1]
    return found


def divisors_of_ranks(config: Any) -> dict[str, int]:
    """By what they are, the sizes in the train engine's own settings (`megatron_config`) that must divide the number of
    workers that train."""
    place = _ACTOR if hasattr(config, "actor_rollout_ref") else "fsdp"
    section = attrgetter(place)(config)
    own = f"{section.strategy}_config"
    given = getattr(section, own, None)
    if not isinstance(given, Mapping):
        return {}

    def product(*names: str) -> tuple[str, int]:
        sizes = [given.get(f"{name}_parallel_size") for name in names]
        sizes = [size if isinstance(size, int) and size > 0 else 1 for size in sizes]  # others are rejected anyway
        return f"{place}.{own}: {' x '.join(names)}", math.prod(sizes)

    found = (product("tensor", "pipeline", "context"), product("pipeline", "expert"))
    return {words: size for words, size in found if size > 1}


def divisors_of_fewer_workers(config: Any) -> dict[str, int]:
    """By key, the sizes that must divide the number of workers that train, however many machines are left: that of
    rollout engines too, where all of these workers generate."""
    rollout = config.actor_rollout_ref.rollout if hasattr(config, "actor_rollout_ref") else None
    sizes = divisors_of_workers(config) | divisors_of_ranks(config)
    if rollout is None or rollout.n_workers or rollout.colocated_workers:
        return sizes
    stages = rollout.pipeline_model_parallel_size
    key = ENGINE_SIZE if stages == 1 else f"{ENGINE_SIZE} x {ENGINE_STAGES}"
    return sizes | {key: max(1, rollout.engine_size)}


def machines_for(config: Any, most: int) -> int | None:
    """The largest number of machines, up to `most` and from `trainer.min_nnodes` on, whose workers the sizes divide."""
    least, each = config.trainer.min_nnodes, config.trainer.n_gpus_per_node
    if least is None:
        return None
    sizes = divisors_of_fewer_workers(config).values()
    fitting = (count for count in range(most, least - 1, -1) if not any(count * each % size for size in sizes))
    return next(fitting, None)


def one_worker(config: Any) -> bool:
    """Whether no more than one process trains."""
    return workers_of(config) == 1


def one_process(config: Any) -> bool:
    """Whether one process does everything."""
    return one_worker(config) and not own_workers_of(config)


def runs_on_cpu(config: Any) -> bool:
    """Whether the run will be on the CPU."""
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and gpus_present() == 0)


ON_CPU = Idle("the run is on the CPU", runs_on_cpu)
DETERMINISTIC_ON_CPU = Idle("runs on the CPU are deterministic anyway", runs_on_cpu)
WITHOUT_RAY = Idle("the run has one worker, which needs no Ray", one_process)
ONE_MACHINE = Idle("the run has one machine", lambda config: config.trainer.nnodes == 1)
UNSHARDED = Idle(
    "the run has one worker, which holds the whole model",
    lambda config: one_worker(config) and not any(ROLES[role].shards for role in own_workers_of(config)),
)


@section
class OffloadConfig(Section):
    """Where the weights of a model lie between the stages that need them."""

    param_offload: bool = setting(False, idle=ON_CPU)
    """Keep the weights in host memory outside the stages that need them."""


@section
class RunConfig(Section):
    """What every trainer's run has."""

    project_name: str = "posttrain"
    """First level of the run directory, and the loggers' project."""
    experiment_name: str | None = None
    """Second level of the run directory, and the loggers' run; null numbers runs (`grpo-1`, `sft-2`, ...) and
    continues an unfinished one."""
    default_local_dir: str = setting("outputs", is_path=True)
    """Folder under which run directories are made."""
    total_epochs: int = setting(15, range=ONE_OR_MORE)
    """Passes over the training data."""
    total_training_steps: int | None = setting(None, range=ONE_OR_MORE)
    """Steps in all; null takes `total_epochs` times the batches of an epoch."""
    save_freq: int = setting(-1, range=COUNT_OR_ALL)
    """Save a checkpoint every so many steps; -1 saves the last step only."""
    test_freq: int = setting(-1, range=COUNT_OR_ALL, idle=NO_VALIDATION)
    """Validate every so many steps; -1 validates before training and at the end only."""
    val_before_train: bool = True
    """Validate before the first step."""
    max_ckpt_to_keep: int | None = setting(None, range=ONE_OR_MORE)
    """Keep this many newest checkpoints (and the best one by validation); null keeps all."""
    async_save: bool = True
    """Copy weights and optimizer state to host memory and write the checkpoint while training continues; `false` waits
    until it is written."""
    export_hf: str = setting("last", choices=("last", "all", "none"))
    """Write a Hugging Face folder into the `last` checkpoint, into `all`, or into `none`."""
    export_lora: str = setting(
        "adapter", choices=("adapter", "merged"), idle=(f"actor_rollout_ref.model{NO_ADAPTERS}", ".export_hf is none")
    )
    """What that folder holds under LoRA: the `adapter` alone (peft's format), or the `merged` model."""
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"))
    """`auto` continues the run found in the run directory, `disable` refuses to touch one, `resume_path` continues
    `resume_from_path`."""
    resume_from_path: str | None = setting(None, idle=".resume_mode is not resume_path", is_path=True)
    """Checkpoint folder (`.../global_step_N`) to continue from."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Any of `console` (a line per step), `details` (under it every metric), `tensorboard`, `wandb`, `mlflow`,
    `swanlab`, `trackio`; `metrics.jsonl` is always written."""
    n_gpus_per_node: int = setting(1, range=ONE_OR_MORE)
    """Worker processes per node, one per GPU (or per CPU process)."""
    nnodes: int = setting(1, range=ONE_OR_MORE)
    """Machines of a Ray cluster, which `RAY_ADDRESS` names; each has `n_gpus_per_node` workers."""
    min_nnodes: int | None = setting(None, range=ONE_OR_MORE, idle=ONE_MACHINE)
    """Go on with fewer machines, at least so many, when one is lost and none takes its place within
    `trainer.placement_timeout_s`; null ends the run instead. For several machines."""
    ray_init: dict[str, Any] = setting(factory=dict, idle=WITHOUT_RAY)
    """Arguments of `ray.init`, which Ray itself checks, e.g. `{num_cpus: 8}`; for several workers."""
    placement_timeout_s: float = setting(300.0, range=POSITIVE, idle=WITHOUT_RAY)
    """Seconds that Ray has to find room for all workers: machines may join, and other runs end. Then the run ends and
    lists what is missing. For several workers."""
    max_restarts: int = setting(3, range=ZERO_OR_MORE, idle=WITHOUT_RAY)
    """Start the workers again, from the newest checkpoint, when one of them dies or hangs: at most so many times in a
    row without a new step; 0 ends the run instead. For several workers."""
    stopped_worker_timeout_s: float = setting(300.0, range=POSITIVE, idle=WITHOUT_RAY)
    """Take a worker for lost when its process was stopped by a signal for so many seconds; a worker that computes is
    never ended. For several workers."""
    hung_worker_timeout_s: float = setting(1800.0, range=POSITIVE_OR_INFINITE, idle=WITHOUT_RAY)
    """Take workers for hung when none of them has answered or computed anything for so many seconds. For several
    workers."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """`auto` (CUDA if there is one), `cpu` or `cuda`."""
    seed: int = setting(1, range=SEED)
    """Seed of sampling, data order and initialisation."""
    deterministic: bool = setting(False, idle=DETERMINISTIC_ON_CPU)
    """Use deterministic kernels on CUDA (slower); on CPU runs are deterministic anyway."""
    profile_steps: list[int] | None = setting(None, range=STEPS)
    """Steps of which torch's profiler writes a trace to `traces/` in the run directory; they take longer."""
    max_bad_steps: int = setting(3, range=ONE_OR_MORE)
    """Stop after this many training steps in a row in which an update was skipped because loss or gradient was not
    finite."""


@section
class TrainerConfig(RunConfig):
    """The run. Example: `trainer.total_epochs=15 trainer.save_freq=20`."""

    val_only: bool = False
    """Validate and stop."""
    best_metric: str | None = setting(None, idle=NO_VALIDATION)
    """Validation metric (largest is best) whose best checkpoint is kept; null takes the first `val/.../mean@k`."""
    critic_warmup: int = setting(0, range=ZERO_OR_MORE)
    """Steps during which only the critic is trained."""
    max_staleness: int = setting(0, range=ZERO_OR_MORE)
    """Generate responses of later steps while this one trains: no token is trained by weights that are more than this
    many updates newer than those that sampled it; 0 generates and trains in turn. The difference is corrected by
    importance weights, or by clipping around the policies that sampled (docs/asynchronous.md). For workers that only
    generate (`actor_rollout_ref.rollout.n_workers`)."""
    one_step_off: bool = False
    """The same as `trainer.max_staleness=1`."""
    partial_rollout: bool | None = setting(None, idle=".max_staleness is 0")
    """Load new weights into the rollout between two decode steps and continue the responses under way with them; false
    has every weight sync wait for whole responses. null: if `trainer.max_staleness` is 2 or more and the engine can."""
    replay_events: str | None = setting(None, idle=".max_staleness is 0")
    """Repeat a run with partial responses bit for bit: the `events.jsonl` of its run directory, under its settings."""
    exact: bool = False
    """Compute rollout and trainer log-probs with the same order of summation, so that they are bitwise equal
    (`mismatch/*` is 0) whatever the batch, packing, turns or workers; slower (docs/exact.md)."""
    rollout_mismatch_tol: float | None = setting(None, range=POSITIVE, idle=".exact is True")
    """Largest mean difference between rollout and trainer log-probs before a run stops; null takes 1e-3 in float32,
    5e-2 in bfloat16."""


@section
class TrackingConfig(Section):
    """Samples written for looking at."""

    samples_freq: int = setting(1, range=ZERO_OR_MORE)
    """Write the responses of every so many steps to `samples/`; 0 writes none."""
    samples_max_gb: float = setting(2.0, range=POSITIVE_OR_INFINITE, idle=".samples_freq is 0")
    """Past this size the oldest samples are thinned, whole groups at a time."""
    keep_batches: int = setting(0, range=at_least(-1))
    """Keep the batches of this many last steps in `batches/`, for `posttrain replay`; -1 keeps all, 0 none."""
