"""The table of `train.sh`: flags, their environment variables, the keys that both set, its defaults with a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config.resolved import Problem
from posttrain.other_systems.names import counterpart
from posttrain.spelling import closest

MODEL = "actor_rollout_ref.model.path"
REWARD = "custom_reward_function.path"
USE_KL = "actor_rollout_ref.actor.use_kl_loss"
KL_COEF = "actor_rollout_ref.actor.kl_loss_coef"
KL_TYPE = "actor_rollout_ref.actor.kl_loss_type"
NORM = "algorithm.norm_adv_by_std_in_grpo"


@dataclass(frozen=True)
class Setting:
    """One row: a flag, its environment variable, the key that both set, the default with --model."""

    flag: str
    variable: str | None
    key: str
    default: str | None
    help: str


SETTINGS = (
    Setting("model", None, MODEL, None, "folder or hub id of the model to train"),
    Setting("train_files", "TRAIN_FILES", "data.train_files", None, "json, jsonl or parquet; several with commas"),
    Setting("val_files", "VAL_FILES", "data.val_files", None, "validation data, likewise"),
    Setting("reward_func", None, REWARD, None, "Python file with your compute_score"),
    Setting("rollout_n", "ROLLOUT_N", "actor_rollout_ref.rollout.n", "5", "responses per prompt"),
    Setting("epochs", "TOTAL_EPOCHS", "trainer.total_epochs", "15", "passes over the training data"),
    Setting("train_batch_size", "TRAIN_BATCH_SIZE", "data.train_batch_size", "256", "prompts per step"),
    Setting(
        "max_response_length", "MAX_RESPONSE_LENGTH", "data.max_response_length", "1024", "longest response (tokens)"
    ),
    Setting("lr", "LEARNING_RATE", "actor_rollout_ref.actor.optim.lr", "1e-6", "learning rate"),
    Setting("use_kl_loss", "USE_KL_LOSS", USE_KL, "true", "KL loss: holds the policy near where it started"),
    Setting("kl_coef", "KL_LOSS_COEF", KL_COEF, "0.001", "its coefficient; above 0 switches it on, 0 off"),
    Setting("kl_loss_type", "KL_LOSS_TYPE", KL_TYPE, "low_var_kl", "how the KL is estimated"),
    Setting("norm_adv_by_std", "NORM_ADV_BY_STD", NORM, "true", "divide advantages by the group's deviation"),
    Setting("n_gpus", None, "trainer.n_gpus_per_node", "1", "worker processes, one per GPU"),
)
BY_FLAG = {setting.flag: setting for setting in SETTINGS}
ESTIMATOR = ("algorithm.adv_estimator", "grpo")  # what train.sh is for; it has no flag of its own

# Hydra's options, which the loading of the configuration answers; the first ones take a value.
_HYDRA_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--cfg", "-c")
_HYDRA_ALONE = ("--resolve", "--multirun", "-m", "--run", "-r", "--info", "--hydra-help")
# What a flag of that name would be here: a flag, or a setting.
_OFTEN_MEANT = {
    "lora": "actor_rollout_ref.model.lora_rank=8",
    "lora_rank": "actor_rollout_ref.model.lora_rank=8",
    "batch_size": "train_batch_size",
    "learning_rate": "lr",
    "kl_loss_coef": "kl_coef",
    "num_epochs": "epochs",
    "total_epochs": "epochs",
    "reward": "reward_func",
    "data": "train_files",
}
_FLAG_LIKE = re.compile(r"^--?[A-Za-z]")


@dataclass
class Request:
    """A command line of train.sh, taken apart."""

    rest: list[str] = field(default_factory=list)  # key=value and Hydra's options, in their order
    flags: dict[str, str] = field(default_factory=dict)
    train_sh: Path | None = None  # folder of the train.sh that started us; `posttrain train` has none
    help: bool = False
    problems: list[Problem] = field(default_factory=list)  # wrong flags; told together with what is wrong with the rest


def parse(args: Sequence[str]) -> Request:
    """Tell the table's flags from key=value and Hydra's options; `problems` names every wrong flag."""
    request, queue = Request(), list(args)
    problems = request.problems
    while queue:
        argument = queue.pop(0)
        name, equals, value = argument.partition("=")
        flag = name[2:].replace("-", "_")
        if argument in ("-h", "--help"):
            request.help = True
        elif name == "--train-sh":
            request.train_sh = Path(value)
        elif name.startswith("--") and flag in BY_FLAG:
            # What looks like the next flag is no value: this flag's was forgotten.
            if not equals and queue and not _FLAG_LIKE.match(queue[0]):
                value = queue.pop(0)
            if value.strip():
                request.flags[flag] = value
            else:
                problems.append(Problem(f"The flag `{name}` has no value.", "command line", f"write `{name} VALUE`"))
        elif name in _HYDRA_WITH_VALUE and not equals:
            request.rest += [argument, *queue[:1]]
            del queue[:1]
        elif _FLAG_LIKE.match(argument) and name not in _HYDRA_WITH_VALUE + _HYDRA_ALONE:
            problems.append(_unknown_flag(argument))
            if not equals and queue and "=" not in queue[0] and not _FLAG_LIKE.match(queue[0]):
                queue.pop(0)  # its value
        else:
            request.rest.append(argument)
    return request


def _unknown_flag(argument: str) -> Problem:
    name, _, value = argument.partition("=")
    word = name.lstrip("-").replace("-", "_")
    near = _OFTEN_MEANT.get(word) or closest(word, BY_FLAG)
    if "." in name and value:
        do = f"settings are given without dashes: {name.lstrip('-')}={value}"
    elif word not in _OFTEN_MEANT and (said := counterpart(name)):
        do = f"{said}; such settings are given as key=value"
    elif near:
        do = f"did you mean `{near if '=' in near else f'--{near}'}`? `--help` lists the flags"
    else:
        do = "`--help` lists the flags; every other setting is given as key=value"
    return Problem(f"There is no flag `{name}`.", "command line", do)


def variable_of(setting: Setting, environ: Mapping[str, str]) -> str:
    """The value of the row's variable; empty where it is unset."""
    return environ.get(setting.variable, "").strip() if setting.variable else ""


def help_text(environ: Mapping[str, str]) -> str:
    """The flags, their variables and both columns of defaults."""
    from posttrain.config.choices import EMBEDDED

    rows = [("flag", "variable", "with --model", "without", "")]
    for s in SETTINGS:
        default = s.default or {REWARD: "reward_func.py", "data.train_files": "embedded"}.get(s.key, "-")
        embedded = default if s.key not in EMBEDDED else _shown(EMBEDDED[s.key])
        if s.flag == "epochs" and (steps := EMBEDDED.get("trainer.total_training_steps")):
            embedded = f"{steps} steps"
        value = variable_of(s, environ)
        now = f" (now {s.variable}={value})" if value else ""
        rows.append((f"--{s.flag}", s.variable or "", default, embedded, s.help + now))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join([USAGE, *(f"  {line.rstrip()}" for line in lines), "", NOTES])


USAGE = """usage: ./train.sh [--flag VALUE] [key=value] ...      (or: posttrain train ...)

Trains a language model with GRPO. Without --model it trains the small embedded model on sums, within minutes on a CPU.
"""
NOTES = """\
key=value wins over a flag, a flag over its environment variable, that over the defaults. The default reward is the
reward_func.py beside train.sh. Every other setting is given as key=value; `--config-path DIR --config-name FILE` reads
a YAML file; `--cfg job` shows the settings without training; `posttrain config` explains them. `--quiet` shows errors
and the last result only, `--json` one JSON object per step and nothing else.

  ./train.sh
  ./train.sh --model Qwen/Qwen2.5-0.5B-Instruct --train_files train.json --rollout_n 8 --epochs 20
  ./train.sh --reward_func ./my_reward.py actor_rollout_ref.model.lora_rank=8"""


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
