"""The trees `sft_trainer` and `reward_model_trainer`: other spellings, derived settings, checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.check import (
    check_choices,
    check_quantization,
    check_ranges,
    check_ray,
    check_resume,
    check_sizes,
    one_process,
)
from posttrain.config.checked import Checked, Finding, Tree, checks_of_packages
from posttrain.config.commandline import CUT_SHORT
from posttrain.config.derived import derive_command
from posttrain.config.merge import Merged, Spellings
from posttrain.config.model import SCORE_HEADS
from posttrain.config.parallel import OF_THE_COMMAND
from posttrain.config.ppo_tree import PROGRAMS
from posttrain.config.problem import Problem
from posttrain.config.supervised import RewardTrainerConfig, SFTConfig
from posttrain.errors import UserError

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
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.target_modules": "model.target_modules",
    "model.lora.exclude_modules": "model.exclude_modules",
    "model.lora.adapter_path": "model.lora_adapter_path",
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


def _nothing_given(command: str, keys: str) -> Callable[[], Problem]:
    do = (
        f"give at least model.path=MODEL and data.train_files=FILE ({keys}); `{command} model.path=embedded "
        "data.train_files=embedded data.val_files=embedded` runs on the built-in task. "
        f"If you did give keys: {CUT_SHORT}."
    )
    return lambda: Problem("No argument was given, so there is nothing to train.", "command line", do)


def _derive(merged: Merged, provided: frozenset[str]) -> None:
    _rows_per_step(merged)
    derive_command(merged)
    for key, what in {"model.path": "model", "data.train_files": "data"}.items():
        if merged.value(key) is None and key not in provided and key not in merged.bad:
            merged.set_default(key, "embedded", "nothing was named")
            merged.note(f"No {what} named: what posttrain brings along (`embedded`) serves; set {key} to use your own.")


def _derive_sft(merged: Merged, provided: frozenset[str]) -> None:
    whole = merged.take("data.multiturn")
    if whole is not None:
        merged.put("data.multiturn.enable", whole.value, whole)
    _derive(merged, provided)
    if merged.value("data.train_files") == "embedded" and not merged.is_set("data.response_key"):
        merged.set_default("data.response_key", "ground_truth", "the embedded data's column")


def _rows_per_step(merged: Merged) -> None:
    """Rows per optimizer step = rows per pass x accumulation x workers, in the form that Transformers has."""
    per_device, accumulation = merged.take(_PER_DEVICE), merged.take(_ACCUMULATION)
    if per_device is None and accumulation is None:
        return
    first = per_device or accumulation
    assert first is not None
    if per_device is not None:
        merged.put(_MICRO, per_device.value, per_device)
    micro, steps = merged.value(_MICRO), accumulation.value if accumulation else 1
    if micro is None or micro < 1 or steps < 1:
        what = f"`{first.spelling}={first.value}`: rows per pass and accumulation steps must both be 1 or more."
        do = f"set {_PER_DEVICE} and {_ACCUMULATION}, or {_BATCH} alone"
        merged.problems.append(Problem(what, first.source, do, (_MICRO, _BATCH)))
        return
    workers = merged.value("trainer.n_gpus_per_node") * merged.value("trainer.nnodes")
    rows = micro * steps * workers
    merged.put(_BATCH, rows, first)
    merged.note(f"{_BATCH}={rows}: {micro} rows per pass x {steps} accumulation steps x {workers} worker(s).")


def _notes(checked: Checked) -> Iterator[Finding]:
    if checked.config.data.val_files is None:
        yield "No validation file is set (data.val_files): the run makes no validation."


def _check(checked: Checked) -> Iterator[Finding]:
    yield from check_choices(checked)
    yield from check_ranges(checked)
    yield from check_resume(checked)
    yield from check_quantization(checked, "model")
    yield from check_sizes(checked, (_SHARDS,), (_SEQUENCE,))
    yield from check_ray(checked)
    for examine in checks_of_packages("check"):
        yield from examine(checked)
    yield from one_process(checked)
    yield from _notes(checked)


def _no_names(merged: Merged, cwd: Path) -> None:
    """No setting of these trees names something that a file of the user's registers."""


SFT = Tree(
    main="sft_trainer",
    root=SFTConfig,
    model="model",
    spellings=Spellings(
        SFTConfig, "sft_trainer", {}, _SFT_RENAMED, {**_DERIVED, "data.multiturn": bool}, _NOT_BUILT, programs=PROGRAMS
    ),
    nothing_given=_nothing_given("posttrain sft", "columns prompt and response, or messages"),
    derive=_derive_sft,
    check_names=_no_names,
    check=_check,
)
REWARD_MODEL = Tree(
    main="reward_model_trainer",
    root=RewardTrainerConfig,
    model="model",
    spellings=Spellings(
        RewardTrainerConfig, "reward_model_trainer", {}, _RENAMED, _DERIVED, _NOT_BUILT, programs=PROGRAMS
    ),
    nothing_given=_nothing_given("posttrain reward-model", "columns prompt, chosen and rejected"),
    derive=_derive,
    check_names=_no_names,
    check=_check,
    heads=SCORE_HEADS,
)
# Verb of `posttrain` -> its tree.
COMMANDS: dict[str, Tree] = {"sft": SFT, "reward-model": REWARD_MODEL}


def command_tree(verb: str, args: Sequence[str]) -> Tree | None:
    """The supervised tree that the arguments of `posttrain config` or `posttrain plan` begin with; None for RL's."""
    word = args[0].replace("_", "-") if args else ""
    if re.fullmatch(r"[A-Za-z][\w-]*", word) and word not in ("train", *COMMANDS):
        raise UserError(
            f"posttrain {verb} {args[0]}: the first word may be `train` (train.sh), `sft` or `reward-model`; without "
            "one, settings (key=value) are read as posttrain.trainer.main_ppo reads them"
        )
    return COMMANDS.get(word)
