"""Responses of a model to rows that are in memory: what `posttrain reward try --model` scores."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from posttrain.commands.generation.command import settings_folder
from posttrain.commands.generation.settings import USED, USED_BY_REWARDS, read_settings
from posttrain.trainer.constants_ppo import apply_environment

if TYPE_CHECKING:
    from posttrain.commands.generation.loop import Answers


def sample_rows(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`options.k` responses of `options.model` to every row; each has its row's columns, `response` and `group`.

    Rows whose prompts are too long for the model have none.
    """
    apply_environment()
    from posttrain.commands.generation.session import Session
    from posttrain.data.rows import table_of_rows

    options.n = options.k
    flags = argparse.Namespace(**{name: getattr(options, name) for name in ("n", "temperature", "max_tokens")})
    used = (*USED, *USED_BY_REWARDS)
    settings = read_settings(flags, options.settings, settings_folder(options.model), used=used)
    found: dict[int, Answers] = {}
    with Session(options.model, table_of_rows(rows, name=options.data), settings) as session:
        session.run(None, lambda item, answers: found.update({answers.index: answers}))
    return [
        {**rows[index], "response": text, "group": index, **_own(answers, number)}
        for index, answers in sorted(found.items())
        for number, text in enumerate(answers.responses)
    ]


def _own(answers: Answers, number: int) -> dict[str, str]:
    """With tools: what the model wrote itself, which built-in scorers read."""
    return {} if answers.own_words is None else {"own_words": answers.own_words[number]}
