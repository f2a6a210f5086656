"""Responses that exist already: of `posttrain generate` (one row per prompt) or a run's samples (one per response)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.commands.generation.results import COLUMNS, OF_TURNS
from posttrain.config.data import DataConfig
from posttrain.data.fields import PromptFields, fields_of
from posttrain.data.rows import DataError, RowTable

SAMPLE_COLUMNS = ("uid", "sample", "score", "finish_reason", "response_ids")


@dataclass
class AnsweredPrompt:
    """A prompt's fields and the responses to it."""

    fields: PromptFields
    responses: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    # With tools: what the model wrote of each response; empty without.
    own_words: list[str] = field(default_factory=list)


def answered_prompts(table: RowTable, config: DataConfig, response_key: str | None = None) -> list[AnsweredPrompt]:
    """The prompts of a file with their responses, in the order of their first rows."""
    key = response_key or ("responses" if "responses" in table.rows[0] else "response")
    groups: dict[Any, AnsweredPrompt] = {}
    for number, row in enumerate(table.rows):
        found = row.get(key)
        texts: list[Any] = found if isinstance(found, list) else [found]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{table.where(number).capitalize()} has no responses in its column '{key}'; "
                f"it has: {', '.join(row) or 'no columns'}."
            )
        whole = isinstance(found, list)
        group = number if whole else row.get("uid") or str(row.get(config.prompt_key))
        if group not in groups:
            groups[group] = AnsweredPrompt(_fields(table, number, config, key))
        one = groups[group]
        one.responses += texts
        written: Any = row.get("own_words") if whole else [row.get("own_words")]
        if (
            isinstance(written, list)
            and len(written) == len(texts)
            and all(isinstance(words, str) for words in written)
        ):
            one.own_words += written
        one.finish_reasons += _listed(row, "finish_reasons", "finish_reason", len(texts))
        lengths = _listed(row, "response_tokens", "response_ids" if not whole else "", len(texts))
        one.tokens += [len(ids) if isinstance(ids, list) else ids for ids in lengths]
    for one in groups.values():
        if len(one.own_words) < len(one.responses):  # rows of several runs, some without tools
            one.own_words = []
    return list(groups.values())


def _fields(table: RowTable, number: int, config: DataConfig, response_key: str) -> PromptFields:
    """The prompt's fields as training sees them: what was generated is no part of them."""
    of_turns = OF_TURNS if "own_words" in table.rows[number] else ()
    generated = {response_key, *COLUMNS, *of_turns, *(SAMPLE_COLUMNS if response_key == "response" else ())}
    kept = {name: value for name, value in table.rows[number].items() if name not in generated}
    one = RowTable([kept], [0], [table.number_of[number]], [table.files[table.file_of[number]]])
    return fields_of(one, 0, prompt_key=config.prompt_key, data_source=config.data_source)


def _listed(row: dict[str, Any], name: str, single: str, count: int) -> list[Any]:
    value = row.get(name)
    if isinstance(value, list) and len(value) == count:
        return value
    value = row.get(single)
    if count != 1 or value is None or value == []:
        return [None] * count
    return [value]
