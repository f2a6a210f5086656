"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): grade-school word problems as parquet files for training.

A row is {"prompt": question and how to end the answer, "ground_truth": "1234", "response": the whole solution,
"data_source": "gsm8k", "extra_info": {"index": 0, "split": "train"}}. The source is a folder with a copy of the data
set, or the hub's `openai/gsm8k`. Command: `posttrain data gsm8k [--from FOLDER] [--out FOLDER]`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posttrain.data.recipes.arithmetic import write_files
from posttrain.data.rows import DataError, RowTable, load_rows, table_of_rows

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"
DATA_SOURCE = "gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = "Think step by step and end with a line `#### N`, where N is the answer as a number."

# A folder's own layout first, then that of a downloaded copy of the hub's repository. Texts come before parquet, so
# that a folder that also holds our own output is still read from its source.
LAYOUTS = (
    "{split}.jsonl",
    "{split}.jsonl.gz",
    "{split}.json",
    "{split}.json.gz",
    "{split}.parquet",
    "{split}-00000-of-00001.parquet",
    "main/{split}-00000-of-00001.parquet",
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def default_folder() -> Path:
    """Where the example scripts look: `$HOME/data/gsm8k`."""
    return Path.home() / "data" / "gsm8k"


def prepare(source: str | os.PathLike[str] | None = None, out: str | os.PathLike[str] | None = None) -> dict[Path, int]:
    """Write `train.parquet` and `test.parquet` into `out`; gives path -> number of rows. Without `source`: the hub."""
    folder = Path(out).expanduser() if out is not None else default_folder()
    tables = _from_folder(Path(source).expanduser(), folder) if source is not None else _from_hub()
    rows = {split: gsm8k_rows(table, split) for split, table in tables.items()}  # both, before anything is written
    try:
        paths = write_files(folder, rows, suffix="parquet")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}. Name another folder with --out.") from error
    return {path: len(rows[split]) for split, path in paths.items()}


def gsm8k_rows(table: RowTable, split: str) -> list[dict[str, Any]]:
    """Training rows from rows with `question` and `answer`."""
    return [_row(table, number, split) for number in range(len(table))]


def _row(table: RowTable, number: int, split: str) -> dict[str, Any]:
    row = table.rows[number]
    for column in ("question", "answer"):
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise DataError(
                f"The {column} of {table.where(number)} is missing: GSM8K's columns are question and answer, "
                f"this row has {', '.join(row) or 'none'}."
            )
    return {
        "prompt": f"{row['question'].strip()}\n{INSTRUCTION}",
        "ground_truth": _final_number(row["answer"], table.where(number)),
        "response": row["answer"],
        "data_source": DATA_SOURCE,
        "extra_info": {"index": number, "split": split},
    }


def _final_number(answer: str, where: str) -> str:
    """The number after the last `####`, thousands separators removed."""
    _, mark, end = answer.rpartition("####")
    number = end.strip().replace(",", "")
    if not mark or not _NUMBER.fullmatch(number):
        raise DataError(f"The answer of {where} does not end in `#### N` with a number N: {answer[-40:]!r}.")
    return number


def _from_folder(source: Path, out: Path) -> dict[str, RowTable]:
    found = {split: _find(source, split) for split in SPLITS}
    for split, path in found.items():
        if path.resolve() == (out / f"{split}.parquet").resolve():
            raise DataError(f"{path} is read and would be replaced by the result. Name another folder with --out.")
    tables = {split: load_rows(path, setting="--from") for split, path in found.items()}
    for table in tables.values():
        if "question" not in table.rows[0] and "prompt" in table.rows[0]:
            raise DataError(f"--from: {table.files[0]} holds prepared rows already; use it as data.train_files.")
    return tables


def _find(source: Path, split: str) -> Path:
    if not source.is_dir():
        raise DataError(f"--from: there is no folder {source}.")
    names = [layout.format(split=split) for layout in LAYOUTS]
    path = next((source / name for name in names if (source / name).is_file()), None)
    if path is None:
        raise DataError(f"--from: {source} holds no {split} split; one of these is needed: {', '.join(names)}.")
    return path


def _from_hub() -> dict[str, RowTable]:
    """Both splits from the hub, by `datasets` where that is installed."""
    try:
        return {split: table_of_rows(_hub_rows(split), name=f"{HUB_ID} {split}") for split in SPLITS}
    except DataError:
        raise
    except Exception as error:  # each package and each layer below it has its own errors for "no network"
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        raise DataError(
            f"The data set {HUB_ID} could not be fetched from the hub ({reason}). Without a network, give a folder "
            "with a copy of it: posttrain data gsm8k --from FOLDER, where FOLDER holds train and test as .jsonl, .json "
            "or .parquet with the columns question and answer."
        ) from error


def _hub_rows(split: str) -> Iterable[Any]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        from huggingface_hub import hf_hub_download

        name = f"{HUB_CONFIG}/{split}-00000-of-00001.parquet"
        return load_rows(hf_hub_download(HUB_ID, name, repo_type="dataset"), setting=HUB_ID).rows
    return load_dataset(HUB_ID, HUB_CONFIG, split=split)
