"""What the entries of all trainers share: settings from a command line or a caller, and a run that has the console."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posttrain.config.checked import Tree
from posttrain.config.load import load_config
from posttrain.config.resolved import Resolved
from posttrain.config.trees import PPO
from posttrain.tracking.console import command_console, protect_console
from posttrain.tracking.terminal_text import print_text


def as_resolved(config: Any, tree: Tree = PPO, *, provided: Iterable[str] = ()) -> Resolved:
    """A checked configuration from whatever a caller has; `provided` are keys whose rows are given in Python."""
    if isinstance(config, Resolved):
        return config
    arguments = config.to_dict() if isinstance(config, tree.root) else config
    return load_config(arguments, environment=True, provided=provided, tree=tree)


def read_command_line(args: Sequence[str], usage: str, tree: Tree = PPO) -> Resolved | None:
    """The settings of the run that a command asks for; None if it asks to see them, which is done here."""
    # Printing settings must not fail for what this machine lacks: the environment is checked for runs only.
    shows = any(arg.startswith("--cfg") or arg in ("-c", "-h", "--help") for arg in args)
    resolved = load_config(list(args), environment=not shows, tree=tree)
    if resolved.show is None:
        protect_console()
        return resolved
    if resolved.show == "help":
        print(usage)
        print_text(resolved.describe())
    else:
        print(resolved.to_yaml(), end="")
    return None


def greeting(resolved: Resolved) -> str:
    return f"Configuration: {resolved.main_file} and the command line"


def run_with_console(resolved: Resolved, mode: str, run: Callable[[Resolved], Any], first: str = "") -> Any:
    """A training that has this process's console: it prints as `mode` says, and libraries write to its log."""
    with command_console(mode) as console:
        if first:
            print(first)
        result = run(resolved)
        console.end(result)
        return result
