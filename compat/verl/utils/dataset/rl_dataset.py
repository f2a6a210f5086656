"""Rows of prompt files as verl's loops read them: a dict per row, with its messages as `raw_prompt`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from posttrain.algorithms.common import read_setting as setting
from posttrain.batch.fields import object_array
from posttrain.data.rows import read_table


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as a batch: tensors are stacked, everything else becomes an array of objects."""
    columns: dict[str, list[Any]] = {}
    for row in data_list:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {
        name: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for name, values in columns.items()
    }


class RLHFDataset(Dataset):
    """Prompts of parquet, JSON or CSV files, read as posttrain reads them. A row is a dict of its columns with

    raw_prompt       the messages
    index, extra_info, tools_kwargs, interaction_kwargs    of the row, or empty
    dummy_tensor     so that a batch of rows has a tensor

    Prompts that are longer than `max_prompt_length` tokens are left out if `filter_overlong_prompts`. A subclass that
    `data.custom_cls` names makes a run's rows: it may override `_read_files_and_tokenize`, `_build_messages`,
    `__getitem__` and `maybe_filter_out_long_prompts`; `self.dataframe` is a list of dicts.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.data_files = [data_files] if isinstance(data_files, str) else [str(file) for file in data_files]
        self.original_data_files = list(self.data_files)
        self.prompt_key = setting(config, "prompt_key", "prompt")
        self.max_prompt_length = setting(config, "max_prompt_length", 1024)
        self.truncation = setting(config, "truncation", "error")
        self.filter_overlong_prompts = setting(config, "filter_overlong_prompts", False)
        self.apply_chat_template_kwargs = dict(setting(config, "apply_chat_template_kwargs", {}) or {})
        self.shuffle, self.seed = setting(config, "shuffle", False), setting(config, "seed", None)
        self.dataframe: Any = []
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Files are read where they are."""
        self.data_files = list(self.original_data_files)

    def _read_files_and_tokenize(self) -> None:
        """Sets `dataframe`."""
        rows = list(read_table(self.data_files, limit=-1, setting="data_files").rows)
        if 0 < self.max_samples < len(rows):
            rows = self._some(rows, self.max_samples)
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def _some(self, rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
        if not self.shuffle:
            return rows[:count]
        generator = torch.Generator().manual_seed(int(self.seed or 0))
        return [rows[row] for row in torch.randperm(len(rows), generator=generator)[:count].tolist()]

    def maybe_filter_out_long_prompts(self, dataframe: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.filter_overlong_prompts:
            return dataframe
        kept = [row for row in dataframe if self._length(row) <= self.max_prompt_length]
        print(f"filter dataset len: {len(kept)}")
        return kept

    def _length(self, row: dict[str, Any]) -> int:
        messages = self._build_messages(row, self.prompt_key)
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self.apply_chat_template_kwargs
            )
        else:
            text = "\n".join(message["content"] for message in messages)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _build_messages(self, example: dict[str, Any], key: str) -> list[dict[str, Any]]:
        prompt = example[key]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        extra = dict(row.get("extra_info") or {})
        return row | {
            "raw_prompt": self._build_messages(row, self.prompt_key),
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
            "extra_info": extra,
            "index": extra.get("index", 0),
            "tools_kwargs": extra.get("tools_kwargs", {}),
            "interaction_kwargs": extra.get("interaction_kwargs", {}),
        }


def get_dataset_class(data_config: Any) -> Any:
    """`RLHFDataset`, or the class that `data.custom_cls` names by file and name."""
    custom = setting(data_config, "custom_cls", None)
    if setting(custom, "path", None) is None:
        return RLHFDataset
    from verl.utils.import_utils import load_extern_object

    found = load_extern_object(custom["path"], custom["name"])  # pyright: ignore
    if not issubclass(found, Dataset):
        raise TypeError(f"{custom['name']} of {custom['path']} is not a torch Dataset")  # pyright: ignore
    return found
