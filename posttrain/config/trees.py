"""Tree, the settings of a program and their rules: one loader serves all programs, since each has a Tree.

The trees of `main_ppo` and of the supervised trainers: other spellings, derived settings, checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.check import COMMON_CHECKS, PPO_CHECKS
from posttrain.config.checked import Checked, Finding
from posttrain.config.choices import check_names
from posttrain.config.commandline import nothing_given
from posttrain.config.derived import derive, derive_command
from posttrain.config.merge import FreeDict, Merged, Spellings
from posttrain.config.model import SCORE_HEADS
from posttrain.config.resolved import Problem
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Section
from posttrain.config.supervised import RewardTrainerConfig, SFTConfig
from posttrain.config.trainer import AS_THE_ACTOR, OF_THE_COMMAND, ROLLOUT_EACH, ROLLOUT_MACHINES, TOGETHER


@dataclass(frozen=True, kw_only=True)
class Tree(Spellings):
    """One tree of settings: what they are called, and the rules that belong to it."""

    # The section of the model that is trained.
    model: str
    # The answer to a start with no argument at all.
    nothing_given: Problem
    # Settings that follow from others; gets the keys that a Python caller hands over as objects.
    derive: Callable[[Merged, frozenset[str]], None]
    # Problems and notes about the meaning of the values.
    checks: Sequence[Callable[[Checked], Iterable[Finding]]]
    # Names that a file of the user's may register, in the trees that have such settings.
    check_names: Callable[[Merged, Path], None] = lambda merged, folder: None
    # Modules that are trained whole beside adapters, so that an adapter folder may hold them.
    heads: tuple[str, ...] = ()


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

MOVED_SECTIONS: dict[str, str] = {
    **{f"{place}.tool_config.": f"{_ROLLOUT}.multi_turn.tool_config." for place in ("rollout", _ROLLOUT)},
    **{f"{place}.megatron.": f"{_ACTOR}.megatron_config." for place in ("actor", _ACTOR)},
    "actor_rollout.ref.": "actor_rollout_ref.",
    "actor.": f"{_ACTOR}.",
    "rollout.": f"{_ROLLOUT}.",
    "ref.": "actor_rollout_ref.ref.",
    "model.": f"{_MODEL}.",
    "critic.model.fsdp_config.": "critic.fsdp_config.",
    "reward_model.model.fsdp_config.": "reward_model.fsdp_config.",
    "reward_model.overlong_buffer.": "reward.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
}

FREE_DICTS: dict[str, FreeDict] = {
    f"{_ROLLOUT}.multi_turn": FreeDict(switch="enable"),
    **{f"{_ROLLOUT}.{name}": FreeDict() for name in ("engine_kwargs", "engine_kwargs.vllm", "engine_kwargs.sglang")},
    f"{_ROLLOUT}.agent": FreeDict(named_by="path"),
    "data.custom_cls": FreeDict(named_by="path"),
}

ADAPTER = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
# Names under `model.lora.` -> those under `model.`.
_LORA = {name.removeprefix("lora_"): name for name in (*ADAPTER, "lora_adapter_path")}
RENAMED: dict[str, str] = {
    "algorithm.name": "algorithm.adv_estimator",
    "algorithm.group_size": f"{_ROLLOUT}.n",
    "algorithm.clip_range": f"{_ACTOR}.clip_ratio",
    "algorithm.clip_ratio": f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.clip_range": f"{_ACTOR}.clip_ratio",
    "algorithm.entropy_coef": f"{_ACTOR}.entropy_coeff",
    "algorithm.entropy_coeff": f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.entropy_coef": f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.model_name": f"{_MODEL}.path",
    f"{_ACTOR}.learning_rate": f"{_ACTOR}.optim.lr",
    f"{_ACTOR}.weight_decay": f"{_ACTOR}.optim.weight_decay",
    f"{_ACTOR}.warmup_ratio": f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.max_grad_norm": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.policy_loss_fn": f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.tau_pos": f"{_ACTOR}.policy_loss.tau_pos",
    f"{_ACTOR}.tau_neg": f"{_ACTOR}.policy_loss.tau_neg",
    f"{_ACTOR}.peft_config.lora_r": f"{_MODEL}.lora_rank",
    **{f"{_ACTOR}.peft_config.{name}": f"{_MODEL}.{name}" for name in ADAPTER},
    f"{_MODEL}.lora.type": f"{_ACTOR}.peft_config.peft_type",
    **{f"{_MODEL}.lora.{name}": f"{_MODEL}.{ours}" for name, ours in _LORA.items()},
    f"{_ROLLOUT}.engine": f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.max_new_tokens": "data.max_response_length",
    f"{_ROLLOUT}.max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ROLLOUT}.tools": f"{_ROLLOUT}.multi_turn.tools",
    **dict.fromkeys(("environment", f"{_ROLLOUT}.environment"), f"{_ROLLOUT}.agent.path"),
    "tools": f"{_ROLLOUT}.multi_turn.tools",
    f"{_ROLLOUT}.tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "critic.learning_rate": "critic.optim.lr",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward.reward_fn": "custom_reward_function.path",
    "trainer.reward_fn.path": "custom_reward_function.path",
    "trainer.reward_fn.name": "custom_reward_function.name",
    "data.train_path": "data.train_files",
    "data.val_path": "data.val_files",
    **{f"data.{name}": f"{_ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")},
    f"{_ROLLOUT}.multi_turn.interaction_config_path": f"{_ROLLOUT}.agent.interaction_config_path",
    "trainer.save_steps": "trainer.save_freq",
    "trainer.n_workers": "trainer.n_gpus_per_node",
    "trainer.micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "trainer.gradient_accumulation_steps": "trainer.gradient_accumulation",
}

# Keys that set or check other settings, with their type; `derived.py` says how.
DERIVED: dict[str, Any] = {
    **OF_THE_COMMAND,
    TOGETHER: bool,
    ROLLOUT_MACHINES: int,
    ROLLOUT_EACH: int,
    "algorithm.kl_coef": float,
    "trainer.gradient_accumulation": int,
    "reward.type": str,
    "trainer.reward_fn.type": str,
    f"{_ACTOR}.peft_config.peft_type": str,
    f"{_ROLLOUT}.enable_lora": bool,
    **dict.fromkeys(AS_THE_ACTOR, int),
}

_SFT = "these are settings of supervised training (`posttrain sft`)"
NOT_BUILT: dict[str, str] = {
    "training.learning_rate": f"{_SFT}; here the learning rate is {_ACTOR}.optim.lr",
    "training.num_train_epochs": f"{_SFT}; here the number of epochs is trainer.total_epochs",
    "training.": _SFT,
    "fsdp.": f"{_SFT}; here the engine is {_ACTOR}.strategy",
}

# Settings -> (their program, the command that lists them).
PROGRAMS: dict[type[Section], tuple[str, str]] = {
    PPOConfig: ("`posttrain.trainer.main_ppo` (RL)", "posttrain config"),
    SFTConfig: ("`posttrain sft`", "posttrain config sft"),
    RewardTrainerConfig: ("`posttrain reward-model`", "posttrain config reward-model"),
}

PPO = Tree(
    PPOConfig,
    "ppo_trainer",
    own_moved=MOVED_SECTIONS,
    own_renamed=RENAMED,
    derived=DERIVED,
    not_built=NOT_BUILT,
    free_dicts=FREE_DICTS,
    programs=PROGRAMS,
    model="actor_rollout_ref.model",
    nothing_given=nothing_given(
        "one key, usually algorithm.adv_estimator=grpo, actor_rollout_ref.model.path=MODEL, data.train_files=FILE and "
        "actor_rollout_ref.rollout.n=5; `preset=embedded` alone runs the built-in task"
    ),
    derive=derive,
    checks=PPO_CHECKS,
    check_names=check_names,
)


_MICRO, _BATCH = "data.micro_batch_size_per_gpu", "data.train_batch_size"
_ACCUMULATION = "training.gradient_accumulation_steps"
_SHARDS, _SEQUENCE = "fsdp.fsdp_size", "fsdp.ulysses_sequence_parallel_size"
_PER_DEVICE = "training.per_device_train_batch_size"

_RENAMED: dict[str, str] = {
    "training.learning_rate": "optim.lr",
    "training.num_train_epochs": "trainer.total_epochs",
    "training.max_steps": "trainer.total_training_steps",
    "training.weight_decay": "optim.weight_decay",
    "training.warmup_ratio": "optim.lr_warmup_steps_ratio",
    "training.warmup_steps": "optim.lr_warmup_steps",
    "training.lr_scheduler_type": "optim.lr_scheduler_type",
    "training.max_grad_norm": "optim.clip_grad",
    "training.save_steps": "trainer.save_freq",
    "training.eval_steps": "trainer.test_freq",
    "training.seed": "trainer.seed",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.grad_clip": "optim.clip_grad",
    "model.partial_pretrain": "model.path",
    **{f"model.lora.{name}": f"model.{ours}" for name, ours in _LORA.items()},
    "model.strategy": "fsdp.strategy",
    "use_remove_padding": "model.use_remove_padding",
    "trainer.n_workers": "trainer.n_gpus_per_node",
    "model.fsdp_config.fsdp_size": _SHARDS,
    "engine.fsdp_size": _SHARDS,
    "ulysses_sequence_parallel_size": _SEQUENCE,
    "engine.ulysses_sequence_parallel_size": _SEQUENCE,
    "engine.ulysses_parallel_size": _SEQUENCE,
}
_SFT_RENAMED: dict[str, str] = {
    **_RENAMED,
    "data.messages_key": "data.multiturn.messages_key",
    "data.tools_key": "data.multiturn.tools_key",
}
_DERIVED: dict[str, Any] = {**OF_THE_COMMAND, _PER_DEVICE: int, _ACCUMULATION: int}
_NOT_BUILT: dict[str, str] = {
    "actor_rollout_ref.": "these are settings of RL (`posttrain.trainer.main_ppo`); here the model is `model.*`, the "
    "optimizer `optim.*`",
}


def _nothing_given(command: str, keys: str) -> Problem:
    return nothing_given(
        f"model.path=MODEL and data.train_files=FILE ({keys}); `{command} model.path=embedded "
        "data.train_files=embedded data.val_files=embedded` runs on the built-in task"
    )


def _derive(merged: Merged, provided: frozenset[str]) -> None:
    _rows_per_step(merged)
    derive_command(merged)
    for key, what in {"model.path": "model", "data.train_files": "data"}.items():
        if merged.value(key) is None and key not in provided and key not in merged.bad:
            merged.set_default(key, "embedded", "nothing was named")
            merged.note(f"No {what} named: what posttrain brings along (`embedded`) serves; set {key} to use your own.")


def _derive_sft(merged: Merged, provided: frozenset[str]) -> None:
    if (whole := merged.take("data.multiturn")) is not None:
        merged.put("data.multiturn.enable", whole.value, whole)
    _derive(merged, provided)
    if merged.value("data.train_files") == "embedded" and not merged.is_set("data.response_key"):
        merged.set_default("data.response_key", "ground_truth", "the embedded data's column")


def _rows_per_step(merged: Merged) -> None:
    """Rows per optimizer step = rows per pass x accumulation x workers, in the form that Transformers has."""
    per_device, accumulation = merged.take(_PER_DEVICE), merged.take(_ACCUMULATION)
    first = per_device or accumulation
    if first is None:
        return
    if per_device is not None:
        merged.put(_MICRO, per_device.value, per_device)
    micro, steps = merged.value(_MICRO), accumulation.value if accumulation else 1
    if micro is None or micro < 1 or steps < 1:
        what = f"`{first.spelling}={first.value}`: rows per pass and accumulation steps must both be 1 or more."
        do = f"set {_PER_DEVICE} and {_ACCUMULATION}, or {_BATCH} alone"
        merged.refuse(what, first.source, do, _MICRO, _BATCH)
        return
    workers = merged.value("trainer.n_gpus_per_node") * merged.value("trainer.nnodes")
    rows = micro * steps * workers
    merged.put(_BATCH, rows, first)
    merged.note(f"{_BATCH}={rows}: {micro} rows per pass x {steps} accumulation steps x {workers} worker(s).")


def _notes(checked: Checked) -> Iterator[Finding]:
    if checked.config.data.val_files is None:
        yield "No validation file is set (data.val_files): the run makes no validation."


SFT = Tree(
    SFTConfig,
    "sft_trainer",
    own_renamed=_SFT_RENAMED,
    derived={**_DERIVED, "data.multiturn": bool},
    not_built=_NOT_BUILT,
    programs=PROGRAMS,
    model="model",
    nothing_given=_nothing_given("posttrain sft", "columns prompt and response, or messages"),
    derive=_derive_sft,
    checks=(*COMMON_CHECKS, _notes),
)
REWARD_MODEL = Tree(
    RewardTrainerConfig,
    "reward_model_trainer",
    own_renamed=_RENAMED,
    derived=_DERIVED,
    not_built=_NOT_BUILT,
    programs=PROGRAMS,
    model="model",
    nothing_given=_nothing_given("posttrain reward-model", "columns prompt, chosen and rejected"),
    derive=_derive,
    checks=(*COMMON_CHECKS, _notes),
    heads=SCORE_HEADS,
)
# Verb of `posttrain` -> its tree.
COMMANDS: dict[str, Tree] = {"sft": SFT, "reward-model": REWARD_MODEL}
