"""The command lines of the supervised trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.config import Resolved, load_config
from posttrain.config.checked import Tree
from posttrain.tracking.console import command_console, exit_status, prepare_streams, protect_console, split_output_mode


def settings_of(config: Sequence[str] | Mapping[str, Any] | Any, tree: Tree, *, data: Any, val_data: Any) -> Resolved:
    """A checked configuration from whatever a caller has; rows given in Python need no files."""
    if isinstance(config, Resolved):
        return config
    given = {"data.train_files": data, "data.val_files": val_data}
    provided = [key for key, rows in given.items() if rows is not None]
    arguments = config.to_dict() if isinstance(config, tree.root) else config
    return load_config(arguments, environment=True, provided=provided, tree=tree)


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
    shows = any(arg.startswith("--cfg") or arg in ("-c", "-h", "--help") for arg in args)
    resolved = load_config(list(args), environment=not shows, tree=tree)
    if resolved.show is not None:
        print(usage + "\n" + resolved.describe() if resolved.show == "help" else resolved.to_yaml(), end="")
        return 0
    protect_console()
    _quiet_environment()
    with command_console(mode) as console:
        if resolved.dry_run:
            return dry_run(resolved).exit_status
        print(f"Configuration: {resolved.main_file} and the command line")
        result = run(resolved)
        console.end(result)
        return result.exit_status


def _quiet_environment() -> None:
    from posttrain.trainer.constants_ppo import apply_environment

    apply_environment()
