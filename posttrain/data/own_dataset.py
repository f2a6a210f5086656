"""A data set class of the user's own (`data.custom_cls`), with the interface of verl's `RLHFDataset`:

    Mine(data_files=..., tokenizer=..., processor=None, config=..., max_samples=-1)
    len(dataset), dataset[row]        a dict with `raw_prompt` (messages), `reward_model`, `extra_info`, ...

Its rows are read once, when the run starts, so that their order alone has to be saved with checkpoints. Never imports
torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.checked import Checked, Finding, check_dict, settings_of
from posttrain.config.trainer import HELD_OUT, DataConfig
from posttrain.data.rows import DataError, RowTable, table_of_rows
from posttrain.errors import UserError, first_line
from posttrain.external import import_external
from posttrain.spelling import closest

KEY = "data.custom_cls"


@dataclass(frozen=True)
class CustomClass:
    """Where the class is."""

    path: str | None = None
    """Its file (`FILE.py`), or `pkg://MODULE`."""
    name: str | None = None
    """Its name."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of its own, which it finds in `config` beside those of `data`."""


def check(checked: Checked) -> Iterator[Finding]:
    """Names and types, and that file and class are both given."""
    if not hasattr(getattr(checked.config, "data", None), "custom_cls"):
        return
    settings = yield from check_dict(checked, KEY, CustomClass)
    if settings is None:
        return
    if (settings.path is None) != (settings.name is None):
        missing = "name" if settings.name is None else "path"
        yield checked.problem(f"`{KEY}` has no `{missing}`.", f"set {KEY}.path=FILE.py {KEY}.name=CLASS", KEY)
    elif settings.path is not None and settings.path.endswith(".py") and not Path(settings.path).expanduser().is_file():
        what = f"`{KEY}.path`: the file {settings.path} does not exist."
        yield checked.problem(what, "give its path from the working folder", KEY)
    elif settings.path is None and settings.config:
        yield f"{KEY}.config has no effect: {KEY}.path names no class."


def open_own_rows(data: DataConfig, tokenizer: Any, rows: Any, val_rows: Any) -> tuple[Any, Any]:
    """(training rows, validation rows) of the class where one is named and no rows were given; else what was given."""
    if settings_of(CustomClass, data.custom_cls).path is None:
        return rows, val_rows
    if rows is not None:
        raise DataError(f"{KEY} has no effect, because the rows were given in Python. Remove one of the two.")
    if val_rows is None and data.val_files not in (None, HELD_OUT):
        val_rows = read_own_rows(data, "val", tokenizer)
    return read_own_rows(data, "train", tokenizer), val_rows


def read_own_rows(data: DataConfig, split: str, tokenizer: Any) -> RowTable:
    """The rows that the class makes of the files of a split."""
    settings = settings_of(CustomClass, data.custom_cls)
    name, limit = f"{settings.name} of {settings.path}", int(data[f"{split}_max_samples"])
    kind = load_named(f"{settings.path}:{settings.name}", KEY)
    files = data[f"{split}_files"]
    given = {"data_files": files, "tokenizer": tokenizer, "processor": None, "max_samples": limit}
    given["config"] = as_tree(data, settings.config)
    try:
        made = kind(**_taken(kind, given))
        rows = [_row(made[number], data.prompt_key, f"Row {number + 1} of {name}") for number in range(len(made))]
    except UserError:
        raise
    except Exception as error:
        raise DataError(f"{KEY}: {name} failed: {type(error).__name__}: {first_line(error)}") from error
    return table_of_rows(rows, limit=limit, name=name)


def _taken(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What its `__init__` takes: earlier versions have no `max_samples`."""
    parameters = inspect.signature(kind).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _row(item: Any, prompt_key: str, where: str) -> dict[str, Any]:
    """An item as a row of a file: its messages in the prompt's column, without tensors."""
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is a {type(item).__name__}; it must be a dict.")
    tensors = {name for name, value in item.items() if type(value).__module__.split(".")[0] == "torch"}
    row = {str(name): value for name, value in item.items() if name not in tensors and name not in _MADE_HERE}
    prompt = item.get("raw_prompt", item.get(prompt_key))
    if prompt is None:
        raise DataError(f"{where} has neither raw_prompt nor {prompt_key}: prompts are rendered from messages here.")
    judged = item.get("reward_model")
    if isinstance(judged, Mapping) and "ground_truth" in judged:  # which verl takes, whatever other columns there are
        row["ground_truth"] = judged["ground_truth"]
    return row | {prompt_key: prompt}


# Tokens are made from messages, and an item's number is its place.
_MADE_HERE = ("raw_prompt", "raw_prompt_ids", "full_prompts")


def as_tree(data: DataConfig, more: Mapping[str, Any] | None = None) -> Any:
    """The settings of `data` as verl's classes read them: by attribute, with `get`."""
    from omegaconf import OmegaConf

    return OmegaConf.create({**data.to_dict(), **(more or {})})


def load_named(place: str, key: str) -> Any:
    """What `FILE.py:NAME` or `pkg://MODULE:NAME` leads to; UserError if there is none."""
    path, _, name = place.rpartition(":")
    module = import_external(path.removeprefix("pkg://").removeprefix("file://"), key)
    if not hasattr(module, name):
        near = closest(name, [one for one in vars(module) if not one.startswith("_")])
        raise UserError(f"{key}: {path} has no {name}.{f' Did you mean {near}?' if near else ''}")
    return getattr(module, name)
