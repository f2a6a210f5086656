"""PairDataset: a better and a worse answer to one prompt, as token ids for a reward model.

A row has `prompt`, `chosen` and `rejected`, the last two as texts or as answering messages; or only `chosen` and
`rejected`, each a whole dialogue: messages, or a text whose turns begin with "Human:" and "Assistant:".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from posttrain.config.supervised import PairDataConfig
from posttrain.data.chat import HINT, ChatRenderer, apply_template
from posttrain.data.fields import Messages, is_missing, prompt_of, reject_media
from posttrain.data.rows import DataError, ItemList, RowTable, read_table
from posttrain.data.spans import ASSISTANT
from posttrain.data.supervised import PROGRESS_FROM_ROWS, Limit

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
