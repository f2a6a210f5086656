"""From a row to what training needs: prompt, truth, data source, and everything else for the reward.

Takes rows with `prompt` alone, with `ground_truth` and `data_source`, with `response` and `reward`, and rows made for
verl (chat messages, `reward_model.ground_truth`, `extra_info`), mixed as they come. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.data.rows import DataError, RowTable
from posttrain.data.tool_calls import tool_calls_of

Messages = list[dict[str, Any]]

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")
NAMED_COLUMNS = ("ground_truth", "data_source", "extra_info")
"""Columns that reach a reward under their own names; all others travel in `extra_info`."""
PROMPT_KEY = "data.prompt_key"
_SHAREGPT = "rename 'from' to 'role' (human to user, gpt to assistant) and 'value' to 'content'"
"""What makes messages of ShareGPT's."""


@dataclass
class PromptFields:
    """One row, sorted into its roles."""

    prompt: str | Messages
    data_source: str | None
    ground_truth: Any
    response: str | None
    extra_info: dict[str, Any] | None
    truth_is_response: bool = False


def look_at_prompt(table: RowTable, row: int, data: Any) -> None:
    """Raises DataError for a row that lacks what a prompt needs; `data` are the settings of that name."""
    fields_of(table, row, prompt_key=data.prompt_key, data_source=data.data_source)


def fields_of(table: RowTable, row: int, *, prompt_key: str, data_source: str | None) -> PromptFields:
    """The roles of one row; `data_source` serves rows that do not name one."""
    values = {name: value for name, value in table.rows[row].items() if not is_missing(value)}
    refuse_media(table, row)
    ground_truth, response = values.get("ground_truth"), values.get("response")
    reward_model = values.get("reward_model")
    if ground_truth is None and isinstance(reward_model, dict):
        ground_truth = reward_model.get("ground_truth")
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
    """Null, or the NaN that stands for it in tables that know no null."""
    return value is None or (isinstance(value, float) and value != value)


def _extra_info(values: dict[str, Any], prompt_key: str) -> dict[str, Any] | None:
    """The row's `extra_info` laid over its other columns; None when there is nothing in either."""
    taken = {prompt_key, *NAMED_COLUMNS}
    others = {name: value for name, value in values.items() if name not in taken}
    own = values.get("extra_info")
    if own is not None and not isinstance(own, dict):
        own = {"extra_info": own}
    return {**others, **(own or {})} or None


def prompt_of(
    table: RowTable, row: int, prompt_key: str, setting: str = PROMPT_KEY, conversations: str = PROMPT_KEY
) -> str | Messages:
    """The text or the messages in the column `prompt_key`, checked; for errors the settings that name this column, and
    one of whole conversations."""
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


_CUSTOMARY = ("question", "query", "problem", "instruction", "input", "text", "content")
"""Columns that hold the prompt in data sets made elsewhere."""


def _prompt_elsewhere(values: dict[str, Any], prompt_key: str, setting: str) -> str:
    """What to do where a column of a customary name holds texts and the named one is not there; else empty."""
    if prompt_key in values:
        return ""
    found = next((name for name in _CUSTOMARY if isinstance(values.get(name), str)), None)
    return f" If '{found}' is the prompt: {setting}={found}." if found else ""


def _conversation_elsewhere(values: dict[str, Any], setting: str) -> str:
    """What to do where another column holds a conversation; empty where none does."""
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
    """The message without the nulls that parquet fills in, its text parts joined, the arguments of its calls read."""
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
    if message.get("tool_calls") == []:  # parquet again: other messages have some
        del message["tool_calls"]
    if "tool_calls" in message:
        message["tool_calls"] = tool_calls_of(message["tool_calls"], f"message {number} of {table.where(row)}")
    elif content is None:
        raise DataError(f"Message {number} of the prompt of {table.where(row)} has no 'content'.")
    return message


def refuse_media(table: RowTable, row: int) -> None:
    """Rows with images, video or sound are errors."""
    for name in MEDIA_COLUMNS:
        value = table.rows[row].get(name)
        # Lists of nulls or empty values are what mixed files leave in text rows.
        if any(value) if isinstance(value, list) else any(value.values()) if isinstance(value, dict) else value:
            raise DataError(_media_message(table, row, f"column '{name}'"))


def _media_message(table: RowTable, row: int, what: str) -> str:
    where = table.where(row)
    return f"R{where[1:]} has {what}: posttrain trains text models; remove rows with images, video or sound."
