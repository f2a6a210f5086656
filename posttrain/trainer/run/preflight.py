"""What a run would stop for soon after its start, found before torch is imported: data files that cannot be read, rows
without their columns, a reward file that is not Python. An import of torch takes seconds, on a busy machine many.

Only the first rows are looked at here; data sets look at every one, and so tell the same of later rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.data import HELD_OUT
from posttrain.config.resolved import Resolved
from posttrain.data.rows import RowTable, read_ahead

ROWS = 100
# Takes a table, a row and the settings `data`; raises a UserError for a row that lacks something.
Look = Callable[[RowTable, int, Any], object]


def check_inputs(resolved: Resolved, look: Look) -> None:
    """Raises the UserError that the run would raise later. What was read is kept for the run."""
    if resolved.node_rank:
        return  # machine 0 drives the run, and has the data
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
