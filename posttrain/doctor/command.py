"""`posttrain doctor`: the command line whose run is looked at, and the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from posttrain.config import ConfigError, Resolved, load_config
from posttrain.config.ppo_tree import PPO
from posttrain.config.supervised_tree import command_tree
from posttrain.config.tree import Tree
from posttrain.doctor.checkup import look_at
from posttrain.doctor.finding import Finding, Report
from posttrain.launch import resolve_arguments
from posttrain.tracking.folding import tell
from posttrain.tracking.waiting import waiting

USAGE = """usage: posttrain doctor [--json] [train] [--flag VALUE] [key=value] ...   as train.sh reads it
       posttrain doctor [--json] sft [key=value] ...                    as posttrain sft reads it
       posttrain doctor [--json] reward-model [key=value] ...           as posttrain reward-model reads it

Looks at a run before it starts, without loading weights: settings, data on real rows, chat template, the reward on real
rows, the batch in words, memory, time per step, disk, packages. `trainer.dry_run=true` in a training command does the
same. Exit status: 0 nothing was found, 1 something is worth a look, 2 the run would not work."""


def main(args: Sequence[str]) -> int:
    """The command; its exit status is 0, 1 or 2."""
    rest = [argument for argument in args if argument != "--json"]
    if {"-h", "--help"} & set(rest):
        print(USAGE)
        return 0
    with redirect_stdout(sys.stderr), waiting("looking"):  # what libraries print is no part of the report
        report = examine(rest)
    print(report.to_json()) if "--json" in args else tell(report.text())
    return report.exit_status


def examine(args: Sequence[str], areas: Sequence[str] | None = None) -> Report:
    """The report of a command line, read as `posttrain doctor` reads it; `areas` limits it to some checks."""
    tree = command_tree("doctor", args) or PPO
    report = Report()
    try:
        resolved = _resolve(args, tree, environment=True)
    except ConfigError as error:
        report.add(Finding.of(problem, "configuration") for problem in error.problems)
        try:  # the settings may be sound, and only this machine lack something
            resolved = _resolve(args, tree, environment=False)
        except ConfigError:
            report.fact("configuration", "Nothing else was looked at: the settings must be readable first.")
            return report
    return look_at(resolved, tree, report, areas)


def _resolve(args: Sequence[str], tree: Tree, *, environment: bool) -> Resolved:
    if tree is not PPO:
        return load_config(list(args[1:]) or {}, tree=tree, environment=environment)
    return resolve_arguments(args, environment=environment)
