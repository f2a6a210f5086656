"""What is said about a command of verl: each key with its answer, counts, and what remains to be changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.compat_check.program import Call
from posttrain.config import ConfigError, load_config
from posttrain.config.engine_kwargs import can_generate
from posttrain.config.ppo_tree import PPO
from posttrain.config.supervised_tree import SFT
from posttrain.config.tree import Tree
from posttrain.config.verl.rule import HONOURED, KINDS, NOT_NEEDED, NOT_SUPPORTED, TRANSLATED
from posttrain.config.verl.script import UNKNOWN, Answered, answer_all

ENGINE = "actor_rollout_ref.rollout.name"
TREES: dict[str, Tree] = {"ppo": PPO, "sft": SFT}
DEFAULTS: dict[str, str] = {
    "data.max_response_length": "512",
    "data.filter_overlong_prompts": "False",
    "trainer.total_epochs": "30",
}
"""Key -> verl's default, where posttrain has another and it changes what is learnt."""


@dataclass
class Report:
    """The answers for one command, and the command here."""

    call: Call
    answers: list[Answered] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """Settings that make the command mean here what it means in verl, or run here at all."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the command as a whole, once its refused keys are left out."""

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


def examine(call: Call, overrides: Sequence[str] = ()) -> Report:
    """The report of one command; `overrides` are appended to its settings, as on its command line."""
    report, tree = Report(call), TREES[call.program]
    report.answers = answer_all([*call.settings, *overrides], tree)
    if call.program == "ppo":
        report.added = _additions({one.key: one.setting.partition("=")[2] for one in report.answers})
    try:
        load_config(report.settings_here, tree=tree)
    except ConfigError as error:
        report.problems = [str(problem) for problem in error.problems]
    return report


def _additions(values: dict[str, str]) -> list[str]:
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
