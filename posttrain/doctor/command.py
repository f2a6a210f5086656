"""`posttrain doctor` and `trainer.dry_run=true`: check a run for problems before it starts.

No weights are loaded and nothing is written, except that the embedded task is made if the run would use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from posttrain.config import ConfigError, Resolved, load_config
from posttrain.config.trees import COMMANDS, PPO, Tree
from posttrain.doctor.case import ERROR, WARNING, Case, Finding, Report
from posttrain.errors import UserError
from posttrain.launch import command_tree, resolve_arguments
from posttrain.tracking.console import JSON, active, print_text
from posttrain.tracking.progress import waiting

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
    with redirect_stdout(sys.stderr), waiting("looking"):  # stdout is for the report, not for libraries
        report = examine(rest)
    print(report.to_json()) if "--json" in args else print_text(report.text())
    return report.exit_status


def examine(args: Sequence[str], areas: Sequence[str] | None = None) -> Report:
    """The report of a command line, read as `posttrain doctor` reads it; `areas` limits it to some checks."""
    tree = command_tree("doctor", args) or PPO
    report = Report()
    try:
        resolved = _resolve(args, tree, environment=True)
    except ConfigError as error:
        report.add(Finding.of(problem, "configuration") for problem in error.problems)
        try:  # perhaps the settings are fine and only this machine lacks something
            resolved = _resolve(args, tree, environment=False)
        except ConfigError:
            report.fact("configuration", "Nothing else was looked at: the settings must be readable first.")
            return report
    return run_checks(resolved, tree, report, areas)


def _resolve(args: Sequence[str], tree: Tree, *, environment: bool) -> Resolved:
    if tree is not PPO:
        return load_config(list(args[1:]) or {}, tree=tree, environment=environment)
    return resolve_arguments(args, environment=environment)


Check = Callable[[Any], Iterator[Finding]]


def checks() -> dict[str, Check]:
    """Area -> its check, in the order in which they can use each other's results."""
    from posttrain.doctor.batch import check_batch, check_pace
    from posttrain.doctor.conversations import check_template, check_tools
    from posttrain.doctor.resources import check_memory, check_resources
    from posttrain.doctor.reward import check_reward
    from posttrain.doctor.rows import check_rows
    from posttrain.doctor.settings import check_settings

    return {
        "configuration": check_settings,
        "tools": check_tools,
        "data": check_rows,
        "template": check_template,
        "reward": check_reward,
        "batch": check_batch,
        "memory": check_memory,
        "time": check_pace,
        "resources": check_resources,
    }


def run_checks(
    resolved: Resolved, tree: Tree, report: Report | None = None, areas: Sequence[str] | None = None
) -> Report:
    """The report of these settings; a check that fails becomes a finding."""
    report = report or Report()
    case = Case(resolved, tree, report)
    try:
        _prepare(case)
    except UserError as error:
        report.add([Finding(ERROR, "configuration", str(error))])
        return report
    for area, check in checks().items():
        if areas is not None and area not in areas:
            continue
        try:
            for finding in check(case):
                report.add([finding])
        except UserError as error:
            report.add([Finding(ERROR, area, str(error))])
        except Exception as error:  # a library that fails on a file must not hide the other checks' findings
            what = f"This could not be looked at: {type(error).__name__}: {error}"
            report.add([Finding(WARNING, area, what, "", "look at the other findings first; a run may stop here too")])
    return report


def _prepare(case: Any) -> None:
    # Import the user's own module, and make the embedded task if the run would use it.
    if library := case.model.external_lib:
        from posttrain.external import import_external

        import_external(library, f"{case.tree.model}.external_lib")
    data = case.config.data
    wants_model = case.model.path in (None, "embedded")
    if not (wants_model or data.train_files in (None, "embedded") or data.val_files == "embedded"):
        return
    from posttrain.trainer.embedded import ensure_embedded

    folder = ensure_embedded(lambda text: print_text(text, sys.stderr), model=wants_model)
    if wants_model:
        case.model.path = str(folder / "model")
    for split, file in (("train", "train.json"), ("val", "test.json")):
        if data[f"{split}_files"] == "embedded" or (split == "train" and data.train_files is None):
            setattr(data, f"{split}_files", str(_embedded_file(case, folder, file)))


def _embedded_file(case: Any, folder: Path, file: str) -> Path:
    if not case.is_pairs:
        return folder / file
    from posttrain.trainer.supervised.tasks import embedded_pairs

    return embedded_pairs(folder)["train" if file == "train.json" else "test"]


def dry_run(resolved: Resolved) -> Report:
    """For `trainer.dry_run=true`: prints the report instead of training, whatever output mode the command has."""
    tree = next((tree for tree in COMMANDS.values() if isinstance(resolved.config, tree.root)), PPO)
    with redirect_stdout(sys.stderr), waiting("looking"):  # what libraries print is no part of the report
        report = run_checks(resolved, tree)
    console = active()
    wants_json = console is not None and console.mode == JSON
    out: Any = console.out if console else sys.stdout
    print(report.to_json(), file=out) if wants_json else print_text(report.text(), out)
    return report
