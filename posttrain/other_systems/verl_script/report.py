"""The report on a command of verl: each key with its answer, counts, and what remains to be changed."""

from __future__ import annotations

import importlib.util
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
from posttrain.other_systems.verl_script.program import FROM_OUTSIDE, Call, find_main_file, settings_of_file

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
