"""`posttrain compat check SCRIPT [KEY=VALUE ...] [--write FILE]`."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from posttrain.config import ConfigError, load_config
from posttrain.config.choices import ROLLOUT_ENGINES
from posttrain.config.commandline import cut_short
from posttrain.config.merge import Entry, Merged, Spellings
from posttrain.config.trees import PPO, SFT, Tree
from posttrain.errors import UserError
from posttrain.other_systems.verl.answers import answer, apply_answers
from posttrain.other_systems.verl.renamed import as_ours
from posttrain.other_systems.verl.rule import HONOURED, KINDS, NOT_NEEDED, NOT_SUPPORTED, TRANSLATED
from posttrain.other_systems.verl_script.program import (
    FROM_OUTSIDE,
    Call,
    find_calls,
    find_main_file,
    main_file,
    settings_of_file,
)
from posttrain.other_systems.verl_script.shell import Script
from posttrain.spelling import OptionParser, lost_lines

ENGINE = "actor_rollout_ref.rollout.name"
# Settings whose value is one of the names that were registered.
_REGISTERED = (ENGINE, "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "trainer.logger")
TREES: dict[str, Tree] = {"ppo": PPO, "sft": SFT}
# Key -> verl's default, where posttrain has another and it changes what is learnt.
DEFAULTS: dict[str, str] = {
    "data.max_response_length": "512",
    "data.filter_overlong_prompts": "False",
    "trainer.total_epochs": "30",
}
# Key -> verl's default, taken for judging the other settings where the script has the value from outside.
ASSUMED: dict[str, str] = {"trainer.n_gpus_per_node": "8", "trainer.nnodes": "1"}


@dataclass
class Report:
    """The answers for one command, and the command here."""

    call: Call
    answers: list[Answered] = field(default_factory=list)
    # Settings that make the command mean here what it means in verl, or run here at all.
    added: list[str] = field(default_factory=list)
    # What is wrong with the command as a whole, once its refused keys are left out.
    problems: list[str] = field(default_factory=list)

    @property
    def known_settings(self) -> list[str]:
        """`settings_here` for judging them: values from outside the script are assumed, or left at their default."""
        known = []
        for setting in self.settings_here:
            key = setting.lstrip("+").partition("=")[0]
            if not self.call.is_open(setting):
                known.append(setting)
            elif _takes_any_text(key, TREES[self.call.program]):
                known.append(self.call.without_outside(setting))
            elif key in ASSUMED:
                known.append(f"{key}={ASSUMED[key]}")
        return known

    @property
    def refused(self) -> list[Answered]:
        return [one for one in self.answers if one.kind in (NOT_SUPPORTED, UNKNOWN) and not self.replaced(one)]

    def replaced(self, one: Answered) -> bool:
        """Whether a setting that was added stands for it."""
        return any(setting.partition("=")[0] == one.key for setting in self.added)

    @property
    def settings_here(self) -> list[str]:
        """Settings of the command for posttrain."""
        taken = [one.setting for one in self.answers if one.kind in (HONOURED, TRANSLATED)]
        return [*(f"{key}={value}" for key, value in self.call.launched.items()), *taken, *self.added]


def examine(
    call: Call, overrides: Sequence[str] = (), *, lost: Sequence[tuple[int, str]] = (), folder: Path = Path()
) -> Report:
    """The report of one command; `overrides` are appended to its settings, as on its command line.

    `lost`: lines of the script that were meant as its arguments and never arrive; `folder` is the script's own."""
    report, tree = Report(call), TREES[call.program]
    given = [*call.settings, *overrides]
    keys = {setting.lstrip("+").partition("=")[0] for setting in given}
    of_file = [setting for setting in _of_main_file(call, folder) if setting.partition("=")[0] not in keys]
    # The last value of a key counts, as on verl's command line.
    last = {setting.lstrip("+~").partition("=")[0]: setting for setting in [*of_file, *given]}
    opened = [setting for setting in last.values() if call.is_open(setting)]
    report.answers = [
        *answer_all([setting for setting in last.values() if setting not in opened], tree),
        *(_without_value(setting, tree) for setting in opened),
    ]
    if call.program == "ppo":
        report.added = _additions({one.key: one.setting.partition("=")[2] for one in report.answers})
    report.problems = [str(problem) for problem in [*call.line.problems, *([cut_short(lost)] if lost else [])]]
    try:
        # What single keys do not show: settings that contradict each other, found by the checks of a real run.
        load_config(report.known_settings, tree=tree)
    except ConfigError as error:
        # A file below a folder that only the environment names may well exist.
        report.problems += [str(problem) for problem in error.problems if FROM_OUTSIDE not in str(problem)]
    return report


def _of_main_file(call: Call, folder: Path) -> list[str]:
    """What the main file sets: verl's own, or one of the user's that is found."""
    if (file := find_main_file(call.line, folder)) is None:
        return [setting for setting, _ in as_ours(replace(call.line), folder)]
    try:
        return settings_of_file(file)
    except ValueError as error:
        raise UserError(f"The main file {file} cannot be read: {error}") from None


def _takes_any_text(key: str, tree: Tree) -> bool:
    """Whether the setting is a name or a path of the user's, so that `$NAME` in it is as good as what it stands for."""
    found = tree.canonical(key).key
    leaf = tree.leaf_of(found) if found is not None and found not in _REGISTERED else None
    return leaf is not None and not leaf.choices and "str" in str(leaf.hint)


def _without_value(setting: str, tree: Tree) -> Answered:
    """The answer to a key whose value the script has from outside."""
    key = setting.lstrip("+~").partition("=")[0]
    found = answer(key, tree)
    if found is None:
        return answer_all([f"{key}=null"], tree)[0]._replace(setting=setting)
    return Answered(setting, key, found.kind, found.says)


def _additions(values: dict[str, str]) -> list[str]:
    # Written out, because a script that relies on verl's defaults would learn something else here.
    added = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in values]
    if values.get("algorithm.adv_estimator", "gae") == "gae" and "critic.loss_agg_mode" not in values:
        mode = values.get("actor_rollout_ref.actor.loss_agg_mode")
        added += [f"critic.loss_agg_mode={mode}"] if mode else []
    engine = values.get(ENGINE, "native").strip("\"'")
    if not can_generate(engine):
        added.append(f"{ENGINE}=native")
    return added


def as_text(report: Report, *, every: bool) -> str:
    """The report for a terminal; `every`: honoured keys too."""
    lines = [f"{report.call.module}: {len(report.answers)} settings"]
    for kind in (UNKNOWN, NOT_SUPPORTED, NOT_NEEDED, TRANSLATED, *((HONOURED,) if every else ())):
        chosen = [one for one in report.answers if one.kind == kind]
        lines += [f"\n{kind}:"] if chosen else []
        lines += [f"  {one.setting}" + (f"\n      {one.says}" if one.says else "") for one in chosen]
    counts = [f"{sum(one.kind == kind for one in report.answers)} {kind}" for kind in KINDS]
    unknown = sum(one.kind == UNKNOWN for one in report.answers)
    lines.append(f"\n{', '.join(counts)}" + (f", {unknown} unknown" if unknown else ""))
    if report.added:
        lines.append("added for the command here: " + " ".join(report.added))
    if report.problems:
        lines += ["what is left to change:", *(f"  - {problem}" for problem in report.problems)]
    return "\n".join(lines)


UNKNOWN = "unknown"
_READ_BY_ALGORITHMS = ("algorithm.", "actor_rollout_ref.actor.")
_ADDED = (
    "a key added for an algorithm of your own; `python3 -m verl.trainer.main_ppo` of the package posttrain-verl hands "
    "it to estimators and losses registered for verl"
)


# Rollout engines that are packages of the same name -> what they call themselves.
PACKAGES = {"vllm": "vLLM", "sglang": "SGLang"}


def is_installed(package: str) -> bool:
    """Nothing is imported to find out."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def can_generate(engine: str) -> bool:
    """Whether there is an engine of this name, and its package is installed."""
    return engine in ROLLOUT_ENGINES and (engine not in PACKAGES or is_installed(engine))


class Answered(NamedTuple):
    """One setting of a command, and what becomes of it."""

    setting: str
    key: str
    kind: str
    says: str


def answer_all(settings: Iterable[str], tree: Tree) -> list[Answered]:
    """The answer to each `key=value`; the last value of a key counts."""
    last = {_pair(setting)[1]: _pair(setting) for setting in settings}
    # All at once: what a key means can depend on others of the script.
    merged, pairs = Merged(tree), list(last.values())
    for _, key, value in pairs:
        merged.add(Entry(value, key, "script", 1))
    aside = apply_answers(merged)
    return [_answer_one(setting, key, value, aside, tree) for setting, key, value in pairs]


def _pair(setting: str) -> tuple[str, str, str]:
    key, _, value = setting.lstrip("+~").partition("=")
    return setting, key, value


def _answer_one(setting: str, key: str, value: str, aside: dict[str, tuple[str, str]], names: Spellings) -> Answered:
    if key in aside:
        return Answered(setting, key, *aside[key])
    if key.startswith("hydra."):
        return Answered(setting, key, NOT_SUPPORTED, "Hydra's own settings are off; remove it")
    found = names.canonical(key)
    if found.not_built:
        return Answered(setting, key, NOT_SUPPORTED, found.not_built)
    if found.key is None and setting.startswith("+") and key.startswith(_READ_BY_ALGORITHMS):
        return Answered(setting, key, NOT_SUPPORTED, _ADDED)
    if found.key is None:
        return Answered(setting, key, UNKNOWN, names.nearest(key))
    engine = value.strip("\"'")
    if found.key == ENGINE and engine in PACKAGES and not is_installed(engine):
        missing = f"{PACKAGES[engine]} is not installed here; install it, or set {ENGINE}=native"
        return Answered(setting, key, NOT_SUPPORTED, missing)
    if found.key == ENGINE and engine not in ROLLOUT_ENGINES:
        return Answered(setting, key, NOT_SUPPORTED, f"this engine is not built; set {ENGINE}=native")
    if found.key == key and names.leaf_of(key) is not None:
        return Answered(setting, key, HONOURED, "")
    return Answered(setting, key, TRANSLATED, f"`{found.key}`")


_ALWAYS_SET = ("$HOME", "${HOME}", "$USER", "${USER}", "$PWD", "${PWD}")
_VARIABLE = re.compile(r"\$\{?\w")
_COMMANDS = {
    "ppo": "python3 -m posttrain.trainer.main_ppo",
    "sft": "posttrain sft",
    "generation": "python3 -m posttrain.trainer.main_generation",
    "evaluation": "python3 -m posttrain.trainer.main_eval",
}


def main(args: Sequence[str]) -> int:
    """0 if every key is taken, 1 if something is left to change."""
    parser = OptionParser(
        prog="posttrain compat",
        usage="posttrain compat check SCRIPT [KEY=VALUE ...] [--all] [--write FILE]",
        description="Reads a run script of verl, without running it, and says what becomes of each of its keys.",
    )
    parser.add_argument("job", choices=["check"])
    parser.add_argument("script", type=Path, help="a shell script that starts verl")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings, as after the script's own")
    parser.add_argument("--all", action="store_true", help="list the honoured keys too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the command for posttrain ('-': print it)")
    options = parser.parse_intermixed_args(list(args))
    script, calls = read_script(options.script)
    text = _text(options.script)
    good = True
    written = []
    for call in calls:
        if call.program not in TREES:
            written.append(plain_command(call))
            continue
        report = examine(call, options.settings, lost=lost_lines(text, call.settings), folder=options.script.parent)
        print(as_text(report, every=options.all))
        for line in remarks(call, script, options.script.parent):
            print(line)
        good = good and not report.refused and not report.problems
        written.append(command_of(report))
    if options.write is not None:
        _write(options.write, options.script, written)
    return 0 if good else 1


def read_script(path: Path) -> tuple[Script, list[Call]]:
    """The script and its commands of verl; raises UserError where there is none."""
    script = Script(_text(path))
    calls = find_calls(script)
    if not calls:
        raise UserError(
            f"{path} starts no program of verl: a command such as `python3 -m verl.trainer.main_ppo KEY=VALUE ...` was "
            "looked for. Give the file in which it stands."
        )
    return script, calls


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no file {path}. Give the run script that starts verl.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder. Give the run script in it that starts verl.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text. Give the run script that starts verl.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


def remarks(call: Call, script: Script, folder: Path) -> list[str]:
    """What the reader should know beside the keys."""
    lines = []
    if (name := main_file(call.line)) is not None:
        file = find_main_file(call.line, folder)
        lines.append(f"read: {file}" if file else f"not read: the main file {name} (give what it sets as KEY=VALUE)")
    if not call.is_main:
        lines.append(f"{call.module} is a program of its own; posttrain's for it is: {_COMMANDS[call.program]}")
    for text in script.variables.unset:
        keys = [setting.partition("=")[0].lstrip("+") for setting in call.settings if text in setting]
        if keys and text not in _ALWAYS_SET:
            given = "set before it is run" if _VARIABLE.match(text) else "filled in when it is run"
            taken = [f"{ASSUMED[key]} is assumed here" for key in keys if key in ASSUMED]
            lines.append(f"{given}: {text} ({', '.join([*keys[:3], *(['...'] if len(keys) > 3 else []), *taken])})")
    return lines


def plain_command(call: Call) -> str:
    """Generation and evaluation take verl's keys as they are."""
    return _COMMANDS[call.program] + "".join(f" \\\n    {quote_word(setting)}" for setting in call.settings)


def command_of(report: Report) -> str:
    """The command for posttrain, refused keys and their reasons above it."""
    lines = [f"# left out, not supported: {one.setting} ({one.says})" for one in report.refused]
    settings = "".join(f" \\\n    {quote_word(setting)}" for setting in report.settings_here)
    return "\n".join([*lines, f"{_COMMANDS[report.call.program]}{settings}"])


def quote_word(text: str) -> str:
    """A word for the shell in which `$NAME` is still read."""
    if "$" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    return f'"{escaped}"'


def _write(target: Path, source: Path, commands: list[str]) -> None:
    text = f"# Written by `posttrain compat check` from {source.name}.\nset -e\n" + "\n\n".join(commands) + ' "$@"\n'
    if str(target) == "-":
        print(text)
        return
    target.write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
    target.chmod(0o755)
    print(f"written: {target}")
