"""What `train.sh` adds to the settings: flags, environment variables and its own defaults (`launch_flags.py`).

`key=value` wins over a flag, a flag over an environment variable, that over the defaults. The table's defaults hold as
soon as a model is named; without one the preset `embedded` serves. `posttrain train` takes the same arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.config.resolved import ConfigError
from posttrain.launch_flags import (
    BY_FLAG,
    ESTIMATOR,
    KL_COEF,
    MODEL,
    REWARD,
    SETTINGS,
    USE_KL,
    Request,
    parse,
    variable_of,
)
from posttrain.tracking.terminal_text import print_text

if TYPE_CHECKING:
    from posttrain.config import Resolved

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
    by_key = {PPO.spellings.canonical(key).key or key: source for key, source in keys.items()}
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
    from posttrain.config.trees import command_tree

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
