"""Key -> range, for settings that take a range of numbers; null is never tested. Algorithms declare their own
(`posttrain.config.declared`)."""

from __future__ import annotations

from math import inf

from posttrain.config.reward import LARGEST_SCORE
from posttrain.settings import ONE_OR_MORE, POSITIVE, POSITIVE_SHARE, SHARE, ZERO_OR_MORE, Range, above, at_least

_SCORE = Range(lambda value: abs(value) <= LARGEST_SCORE, f"between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}")
_FACTOR = Range(lambda value: 0 < value <= LARGEST_SCORE, f"above 0 and at most {LARGEST_SCORE:g}")
_COUNT_OR_ALL = Range(lambda value: value == -1 or value >= 1, "-1, or 1 or more")
_BETAS = Range(
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
    "two numbers from 0 to below 1",
)
_WEIGHTS = Range(lambda value: len(value) > 0 and all(0 < weight < inf for weight in value), "positive numbers")
_STEPS = Range(lambda value: all(step >= 1 for step in value), "steps, which are counted from 1")
_SEED = Range(lambda value: abs(value) < 2**63, "smaller than 2**63")
_GROUP = Range(lambda value: 1 <= value <= 10_000, "from 1 to 10000")
_PROCESSES = Range(lambda value: 1 <= value <= 1000, "from 1 to 1000")
_SECONDS = Range(lambda value: 1e-3 <= value < inf, "0.001 or more, and finite")
MAY_BE_INFINITE = ("grad_clip", "clip_grad", "clip_ratio_high", "clip_ratio_c", "cliprange_value", "samples_max_gb")
"""Last names of limits that may be infinite: there is none then."""

_OPTIM: dict[str, Range] = {
    "lr": POSITIVE,
    "weight_decay": ZERO_OR_MORE,
    "betas": _BETAS,
    "eps": POSITIVE,
    "lr_warmup_steps": Range(lambda value: value >= -1, "-1, or 0 or more"),
    "lr_warmup_steps_ratio": SHARE,
    "min_lr_ratio": SHARE,
}
OPTIM_RANGES: dict[str, Range] = {**_OPTIM, "clip_grad": POSITIVE}
PAIR_LOSS_RANGES: dict[str, Range] = {"center_coef": ZERO_OR_MORE}
MODEL_RANGES: dict[str, Range] = {"lora_rank": ZERO_OR_MORE, "lora_alpha": POSITIVE}
TRAINER_RANGES: dict[str, Range] = {
    "total_epochs": ONE_OR_MORE,
    "total_training_steps": ONE_OR_MORE,
    "save_freq": _COUNT_OR_ALL,
    "test_freq": _COUNT_OR_ALL,
    "max_ckpt_to_keep": ONE_OR_MORE,
    "n_gpus_per_node": ONE_OR_MORE,
    "nnodes": ONE_OR_MORE,
    "stopped_worker_timeout_s": POSITIVE,
    "max_bad_steps": ONE_OR_MORE,
    "profile_steps": _STEPS,
    "seed": _SEED,
}
PARALLEL_RANGES: dict[str, Range] = {"fsdp_size": _COUNT_OR_ALL, "ulysses_sequence_parallel_size": ONE_OR_MORE}
ROW_RANGES: dict[str, Range] = {
    **{
        name: ONE_OR_MORE
        for name in ("train_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu", "max_length")
    },
    "train_max_samples": _COUNT_OR_ALL,
    "val_max_samples": _COUNT_OR_ALL,
    "seed": _SEED,
}
"""Of the supervised trainers' `data`."""
_UPDATE: dict[str, Range] = {
    "ppo_mini_batch_size": ONE_OR_MORE,
    "ppo_micro_batch_size_per_gpu": ONE_OR_MORE,
    "ppo_max_token_len_per_gpu": ONE_OR_MORE,
    "ppo_epochs": ONE_OR_MORE,
    "grad_clip": POSITIVE,
    "ulysses_sequence_parallel_size": ONE_OR_MORE,
    "fsdp_config.fsdp_size": _COUNT_OR_ALL,
    **{f"optim.{name}": limits for name, limits in _OPTIM.items()},
}
_ACTOR: dict[str, Range] = {
    **_UPDATE,
    "clip_ratio": POSITIVE,
    "clip_ratio_low": POSITIVE,
    "clip_ratio_high": POSITIVE,
    "clip_ratio_c": above(1),
    "loss_scale_factor": POSITIVE,
    "kl_loss_coef": ZERO_OR_MORE,
    "entropy_coeff": ZERO_OR_MORE,
}
_SAMPLING: dict[str, Range] = {
    "n": _GROUP,
    "temperature": POSITIVE,
    "top_p": POSITIVE_SHARE,
    "top_k": _COUNT_OR_ALL,
}
_ROLLOUT: dict[str, Range] = {
    **_SAMPLING,
    **{f"val_kwargs.{name}": limits for name, limits in _SAMPLING.items()},
    "min_p": SHARE,
    "repetition_penalty": POSITIVE,
    "max_num_seqs": ONE_OR_MORE,
    "n_workers": ZERO_OR_MORE,
    "tensor_model_parallel_size": ONE_OR_MORE,
    "gpu_memory_utilization": POSITIVE_SHARE,
}
_BY_SECTION: dict[str, dict[str, Range]] = {
    "algorithm": {
        "gamma": SHARE,
        "kl_ctrl.kl_coef": ZERO_OR_MORE,
        "kl_ctrl.horizon": ONE_OR_MORE,
        "kl_ctrl.target_kl": POSITIVE,
        "filter_groups.max_num_gen_batches": ZERO_OR_MORE,
    },
    "data": {
        "train_batch_size": ONE_OR_MORE,
        "val_batch_size": ONE_OR_MORE,
        "max_prompt_length": ONE_OR_MORE,
        "max_response_length": ONE_OR_MORE,
        "train_max_samples": _COUNT_OR_ALL,
        "val_max_samples": _COUNT_OR_ALL,
        "train_weights": _WEIGHTS,
        "seed": _SEED,
    },
    "actor_rollout_ref.model": MODEL_RANGES,
    "actor_rollout_ref.actor": _ACTOR,
    "actor_rollout_ref.rollout": _ROLLOUT,
    "critic": {
        **_UPDATE,
        "cliprange_value": POSITIVE,
        **{f"model.{name}": limits for name, limits in MODEL_RANGES.items()},
    },
    "reward": {
        "num_workers": _PROCESSES,
        "timeout_s": _SECONDS,
        "failure_score": _SCORE,
        "sandbox.timeout_s": _SECONDS,
        "sandbox.memory_mb": at_least(16),
        **{f"sandbox.{name}": ONE_OR_MORE for name in ("processes", "disk_mb", "output_kb")},
        "overlong_buffer.len": ONE_OR_MORE,
        "overlong_buffer.penalty_factor": _FACTOR,
    },
    "reward_model": {
        "micro_batch_size_per_gpu": ONE_OR_MORE,
        "forward_max_token_len_per_gpu": ONE_OR_MORE,
        "max_length": at_least(2),
    },
    "trainer": {
        **TRAINER_RANGES,
        "critic_warmup": ZERO_OR_MORE,
        "rollout_mismatch_tol": POSITIVE,
    },
    "tracking": {"samples_freq": ZERO_OR_MORE, "samples_max_gb": POSITIVE, "keep_batches": at_least(-1)},
}

RANGES: dict[str, Range] = {
    f"{section}.{name}": limits for section, ranges in _BY_SECTION.items() for name, limits in ranges.items()
}
