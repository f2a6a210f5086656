"""The command lines of the supervised trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.config.checked import Tree
from posttrain.config.resolved import Resolved
from posttrain.tracking.console import exit_status, prepare_streams, split_output_mode
from posttrain.trainer.constants_ppo import apply_environment
from posttrain.trainer.run.entry import as_resolved, greeting, read_command_line, run_with_console
from posttrain.trainer.run.preflight import check_inputs


def settings_of(config: Any, tree: Tree, check_row: Callable[..., Any], *, data: Any, val_data: Any) -> Resolved:
    """A checked configuration from whatever a caller has. Rows given in Python need no files; otherwise the first rows
    of each file are checked, too."""
    given = {"data.train_files": data, "data.val_files": val_data}
    provided = [key for key, rows in given.items() if rows is not None]
    resolved = as_resolved(config, tree, provided=provided)
    if not provided:
        check_inputs(resolved, check_row)
    return resolved


def run_cli(
    args: Sequence[str], tree: Tree, usage: str, run: Callable[[Any], Any], dry_run: Callable[[Resolved], Any]
) -> int:
    """The exit status; errors meant for users are printed as they are. `dry_run` examines the run instead of it."""
    prepare_streams()
    return exit_status(lambda: _run(args, tree, usage, run, dry_run))


def _run(
    args: Sequence[str], tree: Tree, usage: str, run: Callable[[Any], Any], dry_run: Callable[[Resolved], Any]
) -> int:
    args, mode = split_output_mode(args)
    resolved = read_command_line(args, usage, tree)
    if resolved is None:
        return 0
    apply_environment()
    work = dry_run if resolved.dry_run else run
    return run_with_console(resolved, mode, work, greeting(resolved)).exit_status
