"""Sorts a row into what training needs: prompt, ground truth, data source, and everything else for the reward.

Accepts rows with only `prompt`, with `ground_truth` and `data_source`, with `response` and `reward`, and rows made for
verl (chat messages, `reward_model.ground_truth`, `extra_info`), in any mixture. Never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.rows import DataError, RowTable

Messages = list[dict[str, Any]]

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")
# Columns that rewards get under their own names; all others are in `extra_info`.
NAMED_COLUMNS = ("ground_truth", "data_source", "extra_info")
PROMPT_KEY = "data.prompt_key"
# How to convert ShareGPT's messages.
_SHAREGPT = "rename 'from' to 'role' (human to user, gpt to assistant) and 'value' to 'content'"


@dataclass
class PromptFields:
    """One row, sorted into its roles."""

    prompt: str | Messages
    data_source: str | None
    ground_truth: Any
    response: str | None
    extra_info: dict[str, Any] | None
    truth_is_response: bool = False


def check_prompt(table: RowTable, row: int, data: Any) -> None:
    """Raise DataError for a row that lacks what a prompt needs; `data` are the settings of that name."""
    fields_of(table, row, prompt_key=data.prompt_key, data_source=data.data_source)


def fields_of(table: RowTable, row: int, *, prompt_key: str, data_source: str | None) -> PromptFields:
    """Sort one row into its fields; `data_source` is for rows that do not name one."""
    # Files of mixed rows fill missing columns with null or NaN.
    values = {name: value for name, value in table.rows[row].items() if not is_missing(value)}
    reject_media(table, row)
    ground_truth, response = values.get("ground_truth"), values.get("response")
    reward_model = values.get("reward_model")
    if ground_truth is None and isinstance(reward_model, dict):
        ground_truth = reward_model.get("ground_truth")
    # SFT files have only `response`; RL then takes it as the ground truth, and says so.
    truth_is_response = ground_truth is None and response is not None
    own_source = values.get("data_source")
    return PromptFields(
        prompt=prompt_of(table, row, prompt_key),
        data_source=data_source if own_source is None else _source(table, row, own_source),
        ground_truth=response if truth_is_response else ground_truth,
        response=response,
        extra_info=_extra_info(values, prompt_key),
        truth_is_response=truth_is_response,
    )


def _source(table: RowTable, row: int, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        raise DataError(
            f"The data_source of {table.where(row)} is a {type(value).__name__}; it must be the name of a data set."
        )
    return str(value)


def is_missing(value: Any) -> bool:
    """Whether a value is null, or the NaN that stands for it in tables without null."""
    return value is None or (isinstance(value, float) and value != value)


def _extra_info(values: dict[str, Any], prompt_key: str) -> dict[str, Any] | None:
    # The row's own `extra_info` takes precedence over its other columns.
    taken = {prompt_key, *NAMED_COLUMNS}
    others = {name: value for name, value in values.items() if name not in taken}
    own = values.get("extra_info")
    if own is not None and not isinstance(own, dict):
        own = {"extra_info": own}
    return {**others, **(own or {})} or None


def prompt_of(
    table: RowTable, row: int, prompt_key: str, setting: str = PROMPT_KEY, conversations: str = PROMPT_KEY
) -> str | Messages:
    """Return the text or the messages in a column, checked. Errors name the settings for it and for conversations."""
    values = table.rows[row]
    prompt = values.get(prompt_key)
    if is_missing(prompt) or prompt in ("", []):
        what = "is missing" if prompt_key not in values else "is null" if is_missing(prompt) else "is empty"
        raise DataError(
            f"The prompt of {table.where(row)} {what}: column '{prompt_key}' ({setting}), which every row needs. "
            f"The row has: {', '.join(values) or 'no columns'}.{_prompt_elsewhere(values, prompt_key, setting)}"
            f"{_conversation_elsewhere(values, conversations)}"
        )
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and is_messages(prompt):
        return [_message(table, row, number, message) for number, message in enumerate(prompt, start=1)]
    raise DataError(
        f"The prompt of {table.where(row)} is a {type(prompt).__name__}; "
        "it must be a string or a list of messages such as {'role': 'user', 'content': '...'}."
    )


# Names of the prompt column in other data sets.
_CUSTOMARY = ("question", "query", "problem", "instruction", "input", "text", "content")


def _prompt_elsewhere(values: dict[str, Any], prompt_key: str, setting: str) -> str:
    if prompt_key in values:
        return ""
    found = next((name for name in _CUSTOMARY if isinstance(values.get(name), str)), None)
    return f" If '{found}' is the prompt: {setting}={found}." if found else ""


def _conversation_elsewhere(values: dict[str, Any], setting: str) -> str:
    for name, value in values.items():
        if isinstance(value, list) and value and is_messages(value):
            if _is_sharegpt(value[0]):
                return f" Column '{name}' holds conversations: {_SHAREGPT}, and set {setting}={name}."
            if "role" in value[0]:
                return f" Column '{name}' holds conversations: set {setting}={name} if they are meant."
    return ""


def _is_sharegpt(message: dict[str, Any]) -> bool:
    return {"from", "value"} <= message.keys()


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _message(table: RowTable, row: int, number: int, message: dict[str, Any]) -> dict[str, Any]:
    # Without the nulls that parquet fills in, with text parts joined and the arguments of tool calls parsed.
    message = {name: value for name, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        advice = f" These are ShareGPT's names: {_SHAREGPT}." if _is_sharegpt(message) else ""
        raise DataError(
            f"Message {number} of the prompt of {table.where(row)} has no 'role' (system, user, assistant).{advice}"
        )
    content = message.get("content")
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        for part in parts:
            if not isinstance(part, dict) or part.get("text") is None:
                kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
                raise DataError(_media_message(table, row, f"a part of type '{kind}'"))
        message["content"] = "".join(part["text"] for part in parts)
    if message.get("tool_calls") == []:  # parquet fills this in if other messages have calls
        del message["tool_calls"]
    if "tool_calls" in message:
        message["tool_calls"] = tool_calls_of(message["tool_calls"], f"message {number} of {table.where(row)}")
    elif content is None:
        raise DataError(f"Message {number} of the prompt of {table.where(row)} has no 'content'.")
    return message


def reject_media(table: RowTable, row: int) -> None:
    """Raise DataError for rows with images, video or sound."""
    for name in MEDIA_COLUMNS:
        value = table.rows[row].get(name)
        # Text rows of mixed files hold lists of nulls or empty values.
        if any(value) if isinstance(value, list) else any(value.values()) if isinstance(value, dict) else value:
            raise DataError(_media_message(table, row, f"column '{name}'"))


def _media_message(table: RowTable, row: int, what: str) -> str:
    where = table.where(row)
    return f"R{where[1:]} has {what}: posttrain trains text models; remove rows with images, video or sound."


_SHAPE = '{"function": {"name": "...", "arguments": {...}}}'


def tool_calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of one message, with arguments as mappings; errors name `where`."""
    if not isinstance(value, list):
        raise DataError(f"The tool_calls of {where} are a {type(value).__name__}; they must be a list of {_SHAPE}.")
    return [_call(one, f"tool call {number} of {where}") for number, one in enumerate(value, start=1)]


def parts_of(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments) of a call from `tool_calls_of`."""
    function = call.get("function", call)
    return function["name"], function["arguments"]


def first_missing(calls: list[dict[str, Any]], written: str) -> str | None:
    """Return the first name or text of these calls that a rendered turn lacks; None if it has all of them."""
    for name, arguments in map(parts_of, calls):
        for text in (name, *_texts(arguments)):
            escaped = (json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
            if not any(form in written for form in (text, *escaped)):
                return text
    return None


def _call(value: Any, where: str) -> dict[str, Any]:
    call = without_nulls(value) if isinstance(value, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"The {where} has no name; a call is {_SHAPE}.")
    given = function.get("arguments", {})
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except ValueError as error:
            raise DataError(f"The arguments of the {where} are not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise DataError(f"The arguments of the {where} are a {type(given).__name__}; they must be a mapping.")
    complete = {**function, "arguments": given}
    return {**call, "function": complete} if "function" in call else complete


def without_nulls(value: Any) -> Any:
    """Remove what parquet fills in for fields that only other rows have."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _texts(value: Any) -> Iterator[str]:
    # Names and strings only: numbers can be written in several ways.
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value
