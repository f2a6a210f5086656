"""Responses of a model to rows that are in memory: what `posttrain reward try --model` scores."""

from __future__ import annotations

import argparse
from typing import Any

from posttrain.trainer.constants_ppo import apply_environment
from posttrain.trainer.generation.command import settings_folder
from posttrain.trainer.generation.settings import USED, USED_BY_REWARDS, read_settings


def sample_rows(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`options.k` responses of `options.model` to every row; each has its row's columns, `response` and `group`.

    Rows whose prompts are too long for the model have none.
    """
    apply_environment()
    from posttrain.data.rows import table_of_rows
    from posttrain.trainer.generation.session import Session

    options.n = options.k
    flags = argparse.Namespace(**{name: getattr(options, name) for name in ("n", "temperature", "max_tokens")})
    used = (*USED, *USED_BY_REWARDS)
    settings = read_settings(flags, options.settings, settings_folder(options.model), used=used)
    session = Session(options.model, table_of_rows(rows, name=options.data), settings)
    found: dict[int, list[str]] = {}
    session.run(None, lambda item, answers: found.update({answers.index: answers.responses}))
    return [{**rows[index], "response": text, "group": index} for index in sorted(found) for text in found[index]]
