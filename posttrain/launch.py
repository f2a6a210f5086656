"""What `train.sh` adds to the settings: flags, environment variables and its own defaults.

`key=value` wins over a flag, a flag over an environment variable, that over the defaults. The table's defaults hold as
soon as a model is named; without one the preset `embedded` serves. `posttrain train` takes the same arguments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.config.resolved import ConfigError, Problem
from posttrain.other_systems.names import counterpart
from posttrain.spelling import closest
from posttrain.texts import align_columns
from posttrain.tracking.console import print_text

if TYPE_CHECKING:
    from posttrain.config import Resolved
    from posttrain.config.trees import Tree


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
    problems: list[Problem] = field(default_factory=list)  # wrong flags; reported together with other problems


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
    return "\n".join([USAGE, *(f"  {line}" for line in align_columns(rows, left=range(5))), "", NOTES])


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


# Source of what train.sh sets itself; what begins with "default" does not count as set by the user.
DEFAULT = "default of train.sh"

Labelled = list[tuple[str, str]]


def user_overrides(flags: Mapping[str, str], environ: Mapping[str, str]) -> Labelled:
    """(override, source) of the flags and environment variables given: one per key, the flag's where both are."""
    variables = {s.key: (variable_of(s, environ), f"environment variable {s.variable}") for s in SETTINGS}
    chosen = _with_kl_switch({key: pair for key, pair in variables.items() if pair[0]})
    chosen |= _with_kl_switch({BY_FLAG[flag].key: (value, f"flag --{flag}") for flag, value in flags.items()})
    return [(f"{key}={value}", source) for key, (value, source) in chosen.items()]


def _with_kl_switch(chosen: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    # A KL coefficient asks for the KL loss, and 0 for none, unless the switch itself was given at the same rank.
    if KL_COEF not in chosen or USE_KL in chosen:
        return chosen
    value, source = chosen[KL_COEF]
    try:
        on = float(value) != 0
    except ValueError:
        return chosen  # the loading of the configuration says what is wrong with it
    return {**chosen, USE_KL: (str(on), source)}


def resolve(request: Request, environ: Mapping[str, str], *, environment: bool = False) -> Resolved:
    """The settings of this command line; raises ConfigError with everything that is wrong.

    environment: also check the files, packages and devices of this machine.
    """
    from posttrain.config import load_config

    given = user_overrides(request.flags, environ)
    taken = _taken(request.rest, given)
    labelled = [*defaults(taken, request.train_sh), *given]
    try:
        resolved = load_config(request.rest, labelled=labelled, environment=environment)
    except ConfigError as error:
        raise ConfigError(request.problems + error.problems) from None
    if request.problems:
        raise ConfigError(request.problems)
    variables = [source.rpartition(" ")[2] for _, source in given if source.startswith("environment variable")]
    if variables:
        used = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(variables))
        resolved.notes.append(f"Taken from the environment: {used}.")
    return resolved


def resolve_arguments(args: Sequence[str], *, environment: bool = False) -> Resolved:
    """Settings of a command about a run: as train.sh reads them with flags, `train` or nothing, else as main_ppo."""
    from posttrain.config import load_config

    request = parse(args[1:] if list(args[:1]) == ["train"] else args)
    if list(args[:1]) == ["train"] or request.flags or request.problems or not request.rest:
        return resolve(request, os.environ, environment=environment)
    return load_config(request.rest, environment=environment)


def _taken(rest: Sequence[str], given: Labelled) -> dict[str, str]:
    """Canonical key -> source of everything that the user set, in whatever spelling, in files and groups too."""
    from posttrain.config import load_config
    from posttrain.config.trees import PPO

    written = [*given, *((text, "command line") for text in rest if "=" in text)]
    keys = {text.partition("=")[0].lstrip("+"): source for text, source in written}
    by_key = {PPO.canonical(key).key or key: source for key, source in keys.items()}
    if all("." in text.partition("=")[0] and not text.startswith("-") for text in rest):
        return by_key
    try:  # an option or a group choice: only a first reading of the files tells
        sources = load_config(rest, labelled=given).sources
    except ConfigError:  # the second reading reports it, unless train.sh's defaults cure it
        return by_key
    return {key: source for key, source in sources.items() if not source.startswith("default")}


def defaults(taken: Mapping[str, str], train_sh: Path | None) -> Labelled:
    """What train.sh sets by itself, where `taken` (key -> source) does not say otherwise."""
    chosen: Labelled = []
    if MODEL not in taken:
        chosen.append(("preset=embedded", DEFAULT))
        if "trainer.total_epochs" in taken and "trainer.total_training_steps" not in taken:
            # The preset counts steps, which would leave the epochs that the user asked for without effect.
            chosen.append(("trainer.total_training_steps=null", taken["trainer.total_epochs"]))
    elif not taken[MODEL].startswith("preset"):
        rows = dict([ESTIMATOR, *((s.key, s.default) for s in SETTINGS if s.default is not None)])
        if "algorithm.use_kl_in_reward" in taken:
            del rows[USE_KL]  # the user has settled where KL goes
        chosen += [(f"{key}={value}", DEFAULT) for key, value in rows.items() if key not in taken]
    own_reward = REWARD in taken or any(key.startswith("reward.functions") for key in taken)
    if train_sh is not None and not own_reward and (train_sh / "reward_func.py").is_file():
        chosen.append((f"{REWARD}={train_sh / 'reward_func.py'}", DEFAULT))
    return chosen


def show_config(args: Sequence[str]) -> int:
    """`posttrain config`: every setting with value, source and sentence, without training."""
    from posttrain.config import load_config

    if (tree := command_tree("config", args)) and not {"-h", "--help"} & set(args):
        unset = ("model.path", "data.train_files") if len(args) == 1 else ()  # as below
        print_text(load_config(args[1:] or {}, provided=unset, tree=tree).describe().rstrip("\n"))
        return 0
    request = parse(args[1:] if args[:1] == ["train"] else args)
    if request.help:
        print(CONFIG_USAGE)
        return 0
    if args[:1] == ["train"] or request.flags or request.problems:
        resolved = resolve(request, os.environ)
    elif request.rest:
        resolved = load_config(request.rest)
    else:  # nothing but the defaults, not those of the embedded task that would serve
        resolved = load_config({}, provided=(MODEL, "data.train_files"))
    print_text(resolved.describe().rstrip("\n"))
    return 0


CONFIG_USAGE = """usage: posttrain config [key=value] ...             as posttrain.trainer.main_ppo would read it
       posttrain config train [--flag VALUE] ...    as train.sh would read it, environment variables included
       posttrain config sft [key=value] ...         as posttrain sft would read it
       posttrain config reward-model [key=value] ...

Prints every setting with its value, where it was set (and in which spelling), and one sentence about it."""


def command_tree(verb: str, args: Sequence[str]) -> Tree | None:
    """The supervised tree that the arguments of `posttrain config` or `posttrain plan` begin with; None for RL's."""
    from posttrain.config.trees import COMMANDS
    from posttrain.errors import UserError

    word = args[0].replace("_", "-") if args else ""
    if re.fullmatch(r"[A-Za-z][\w-]*", word) and word not in ("train", *COMMANDS):
        raise UserError(
            f"posttrain {verb} {args[0]}: the first word may be `train` (train.sh), `sft` or `reward-model`; without "
            "one, settings (key=value) are read as posttrain.trainer.main_ppo reads them"
        )
    return COMMANDS.get(word)
