"""Key -> (test, what it must be), for settings that take a range of numbers; null is never tested."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from posttrain.config.reward import LARGEST_SCORE

Range = tuple[Callable[[Any], bool], str]


def _at_least(low: float) -> Range:
    return lambda value: value >= low, f"{low} or more"


def _above(low: float) -> Range:
    return lambda value: value > low, f"above {low}"


_SCORE: Range = (lambda value: abs(value) <= LARGEST_SCORE, f"between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}")
_FACTOR: Range = (lambda value: 0 < value <= LARGEST_SCORE, f"above 0 and at most {LARGEST_SCORE:g}")
_ONE_OR_MORE, _ZERO_OR_MORE, _POSITIVE = _at_least(1), _at_least(0), _above(0)
_SHARE: Range = (lambda value: 0 <= value <= 1, "between 0 and 1")
_POSITIVE_SHARE: Range = (lambda value: 0 < value <= 1, "above 0 and at most 1")
_COUNT_OR_ALL: Range = (lambda value: value == -1 or value >= 1, "-1, or 1 or more")
_BETAS: Range = (
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
    "two numbers from 0 to below 1",
)
_WEIGHTS: Range = (lambda value: len(value) > 0 and all(0 < weight < inf for weight in value), "positive numbers")
_STEPS: Range = (lambda value: all(step >= 1 for step in value), "steps, which are counted from 1")
_SEED: Range = (lambda value: abs(value) < 2**63, "smaller than 2**63")
_GROUP: Range = (lambda value: 1 <= value <= 10_000, "from 1 to 10000")
_PROCESSES: Range = (lambda value: 1 <= value <= 1000, "from 1 to 1000")
_SECONDS: Range = (lambda value: 1e-3 <= value < inf, "0.001 or more, and finite")
MAY_BE_INFINITE = ("grad_clip", "clip_grad", "clip_ratio_high", "clip_ratio_c", "cliprange_value", "samples_max_gb")
"""Last names of limits that may be infinite: there is none then."""

_OPTIM: dict[str, Range] = {
    "lr": _POSITIVE,
    "weight_decay": _ZERO_OR_MORE,
    "betas": _BETAS,
    "eps": _POSITIVE,
    "lr_warmup_steps": (lambda value: value >= -1, "-1, or 0 or more"),
    "lr_warmup_steps_ratio": _SHARE,
    "min_lr_ratio": _SHARE,
}
OPTIM_RANGES: dict[str, Range] = {**_OPTIM, "clip_grad": _POSITIVE}
PAIR_LOSS_RANGES: dict[str, Range] = {"center_coef": _ZERO_OR_MORE}
MODEL_RANGES: dict[str, Range] = {"lora_rank": _ZERO_OR_MORE, "lora_alpha": _POSITIVE}
TRAINER_RANGES: dict[str, Range] = {
    "total_epochs": _ONE_OR_MORE,
    "total_training_steps": _ONE_OR_MORE,
    "save_freq": _COUNT_OR_ALL,
    "test_freq": _COUNT_OR_ALL,
    "max_ckpt_to_keep": _ONE_OR_MORE,
    "n_gpus_per_node": _ONE_OR_MORE,
    "nnodes": _ONE_OR_MORE,
    "stopped_worker_timeout_s": _POSITIVE,
    "max_bad_steps": _ONE_OR_MORE,
    "profile_steps": _STEPS,
    "seed": _SEED,
}
PARALLEL_RANGES: dict[str, Range] = {"fsdp_size": _COUNT_OR_ALL, "ulysses_sequence_parallel_size": _ONE_OR_MORE}
ROW_RANGES: dict[str, Range] = {
    **{
        name: _ONE_OR_MORE
        for name in ("train_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu", "max_length")
    },
    "train_max_samples": _COUNT_OR_ALL,
    "val_max_samples": _COUNT_OR_ALL,
    "seed": _SEED,
}
"""Of the supervised trainers' `data`."""
_UPDATE: dict[str, Range] = {
    "ppo_mini_batch_size": _ONE_OR_MORE,
    "ppo_micro_batch_size_per_gpu": _ONE_OR_MORE,
    "ppo_max_token_len_per_gpu": _ONE_OR_MORE,
    "ppo_epochs": _ONE_OR_MORE,
    "grad_clip": _POSITIVE,
    "ulysses_sequence_parallel_size": _ONE_OR_MORE,
    "fsdp_config.fsdp_size": _COUNT_OR_ALL,
    **{f"optim.{name}": limits for name, limits in _OPTIM.items()},
}
_ACTOR: dict[str, Range] = {
    **_UPDATE,
    "clip_ratio": _POSITIVE,
    "clip_ratio_low": _POSITIVE,
    "clip_ratio_high": _POSITIVE,
    "clip_ratio_c": _above(1),
    **{f"policy_loss.{name}": _POSITIVE for name in ("tau_pos", "tau_neg", "ppo_kl_coef", "dro_beta")},
    **{f"policy_loss.{name}": _POSITIVE_SHARE for name in ("clip_cov_ratio", "kl_cov_ratio")},
    **{f"policy_loss.{name}": _POSITIVE for name in ("clip_cov_lb", "clip_cov_ub")},
    "loss_scale_factor": _POSITIVE,
    "kl_loss_coef": _ZERO_OR_MORE,
    "entropy_coeff": _ZERO_OR_MORE,
}
_SAMPLING: dict[str, Range] = {
    "n": _GROUP,
    "temperature": _POSITIVE,
    "top_p": _POSITIVE_SHARE,
    "top_k": _COUNT_OR_ALL,
}
_ROLLOUT: dict[str, Range] = {
    **_SAMPLING,
    **{f"val_kwargs.{name}": limits for name, limits in _SAMPLING.items()},
    "min_p": _SHARE,
    "repetition_penalty": _POSITIVE,
    "max_num_seqs": _ONE_OR_MORE,
    "n_workers": _ZERO_OR_MORE,
    "tensor_model_parallel_size": _ONE_OR_MORE,
    "gpu_memory_utilization": _POSITIVE_SHARE,
}
_BY_SECTION: dict[str, dict[str, Range]] = {
    "algorithm": {
        "gamma": _SHARE,
        "lam": _SHARE,
        "kl_ctrl.kl_coef": _ZERO_OR_MORE,
        "kl_ctrl.horizon": _ONE_OR_MORE,
        "kl_ctrl.target_kl": _POSITIVE,
        "filter_groups.max_num_gen_batches": _ZERO_OR_MORE,
    },
    "data": {
        "train_batch_size": _ONE_OR_MORE,
        "val_batch_size": _ONE_OR_MORE,
        "max_prompt_length": _ONE_OR_MORE,
        "max_response_length": _ONE_OR_MORE,
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
        "cliprange_value": _POSITIVE,
        **{f"model.{name}": limits for name, limits in MODEL_RANGES.items()},
    },
    "reward": {
        "num_workers": _PROCESSES,
        "timeout_s": _SECONDS,
        "failure_score": _SCORE,
        "sandbox.timeout_s": _SECONDS,
        "sandbox.memory_mb": _at_least(16),
        **{f"sandbox.{name}": _ONE_OR_MORE for name in ("processes", "disk_mb", "output_kb")},
        "overlong_buffer.len": _ONE_OR_MORE,
        "overlong_buffer.penalty_factor": _FACTOR,
    },
    "reward_model": {
        "micro_batch_size_per_gpu": _ONE_OR_MORE,
        "forward_max_token_len_per_gpu": _ONE_OR_MORE,
        "max_length": _at_least(2),
    },
    "trainer": {
        **TRAINER_RANGES,
        "critic_warmup": _ZERO_OR_MORE,
        "rollout_mismatch_tol": _POSITIVE,
    },
    "tracking": {"samples_freq": _ZERO_OR_MORE, "samples_max_gb": _POSITIVE, "keep_batches": _at_least(-1)},
}

RANGES: dict[str, Range] = {
    f"{section}.{name}": limits for section, ranges in _BY_SECTION.items() for name, limits in ranges.items()
}
