"""Data for supervised trainers: SFTDataset and PairDataset, rows as token ids.

SFTDataset has prompts with responses, or conversations, with the assistant's tokens marked. PairDataset has a better
and a worse answer to one prompt, for a reward model: a row has `prompt`, `chosen` and `rejected`, the last two as texts
or as answering messages; or only `chosen` and `rejected`, each a whole dialogue: messages, or a text whose turns begin
with "Human:" and "Assistant:".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from posttrain.config.supervised import PairDataConfig, SFTDataConfig
from posttrain.data.chat import ASSISTANT, HINT, ChatRenderer, SpanFinder, TrainedRow, apply_template
from posttrain.data.fields import Messages, is_messages, is_missing, prompt_of, reject_media, without_nulls
from posttrain.data.rows import DataError, ItemList, RowTable, read_table


class Limit:
    """Cuts or drops rows with more than `length` tokens. `emptied` counts rows with nothing left to learn."""

    def __init__(self, length: int, truncation: str, name: str) -> None:
        self.length, self.truncation, self.name = length, truncation, name
        self.seen = self.overlong = self.longest = self.emptied = 0

    def apply(self, parallel: Sequence[list[Any]], where: str) -> Sequence[list[Any]]:
        """Return the lists (ids first, all of one length) cut to the limit; empty if the row is dropped."""
        self.seen += 1
        size = len(parallel[0])
        self.longest = max(self.longest, size)
        if size <= self.length:
            return parallel
        self.overlong += 1
        if self.truncation == "error":
            raise DataError(
                f"R{where[1:]} has {size} tokens, more than data.max_length={self.length}. Raise data.max_length, or "
                "set data.truncation=drop, left or right (the side that is cut); the run then says how many there were."
            )
        if self.truncation == "drop":
            return [[] for _ in parallel]
        # The lists are cut alike, so that ids and their marks stay aligned.
        kept = [part[-self.length :] if self.truncation == "left" else part[: self.length] for part in parallel]
        self.emptied += len(kept) > 1 and not any(kept[1][1:])
        return kept

    def notes(self) -> list[str]:
        if not self.overlong:
            return []
        did = "dropped" if self.truncation == "drop" else f"cut on the {self.truncation}"
        return [
            f"{self.overlong} of {self.seen} {self.name} exceed data.max_length={self.length} tokens and were {did}; "
            f"the longest has {self.longest}."
        ]


PROGRESS_FROM_ROWS = 5_000
MESSAGES_KEY = "data.multiturn.messages_key"


class SFTDataset(ItemList[TrainedRow]):
    """Rows ready for training. Example: `SFTDataset("train.parquet", tokenizer, config.data)[0].ids`.

    `files_or_rows` is one path, a list of paths, or rows in memory. `notes` holds messages for the start of a run.
    """

    def __init__(self, files_or_rows: Any, tokenizer: Any, config: SFTDataConfig, *, split: str = "train") -> None:
        self.config, self.split, self.tokenizer = config, split, tokenizer
        self.notes: list[str] = []
        self._chat = ChatRenderer(
            tokenizer, system_prompt=config.system_prompt, template_kwargs=config.apply_chat_template_kwargs
        )
        self._spans = SpanFinder(tokenizer, config.apply_chat_template_kwargs) if self._chat.has_template else None
        table = read_table(files_or_rows, limit=int(config[f"{split}_max_samples"]), setting=f"data.{split}_files")
        self.notes += table.notes(split)
        self.multiturn = _is_multiturn(table, config)
        limit = Limit(config.max_length, config.truncation, f"{split} rows")
        self._items: list[TrainedRow] = []
        hidden = True if len(table) < PROGRESS_FROM_ROWS else None  # None: shown only on a terminal
        for row in tqdm(range(len(table)), desc=f"tokenizing {split} rows", disable=hidden):
            for made in self._tokenize(table, row):
                ids, trained = limit.apply((made.ids, made.trained), table.where(row))
                if any(trained[1:]):  # the first token cannot be predicted from anything
                    self._items.append(TrainedRow(ids, trained))
        self._note(limit, len(table))

    @property
    def longest(self) -> int:
        return max(len(row.ids) for row in self._items)

    @property
    def tokens(self) -> tuple[int, int]:
        """(trained tokens, all tokens) of one epoch."""
        return sum(sum(row.trained) for row in self._items), sum(len(row.ids) for row in self._items)

    # -- rows -----------------------------------------------------------------------------------------------------
    def _tokenize(self, table: RowTable, row: int) -> list[TrainedRow]:
        reject_media(table, row)
        where = table.where(row)
        if self.multiturn:
            messages = _messages(table, row, self.config)
            return self._conversation(messages, where, _tools(table, row, self.config.multiturn.tools_key))
        prompt, response = _prompt(table, row, self.config), _response(table, row, self.config)
        if self._spans is None:
            return [self._plain(prompt, response, where)]
        return self._conversation([*self._chat.messages(prompt), {"role": ASSISTANT, "content": response}], where)

    def _conversation(self, messages: Messages, where: str, tools: Any = None) -> list[TrainedRow]:
        if self._spans is None:
            raise DataError(f"{where.capitalize()} holds chat messages, but the tokenizer has no chat template; {HINT}")
        return self._spans.rows(messages, where, tools)

    def _plain(self, prompt: str | Messages, response: str, where: str) -> TrainedRow:
        # Without a template: the prompt as it is, then the response and the end-of-text token.
        if not isinstance(prompt, str):
            raise DataError(f"The prompt of {where} is chat messages, but the tokenizer has no chat template; {HINT}")
        if self.tokenizer.eos_token_id is None:
            raise DataError("The tokenizer has neither a chat template nor an end token to teach a model to stop.")
        before = self._chat.encode([prompt])[0]
        if before and before[-1] == self.tokenizer.eos_token_id:  # some tokenizers end every text; here it continues
            before = before[:-1]
        after = self.tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [*before, *after, self.tokenizer.eos_token_id]
        return TrainedRow(ids, [False] * len(before) + [True] * (len(ids) - len(before)))

    # -- messages -------------------------------------------------------------------------------------------------
    def _note(self, limit: Limit, count: int) -> None:
        name, spans = f"{self.split} rows", self._spans
        self.notes += [*self._chat.notes, *limit.notes()]
        if not self._items:
            raise DataError(
                f"None of the {count} {name} has a token to learn within data.max_length={limit.length}; raise it, or "
                "set data.truncation=left."
            )
        if limit.emptied:
            self.notes.append(f"{limit.emptied} {name} were cut down to nothing that is trained, and left out.")
        if spans is None:
            self.notes.append("The tokenizer has no chat template: a row is prompt, response and end token.")
            return
        if spans.split:
            self.notes.append(
                f"The chat template rewrites earlier turns: {spans.split} of {count} {name} became one row per "
                "assistant turn, each in the context that the model will see."
            )
        if spans.reworded:
            self.notes.append(
                f"The chat template changes the white space of {spans.reworded} assistant turns of the {name}; what it "
                "writes is trained."
            )
        if spans.unclosed:
            self.notes.append(
                f"{spans.unclosed} assistant turns of the {name} end without a special token: they do not teach the "
                "model to stop."
            )


def check_row(table: RowTable, row: int, config: SFTDataConfig) -> None:
    """Raise DataError for a row that lacks what is trained."""
    reject_media(table, row)
    if _is_multiturn(table, config):
        _messages(table, row, config)
    else:
        _prompt(table, row, config)
        _response(table, row, config)


def _messages(table: RowTable, row: int, config: SFTDataConfig) -> Messages:
    messages = prompt_of(table, row, config.multiturn.messages_key, MESSAGES_KEY, MESSAGES_KEY)
    if isinstance(messages, str):
        raise DataError(f"The conversation of {table.where(row)} is a string; it must be a list of messages.")
    return messages


def _prompt(table: RowTable, row: int, config: SFTDataConfig) -> str | Messages:
    if config.prompt_dict_keys:
        return _text_at(table, row, "prompt", config.prompt_key, config.prompt_dict_keys)
    return prompt_of(table, row, config.prompt_key, conversations=f"data.multiturn.enable=true {MESSAGES_KEY}")


def _response(table: RowTable, row: int, config: SFTDataConfig) -> str:
    return _text_at(table, row, "response", config.response_key, config.response_dict_keys)


def _is_multiturn(table: RowTable, config: SFTDataConfig) -> bool:
    if config.multiturn.enable is not None:
        return config.multiturn.enable
    first = table.rows[0]
    return config.multiturn.messages_key in first and config.response_key not in first


def _tools(table: RowTable, row: int, key: str) -> Any:
    value = table.rows[row].get(key)
    if is_missing(value) or value == []:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"Column '{key}' of {table.where(row)} is not valid JSON: {error}") from error
    if not is_messages(value):
        raise DataError(f"Column '{key}' of {table.where(row)} must be a list of tools (mappings).")
    return without_nulls(value)


def _text_at(table: RowTable, row: int, what: str, key: str, inner: list[str] | None) -> str:
    values, where = table.rows[row], table.where(row)
    value: Any = values.get(key)
    path = f"column '{key}' (data.{what}_key)"
    if key not in values:
        raise DataError(f"The {what} of {where} is missing: {path}. The row has: {', '.join(values) or 'no columns'}.")
    for name in inner or []:
        if not isinstance(value, dict) or name not in value:
            inside = f"; it has: {', '.join(value)}" if isinstance(value, dict) else ""
            raise DataError(f"The {what} of {where}: {path} has no '{name}' (data.{what}_dict_keys){inside}.")
        value, path = value[name], f"{path}, '{name}'"
    if is_missing(value) or value == "":
        raise DataError(f"The {what} of {where} is empty: {path}.")
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise DataError(
            f"The {what} of {where} is a {type(value).__name__}, not a text: {path}. "
            f"data.{what}_dict_keys names keys inside a mapping; data.multiturn.enable=true reads conversations."
        )
    return str(value)


_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": ASSISTANT}


@dataclass
class Pair:
    """Token ids of the two answers with their context, and the margin by which the better should lead."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


class PairDataset(ItemList[Pair]):
    """Pairs ready for training. Example: `PairDataset("pairs.parquet", tokenizer, config.data)[0].chosen`.

    `files_or_rows` is one path, a list of paths, or rows in memory. `notes` holds messages for the start of a run.
    """

    def __init__(self, files_or_rows: Any, tokenizer: Any, config: PairDataConfig, *, split: str = "train") -> None:
        self.config, self.split = config, split
        self.notes: list[str] = []
        self._chat = ChatRenderer(
            tokenizer, system_prompt=config.system_prompt, template_kwargs=config.apply_chat_template_kwargs
        )
        table = read_table(files_or_rows, limit=int(config[f"{split}_max_samples"]), setting=f"data.{split}_files")
        self.notes += table.notes(split)
        limit = Limit(config.max_length, config.truncation, f"answers of the {split} pairs")
        self._items: list[Pair] = []
        self._equal = self._dropped = 0
        hidden = True if len(table) < PROGRESS_FROM_ROWS else None  # None: shown only on a terminal
        for row in tqdm(range(len(table)), desc=f"tokenizing {split} pairs", disable=hidden):
            self._add(table, row, limit)
        self._note(limit, len(table))

    @property
    def longest(self) -> int:
        """Tokens of the longest answer with its prompt."""
        return max(max(len(pair.chosen), len(pair.rejected)) for pair in self._items)

    def _add(self, table: RowTable, row: int, limit: Limit) -> None:
        reject_media(table, row)
        where = table.where(row)
        prompt = None
        if not is_missing(table.rows[row].get(self.config.prompt_key)):
            prompt = prompt_of(table, row, self.config.prompt_key)
        texts = [self._text(table, row, prompt, name) for name in ("chosen", "rejected")]
        # Equal answers say nothing about which is better.
        if texts[0] == texts[1]:
            self._equal += 1
            return
        chosen, rejected = (limit.apply([ids], where)[0] for ids in self._chat.encode(texts))
        # Cutting may remove all that distinguishes the two.
        if not chosen or not rejected or chosen == rejected:
            self._dropped += 1
            return
        self._items.append(Pair(chosen, rejected, self._margin(table, row)))

    def _text(self, table: RowTable, row: int, prompt: str | Messages | None, name: str) -> str:
        key, where = self.config[f"{name}_key"], table.where(row)
        answer = _answer(table, row, name, key)
        if not self._chat.has_template:
            return self._plain(prompt, answer, where)
        messages = self._dialogue(prompt, answer, f"'{key}' of {where}")
        options = {**self._chat.template_kwargs, "add_generation_prompt": False}
        return apply_template(self._chat.tokenizer, messages, f"'{key}' of {where}", **options)

    def _plain(self, prompt: str | Messages | None, answer: str | Messages, where: str) -> str:
        if not isinstance(answer, str) or not (prompt is None or isinstance(prompt, str)):
            raise DataError(f"{where.capitalize()} holds chat messages, but the tokenizer has no chat template; {HINT}")
        return (prompt or "") + answer

    def _dialogue(self, prompt: str | Messages | None, answer: str | Messages, what: str) -> Messages:
        if prompt is None:
            messages = parse_dialogue(answer, what) if isinstance(answer, str) else answer
        else:
            before = self._chat.messages(prompt)
            said = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
            # Some data sets repeat the prompt in each answer.
            messages = said if said[: len(before)] == before else [*before, *said]
        if messages[-1]["role"] != ASSISTANT:
            raise DataError(
                f"The dialogue in {what} ends with a turn of '{messages[-1]['role']}'; it must end with an "
                "answer of 'assistant', which is what the pair compares."
            )
        return messages

    def _margin(self, table: RowTable, row: int) -> float:
        key = self.config.margin_key
        # Without margins the loss is the plain Bradley-Terry loss.
        if key is None:
            return 0.0
        value = table.rows[row].get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise DataError(f"'{key}' (data.margin_key) of {table.where(row)} is {value!r}; it must be a number.")
        return float(value)

    def _note(self, limit: Limit, count: int) -> None:
        name = f"{self.split} pairs"
        self.notes += [*self._chat.notes, *limit.notes()]
        if not self._items:
            raise DataError(f"None of the {count} {name} can be learnt from: all their answers are equal or too long.")
        if self._equal:
            self.notes.append(f"{self._equal} of {count} {name} have two equal answers and were left out.")
        if self._dropped:
            self.notes.append(f"{self._dropped} of {count} {name} were left out, as an answer was too long.")
        if not self._chat.has_template:
            self.notes.append("The tokenizer has no chat template: an answer follows its prompt as it is.")


def check_pair(table: RowTable, row: int, config: PairDataConfig) -> None:
    """Raise DataError for a row that lacks one of its answers."""
    reject_media(table, row)
    for name in ("chosen", "rejected"):
        _answer(table, row, name, config[f"{name}_key"])


def _answer(table: RowTable, row: int, name: str, key: str) -> str | Messages:
    if is_missing(table.rows[row].get(key)) or table.rows[row][key] in ("", []):
        columns = ", ".join(table.rows[row]) or "no columns"
        raise DataError(f"{table.where(row).capitalize()} has no '{key}' (data.{name}_key). The row has: {columns}.")
    return prompt_of(table, row, key)


def parse_dialogue(text: str, what: str) -> Messages:
    """Parse a text whose turns begin with "Human:" and "Assistant:" into messages."""
    marks = list(_TURN.finditer(text))
    if not marks or text[: marks[0].start()].strip():
        raise DataError(
            f"There is no prompt (data.prompt_key), and the text in {what} is no dialogue whose turns begin with "
            f'"Human:" and "Assistant:": {text[:60]!r}.'
        )
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = [(mark, text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    return [{"role": _ROLES[mark[1]], "content": content} for mark, content in turns]
