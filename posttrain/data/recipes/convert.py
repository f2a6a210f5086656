"""`posttrain data convert`: your own rows with your own column names, as the rows that training and evaluation read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from posttrain.data.recipes.arithmetic import write_files
from posttrain.data.rows import DataError, RowTable, load_rows


def convert(
    file: str | os.PathLike[str],
    *,
    prompt_key: str,
    answer_key: str | None,
    data_source: str | None,
    out: str | os.PathLike[str] | None = None,
) -> tuple[Path, int]:
    """Write `prompt`, `ground_truth`, `data_source` and the other columns (in `extra_info`); gives path and rows."""
    target = Path(out).expanduser() if out is not None else _beside(Path(file).expanduser())
    if target.suffix not in (".parquet", ".json"):
        raise DataError(f"--out: {target} has a suffix that cannot be written; give NAME.parquet or NAME.json.")
    if target.resolve() == Path(file).expanduser().resolve():
        raise DataError(f"--out: {target} is the file that is read; name another one.")
    table = load_rows(file, setting="FILE")
    rows = [_row(table, number, prompt_key, answer_key, data_source) for number in range(len(table))]
    try:
        write_files(target.parent, {target.stem: rows}, suffix=target.suffix[1:])
    except (OSError, ValueError, TypeError) as error:  # pyarrow's errors are ValueErrors and TypeErrors
        raise DataError(f"{target} cannot be written: {error}. Columns of mixed types need a name in .json.") from error
    return target, len(rows)


def _beside(file: Path) -> Path:
    stem = file.name.split(".")[0]
    return file.with_name(f"{stem}.converted.parquet")


def _row(
    table: RowTable, number: int, prompt_key: str, answer_key: str | None, data_source: str | None
) -> dict[str, Any]:
    row = table.rows[number]
    for flag, key in (("--prompt-key", prompt_key), ("--answer-key", answer_key)):
        if key is not None and row.get(key) in (None, "", []):
            raise DataError(
                f"{flag} {key}: {table.where(number)} has nothing there; its columns are {', '.join(row) or 'none'}."
            )
    taken = {prompt_key, answer_key, "data_source" if data_source is None else None, "extra_info"}
    own = row["extra_info"] if isinstance(row.get("extra_info"), dict) else {}
    others = {key: value for key, value in row.items() if key not in taken}
    made: dict[str, Any] = {"prompt": row[prompt_key]}
    if answer_key is not None:
        answer = row[answer_key]
        made["ground_truth"] = answer if isinstance(answer, str | list | dict) else str(answer)
    source = data_source or row.get("data_source")
    if source is not None:
        made["data_source"] = str(source)
    made["extra_info"] = {"index": number, **others, **own}
    return made
