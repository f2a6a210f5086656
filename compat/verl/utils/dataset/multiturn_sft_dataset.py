"""Conversations as verl's supervised training reads them: every message is rendered by itself.

A run of `posttrain sft` finds the trained tokens in the whole conversation instead (posttrain/data/spans.py), and does
not train what a template writes behind a turn's end token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from posttrain.data.rows import read_table
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)
_CUTS = ("error", "left", "right")


class MultiTurnSFTDataset(Dataset[dict[str, torch.Tensor]]):
    """A row has input_ids, position_ids and loss_mask (1 for what an assistant wrote), padded on the right with an
    attention_mask beside them, or as long as it is (`pad_mode=no_padding`)."""

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        if processor is not None:
            raise NotImplementedError("MultiTurnSFTDataset: conversations are text; leave `processor` out")
        given = config or {}
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.pad_mode = DatasetPadMode(given.get("pad_mode", "right"))
        assert self.pad_mode in (DatasetPadMode.RIGHT, DatasetPadMode.NO_PADDING), f"pad_mode={self.pad_mode}"
        self.truncation, self.max_length = given.get("truncation", "error"), given.get("max_length", 1024)
        assert self.truncation in _CUTS, f"truncation={self.truncation}: give one of {', '.join(_CUTS)}"
        self.apply_chat_template_kwargs = dict(given.get("apply_chat_template_kwargs") or {})
        self.ignore_input_ids_mismatch = given.get("ignore_input_ids_mismatch", False)
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        rows = [dict(row) for row in read_table(files, setting="parquet_files").rows]
        if 0 < max_samples < len(rows):
            rows = [rows[one] for one in _chosen(len(rows), max_samples, given)]
        self.messages = [row[given.get("messages_key", "messages")] for row in rows]
        self.tools = [row.get(given.get("tools_key", "tools")) for row in rows]
        thinking = given.get("enable_thinking_default", None)
        self.enable_thinking = [row.get(given.get("enable_thinking_key", "enable_thinking"), thinking) for row in rows]
        user = [{"role": "user", "content": ""}]
        once, twice = self._ids(user), self._ids(user * 2)
        self.system_prompt = once[: len(once) - (len(twice) - len(once))]
        self.generation_prompt = self._ids(user, add_generation_prompt=True)[len(once) :]

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        messages, tools = [dict(one) for one in self.messages[item]], self.tools[item]
        thinking = self.enable_thinking[item]
        options = {} if thinking is None else {"enable_thinking": bool(thinking)}
        ids, trained = list[int](), list[int]()
        for turn, message in enumerate(messages):
            written = self._ids([message], **options, **({"tools": tools} if tools and turn == 0 else {}))
            if turn and message["role"] != "system":  # a template begins every rendering with its system prompt
                written = written[len(self.system_prompt) :]
            asked = len(self.generation_prompt) if message["role"] == "assistant" else len(written)
            ids, trained = ids + written, trained + [0] * asked + [1] * (len(written) - asked)
        self._check(ids, self._ids(messages, **options, **({"tools": tools} if tools else {})))
        return self._fitted(ids, trained)

    def _ids(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        options = {**self.apply_chat_template_kwargs, **options}
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _check(self, joined: list[int], whole: list[int]) -> None:
        if joined == whole:
            return
        words = (
            "messages rendered one by one give other tokens than the whole conversation: "
            f"{self.tokenizer.decode(joined)!r}, not {self.tokenizer.decode(whole)!r}. Templates that drop earlier "
            "thoughts do so; set `ignore_input_ids_mismatch` to train on it"
        )
        if not self.ignore_input_ids_mismatch:
            raise AssertionError(words)
        logger.warning(words)

    def _fitted(self, ids: list[int], trained: list[int]) -> dict[str, torch.Tensor]:
        length, most = len(ids), self.max_length
        if length > most and self.truncation == "error":
            raise ValueError(f"sequence_length={length} is larger than max_length={most}")
        row = {"input_ids": ids, "position_ids": list(range(length)), "loss_mask": trained}
        if self.pad_mode == DatasetPadMode.NO_PADDING:
            return {name: torch.tensor(values[:most]) for name, values in row.items()}
        row["attention_mask"] = [1] * length
        kept = slice(-most, None) if self.truncation == "left" else slice(most)
        empty = {"input_ids": self.tokenizer.pad_token_id or 0}
        return {
            name: torch.tensor(values[kept] + [empty.get(name, 0)] * (most - length)) for name, values in row.items()
        }


def _chosen(total: int, count: int, given: Any) -> list[int]:
    """The first rows, or with `shuffle` those that `seed` draws."""
    if not given.get("shuffle", False):
        return list(range(count))
    import numpy as np

    return np.random.default_rng(given.get("seed")).choice(total, size=count, replace=False).tolist()
