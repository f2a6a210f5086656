"""Section `data`: which prompts are trained on, and how they become tokens."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.config.schema import Section, section
from posttrain.settings import COUNT_OR_ALL, ONE_OR_MORE, SEED, WEIGHTS, Idle, setting

HELD_OUT = "held_out"
"""The word for `data.val_files` that stands for some of the training rows."""
NO_VALIDATION = Idle("there is no validation file (data.val_files)", lambda c: c.data.val_files is None)
TOO_LONG_DROPPED = Idle(
    "data.filter_overlong_prompts drops prompts that are too long", lambda c: c.data.filter_overlong_prompts
)
# A sampler of the user's own may read the key too.
NO_CURRICULUM = Idle("data.sampler is not curriculum", lambda c: c.data.sampler == "default")


@section
class DataConfig(Section):
    """Prompts. Example: `data.train_files=data/train.parquet`."""

    train_files: Any = setting(None, is_path=True)
    """One path or a list of paths: parquet, json or jsonl; unset, the embedded arithmetic data serves."""
    val_files: Any = setting(None, is_path=True)
    """Validation files, as above; null means no validation. `held_out` takes a tenth of the training rows (256 at most,
    none of fewer than 20), which are then not trained on."""
    train_weights: list[float] | None = setting(None, range=WEIGHTS)
    """One weight per training file: how often its rows are drawn relative to the others; null draws every row once
    per epoch."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages."""
    data_source: str | None = None
    """Data source of rows that do not name one; it chooses the built-in scorer."""
    train_batch_size: int = setting(1024, range=ONE_OR_MORE)
    """Prompts per step, over all workers."""
    val_batch_size: int | None = setting(None, range=ONE_OR_MORE, idle=NO_VALIDATION)
    """Prompts per validation batch; null takes the whole file."""
    max_prompt_length: int = setting(512, range=ONE_OR_MORE)
    """Longest prompt in tokens."""
    max_response_length: int = setting(1024, range=ONE_OR_MORE)
    """Longest response in tokens."""
    filter_overlong_prompts: bool = True
    """Drop prompts that are too long, and say how many; false handles them by `truncation`."""
    truncation: str = setting("error", choices=("error", "left", "right", "middle"), idle=TOO_LONG_DROPPED)
    """What happens to a prompt that is too long and not dropped: `error`, or cut `left`, `right` or in the `middle`."""
    train_max_samples: int = setting(-1, range=COUNT_OR_ALL)
    """Use at most this many training rows; -1 takes all."""
    val_max_samples: int = setting(-1, range=COUNT_OR_ALL, idle=NO_VALIDATION)
    """Use at most this many validation rows; -1 takes all."""
    shuffle: bool = True
    """Draw the rows of an epoch in random order."""
    seed: int | None = setting(None, range=SEED, idle=".shuffle is False")
    """Seed of the order of rows; null takes `trainer.seed`."""
    sampler: str = "default"
    """Order of rows: `default`, `curriculum`, one registered by your own file, or a class of it (`FILE.py:CLASS`)."""
    curriculum_key: str = setting("difficulty", idle=NO_CURRICULUM)
    """Column that `sampler=curriculum` sorts by, easy (small) first."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    custom_cls: dict[str, Any] = field(default_factory=dict)
    """Your own data set class, which makes the rows: `{path: FILE.py, name: CLASS, config: {...}}` (docs/data.md)."""
    system_prompt: str | None = setting(None, is_literal=True)
    """Put before prompts that are plain strings, as a system message."""
