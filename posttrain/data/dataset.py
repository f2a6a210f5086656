"""PromptDataset: rows from files or memory as tokenized prompts, with what the reward needs; and held-out rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from tqdm import tqdm

from posttrain.batch.saving import Unsavable, to_json
from posttrain.config.trainer import DataConfig
from posttrain.data.chat import ChatRenderer
from posttrain.data.fields import Messages, PromptFields, fields_of
from posttrain.data.rows import DataError, ItemList, RowTable, read_table
from posttrain.protocol import DataProto

SPLITS = ("train", "val")
TRUNCATIONS = ("error", "left", "right", "middle")
TOKENIZED_AT_ONCE = 1000
PROGRESS_FROM_ROWS = 5_000


class PromptItem(TypedDict):
    """One prompt of a data set."""

    prompt_ids: list[int]
    raw_prompt: Messages
    prompt: str
    data_source: str | None
    ground_truth: Any
    response: str | None
    extra_info: dict[str, Any] | None
    index: int


class PromptDataset(ItemList[PromptItem]):
    """Prompts ready for rollout. Example: `PromptDataset("train.parquet", tokenizer, config.data)[0]["prompt_ids"]`.

    `files_or_rows` is one path, a list of paths, rows in memory (dicts), or a table of rows. The chat template shows
    the schemas `tools` in every prompt. `notes` holds messages for the start of a run; `prompt_notes` those that do not
    concern ground truths and rewards. An item's `index` is its row's position before overlong prompts were dropped.
    """

    def __init__(
        self,
        files_or_rows: Any,
        tokenizer: Any,
        config: DataConfig,
        *,
        split: str = "train",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if config.truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation is '{config.truncation}'; it must be one of {', '.join(TRUNCATIONS)}.")
        if split not in SPLITS:
            raise ValueError(f"split is '{split}'; it must be one of {', '.join(SPLITS)}")
        self.config = config
        self.split = split
        self.notes: list[str] = []
        self.prompt_notes: list[str] = []
        self._name = f"data.{split}_files"
        shown = {"tools": list(tools)} if tools else {}
        self._chat = ChatRenderer(
            tokenizer,
            system_prompt=config.system_prompt,
            template_kwargs={**config.apply_chat_template_kwargs, **shown},
        )
        table = self._load(files_or_rows)
        self.notes += table.notes(split)
        self.files = table.files
        fields = [
            fields_of(table, row, prompt_key=config.prompt_key, data_source=config.data_source)
            for row in range(len(table))
        ]
        # Whether no row's prompt is a list of messages.
        self.prompts_are_texts = all(isinstance(one.prompt, str) for one in fields)
        items = self._tokenize(table, fields)
        self._items, kept = self._limit_lengths(table, items)
        for item in self._items:
            item["index"] = table.position(item["index"])
        # For each item, the index of its file in `files`.
        self.file_of = [table.file_of[row] for row in kept]
        # Counted after overlong prompts are gone: only rows that train matter to the reward check.
        self.rows_without_truth = sum(item["ground_truth"] is None for item in self._items)
        self._note_fields([fields[row] for row in kept])

    @property
    def data_sources(self) -> list[str | None]:
        """The distinct data sources, in order of occurrence."""
        return list(dict.fromkeys(item["data_source"] for item in self._items))

    @property
    def columns(self) -> set[str]:
        """The names of all columns that rewards get: those of the rows, and of their `extra_info`."""
        return {"ground_truth", "data_source", "extra_info"}.union(*(item["extra_info"] or () for item in self._items))

    def column(self, name: str) -> list[Any]:
        """Return one value per item from a column of the rows or of their `extra_info`; None if a row has none."""
        return [(item["extra_info"] or {}).get(name) for item in self._items]

    def check_savable(self, settings: str) -> None:
        """Raise DataError for a row that a checkpoint cannot hold; `settings` name why checkpoints hold rows.

        Values from files can always be saved. Rows given as dicts may hold anything.
        """
        for item in self._items:
            for name in ("extra_info", "ground_truth", "raw_prompt"):
                try:
                    to_json(item[name])
                except Unsavable as error:
                    raise DataError(
                        f"{name}{error.inside} of row {item['index'] + 1} of the {self.split} rows is {error.what}, "
                        f"which no checkpoint can hold, and with {settings} checkpoints hold rows. Give texts, "
                        "numbers, bytes, dates, lists and dicts, and let the reward build what it needs from them."
                    ) from None

    def _load(self, files_or_rows: Any) -> RowTable:
        limit = int(self.config[f"{self.split}_max_samples"])
        if limit == 0:
            raise DataError(f"data.{self.split}_max_samples is 0; give a positive number, or -1 for all rows.")
        return read_table(files_or_rows, limit=limit, setting=self._name)

    def _tokenize(self, table: RowTable, fields: list[PromptFields]) -> list[PromptItem]:
        items: list[PromptItem] = []
        hidden = True if len(fields) < PROGRESS_FROM_ROWS else None  # None: shown only on a terminal
        with tqdm(total=len(fields), desc=f"tokenizing {self.split} prompts", disable=hidden) as bar:
            # Batches let a fast tokenizer use its threads, and the progress bar move.
            for start in range(0, len(fields), TOKENIZED_AT_ONCE):
                rows = range(start, min(start + TOKENIZED_AT_ONCE, len(fields)))
                rendered = [self._chat.render(fields[row].prompt, table.where(row)) for row in rows]
                ids = self._chat.encode([text for _, text in rendered])
                items += [_item(row, fields[row], *rendered[row - start], ids[row - start]) for row in rows]
                bar.update(len(rows))
        return items

    def _limit_lengths(self, table: RowTable, items: list[PromptItem]) -> tuple[list[PromptItem], list[int]]:
        # Drops, cuts or rejects prompts that are too long; returns the items and their rows.
        limit = self.config.max_prompt_length
        overlong = [item["index"] for item in items if len(item["prompt_ids"]) > limit]
        if not overlong:
            return items, list(range(len(items)))
        longest = max(len(items[row]["prompt_ids"]) for row in overlong)
        count = f"{len(overlong)} of {len(items)} {self.split} prompts exceed data.max_prompt_length={limit} tokens"
        if self.config.filter_overlong_prompts:
            kept = [row for row, item in enumerate(items) if len(item["prompt_ids"]) <= limit]
            if not kept:
                raise DataError(f"{count} (the longest has {longest}), so none is left. Raise data.max_prompt_length.")
            self.notes.append(f"{count} and were dropped; the longest has {longest}.")
            return [items[row] for row in kept], kept
        if self.config.truncation == "error":
            first = table.where(overlong[0])
            raise DataError(
                f"{count}, the first is {first}; the longest has {longest}. Raise data.max_prompt_length, "
                "or set data.filter_overlong_prompts=true or data.truncation=left, right or middle."
            )
        for row in overlong:
            ids = items[row]["prompt_ids"]
            if self.config.truncation == "middle":
                ids = ids[: limit // 2] + ids[-(limit - limit // 2) :]
            items[row]["prompt_ids"] = ids[-limit:] if self.config.truncation == "left" else ids[:limit]
            # Rewards and logs read the text, which must be that of the cut tokens.
            items[row]["prompt"] = self._chat.decode(items[row]["prompt_ids"])
        side = "in the middle" if self.config.truncation == "middle" else f"on the {self.config.truncation}"
        self.notes.append(f"{count} and were cut {side}; the longest has {longest}.")
        return items, list(range(len(items)))

    def _note_fields(self, fields: list[PromptFields]) -> None:
        total, where = len(fields), f"{self.split} rows"
        self.notes += self._chat.notes
        if not self._chat.has_template:
            self.notes.append("The tokenizer has no chat template: prompts are used as they are.")
        elif self.config.system_prompt and not any(isinstance(item.prompt, str) for item in fields):
            self.notes.append(f"data.system_prompt has no effect on {where}: all their prompts are lists of messages.")
        self.prompt_notes = list(self.notes)
        if from_response := sum(item.truth_is_response for item in fields):
            self.notes.append(
                f"{from_response} of {total} {where} have no ground_truth: their `response` is the reference answer."
            )
        if self.rows_without_truth:
            self.notes.append(
                f"{self.rows_without_truth} of {total} {where} have neither ground_truth nor response: "
                "the reward gets None as reference answer."
            )
        if any("reward" in (item.extra_info or {}) for item in fields):
            self.notes.append(
                f"The `reward` column of the {where} is given to rewards as extra_info['reward']; "
                "it does not replace the score of a new response."
            )


def _item(row: int, fields: PromptFields, messages: Messages, text: str, ids: list[int]) -> PromptItem:
    return PromptItem(
        prompt_ids=ids,
        raw_prompt=messages,
        prompt=text,
        data_source=fields.data_source,
        ground_truth=fields.ground_truth,
        response=fields.response,
        extra_info=fields.extra_info,
        index=row,
    )


# One row in SHARE is held out, at most MOST, and none if the table has fewer than FEWEST rows.
SHARE, MOST, FEWEST = 10, 256, 20


def hold_out(table: RowTable, prompt_key: str, *, most: int = -1, batch: int = 0) -> tuple[RowTable, RowTable | None]:
    """Return (rows to train on, rows to validate on or None); the choice depends only on the prompts.

    Rows are chosen by a hash of their prompt: neither their order nor a seed changes the choice, and rows with the same
    prompt stay together. `most` limits the held-out rows (-1: no further limit); at least `batch` rows remain.
    """
    # A batch must remain for training, or the run could not make a single step.
    wanted = min(len(table) // SHARE, MOST, len(table) - batch) if len(table) >= FEWEST else 0
    wanted = wanted if most < 0 else min(wanted, most)
    prompts: dict[bytes, list[int]] = {}
    for row, values in enumerate(table.rows):
        prompts.setdefault(_key(values.get(prompt_key)), []).append(row)
    chosen: set[int] = set()
    # All rows of a prompt or none: a prompt seen in training would be no validation.
    for key in sorted(prompts):
        if len(chosen) + len(prompts[key]) <= wanted:
            chosen.update(prompts[key])
    if not chosen:
        return table, None
    return table.take(row for row in range(len(table)) if row not in chosen), table.take(sorted(chosen))


def describe_held_out(train: int, val: int) -> str:
    """Return the message at the start of a run."""
    if not val:
        return (
            f"No validation file is set (data.val_files), and {train} training rows are too few to hold some out: the "
            "run makes no validation."
        )
    return (
        f"No validation file is set (data.val_files): {val} of the {train + val} training rows are held out for "
        "validation and not trained on; the same ones every time. data.val_files=null trains on all of them."
    )


def _key(prompt: Any) -> bytes:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).digest()


CARRIED = ("raw_prompt", "prompt", "data_source", "ground_truth", "extra_info", "index")


def collate(items: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0) -> DataProto:
    """Return a batch of prompts, padded on the left to the longest one.

    Tensors: `prompts`, `attention_mask`, `position_ids`. Others: `raw_prompt_ids` and the item's fields. A row's
    `response` is not among them, since that name is for the generated text; rewards find it in `extra_info`.
    """
    if not items:
        raise ValueError("collate of no items")
    # Padded on the left, so that every response begins in the same column.
    width = max(len(item["prompt_ids"]) for item in items)
    prompts = torch.full((len(items), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, item in enumerate(items):
        start = width - len(item["prompt_ids"])
        prompts[row, start:] = torch.tensor(item["prompt_ids"], dtype=torch.long)
        attention_mask[row, start:] = 1
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    tensors = {"prompts": prompts, "attention_mask": attention_mask, "position_ids": position_ids}
    others = {name: [item[name] for item in items] for name in CARRIED}
    others["raw_prompt_ids"] = [list(item["prompt_ids"]) for item in items]
    return DataProto.from_dict(tensors, others, {"pad_token_id": pad_token_id})
