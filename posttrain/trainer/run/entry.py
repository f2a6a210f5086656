"""What the entries of all trainers share: settings from a command line or a caller, and a run that has the console.

`check_inputs` finds before torch is imported what a run would stop for soon after its start: data files that cannot be
read, rows without their columns, a reward file that is not Python. An import of torch takes seconds, on a busy machine
many. Only the first rows are looked at here; data sets look at every one, and so tell the same of later rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.load import load_config
from posttrain.config.resolved import Resolved
from posttrain.config.trainer import HELD_OUT
from posttrain.config.trees import PPO, Tree
from posttrain.tracking.console import (
    command_console,
    exit_status,
    prepare_streams,
    print_text,
    protect_console,
    split_output_mode,
)
from posttrain.trainer.constants_ppo import apply_environment

if TYPE_CHECKING:
    from posttrain.data.rows import RowTable


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


ROWS = 100
# Takes a table, a row and the settings `data`; raises a UserError for a row that lacks something.
Look = Callable[["RowTable", int, Any], object]


def check_inputs(resolved: Resolved, look: Look) -> None:
    """Raises the UserError that the run would raise later. What was read is kept for the run."""
    if resolved.node_rank:
        return  # machine 0 drives the run, and has the data
    from posttrain.data.rows import read_ahead

    config = resolved.config
    _look_at_reward(config)
    for split in ("train", "val"):
        files, limit = config.data[f"{split}_files"], int(config.data[f"{split}_max_samples"])
        if files in (None, "embedded", HELD_OUT) or limit == 0 or getattr(config.data, "custom_cls", None):
            continue  # a class of the user's own reads its files itself
        table = read_ahead(files, limit=limit, setting=f"data.{split}_files")
        for row in range(min(ROWS, len(table))):
            look(table, row, config.data)


def _look_at_reward(config: Any) -> None:
    # A worker process, which a close look needs, takes a moment to start: only files that look wrong get one.
    own = getattr(config, "custom_reward_function", None)
    if own is None:
        return
    if any(_seems_wrong(path, name) for path, name in _python_files(own, config.reward.functions)):
        from posttrain.rewards.loading import resolve_reward

        resolve_reward(own, functions=config.reward.functions)


def _python_files(own: Any, functions: Mapping[str, Any]) -> Iterator[tuple[Path, str | None]]:
    named = [own, *(entry for entry in functions.values() if isinstance(entry, Mapping))]
    for entry in named:
        path = entry.get("path") if isinstance(entry, Mapping) else entry.path
        name = entry.get("name") if isinstance(entry, Mapping) else entry.name
        if isinstance(path, str) and path.endswith(".py"):
            yield Path(path).expanduser(), name


def _seems_wrong(path: Path, name: str | None) -> bool:
    try:
        source = path.read_text(encoding="utf-8")
        compile(source, str(path), "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError):
        return True
    return name is not None and name not in source


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
